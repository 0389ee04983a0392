"""Joining JAX's distributed runtime: what is refused, by name and before JAX ends the process."""

from __future__ import annotations

import pytest
from patience import PATIENCE_S
from scripts import run_script

from jaxserve.core.errors import DistributedError
from jaxserve.distributed.runtime import join

pytestmark = pytest.mark.meshes

# What the scripts below begin with: a host that is a job by itself.
ALONE = """
            import jax, socket, pytest
            jax.config.update("jax_platforms", "cpu")
            from jaxserve.distributed.runtime import join
            from jaxserve.core.errors import DistributedError
            with socket.create_server(("127.0.0.1", 0)) as server:
                address = f"127.0.0.1:{server.getsockname()[1]}"
"""


@pytest.mark.parametrize(("host", "num_hosts"), [(2, 2), (-1, 2), (0, 0)])
def test_a_host_number_out_of_range_is_refused_with_both(host, num_hosts):
    with pytest.raises(DistributedError, match=f"host is {host} and num_hosts {num_hosts}"):
        join("127.0.0.1:80", num_hosts, host)


def test_a_job_told_in_part_is_refused():
    with pytest.raises(DistributedError, match="num_hosts None"):
        join("127.0.0.1:80", None, 0)


def test_a_host_joins_once_and_has_the_devices_it_asks_for():
    run_script(
        ALONE
        + """
            join(address, 1, 0, devices=3)
            assert jax.device_count() == 3
            with pytest.raises(DistributedError, match="has already joined the other hosts"):
                join(address, 1, 0)
        """,
        timeout_s=PATIENCE_S,
    )


@pytest.mark.parametrize("devices", [None, 3])
def test_joining_after_the_first_array_is_refused(devices):
    run_script(
        ALONE
        + f"""
            jax.devices()
            with pytest.raises(DistributedError, match="JAX is already initialized"):
                join(address, 1, 0, devices={devices})
        """,
        timeout_s=PATIENCE_S,
    )


def test_where_jax_finds_no_job_it_says_what_to_give():
    run_script(
        ALONE
        + """
            with pytest.raises(DistributedError, match="Give coordinator, num_hosts and host"):
                join()
        """,
        timeout_s=PATIENCE_S,
    )


DETECTED = """
    import os, sys, threading
    import jax
    jax.config.update("jax_platforms", "cpu")
    from jaxserve.distributed import rendezvous
    from jaxserve.distributed.runtime import _detect, join
    from jaxserve.core.errors import DistributedError
    os.environ |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost",
                   "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    address, num_hosts, host = _detect(5)
    assert (address.name, num_hosts, host) == ("localhost", 2, 0)
"""


def test_hosts_that_jax_detects_prove_that_they_know_the_secret_too():
    """In the environment of a task of Slurm."""
    run_script(
        DETECTED
        + """
    os.environ["JAXSERVE_JOB_SECRET"] = "ours"
    other = rendezvous.Participant(1, 2, {})
    told = []
    def impostor():
        try:
            rendezvous.join_host_0(address, other, 5, "guess")
        except DistributedError as error:
            told.append(str(error))
    thread = threading.Thread(target=impostor)
    thread.start()
    try:
        join(timeout_s=3)
    except DistributedError as error:
        assert "missing: 1." in str(error), error
        assert "without this job's secret: 1." in str(error), error
    else:
        raise AssertionError("it has joined")
    thread.join()
    assert "another job secret" in told[0], told
""",
        timeout_s=PATIENCE_S,
    )


def test_two_hosts_that_jax_detects_join_with_a_secret():
    run_script(
        DETECTED
        + """
    import subprocess
    os.environ["JAXSERVE_JOB_SECRET"] = "ours"
    code = ("import jax; jax.config.update('jax_platforms', 'cpu')\\n"
            "from jaxserve.distributed.runtime import join\\n"
            "join(devices=1, timeout_s=300); import os; os._exit(jax.device_count())")
    other = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"SLURM_PROCID": "1"})
    join(devices=1, timeout_s=300)
    assert jax.device_count() == 2
    assert other.wait(300) == 2
    os._exit(0)  # JAX would wait for the other host, which has ended likewise
""",
        timeout_s=PATIENCE_S,
    )
