"""Parts of JAX without a public name: only one module uses them, and they do what it says."""

from __future__ import annotations

import re
from pathlib import Path

from patience import PATIENCE_S
from scripts import run_script

from jaxserve.runtime.hardware.jax_private import detect_cluster

ROOT = Path(__file__).parents[2]


def test_one_module_of_jaxserve_imports_private_jax():
    private = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jaxserve").rglob("*.py")
        if re.search(r"^\s*(from|import) jax\._src", path.read_text(), re.M)
    }
    assert private == {"jaxserve/runtime/hardware/jax_private.py"}


def test_a_cluster_is_detected_under_slurm_and_nowhere_else(monkeypatch):
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert detect_cluster(10) is None
    for name, value in {
        "SLURM_JOB_ID": "123",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "2",
    }.items():
        monkeypatch.setenv(name, value)
    coordinator, num_hosts, host = detect_cluster(10)
    assert coordinator.startswith("node3:")
    assert (num_hosts, host) == (2, 1)


def test_devices_are_open_once_one_is_used():
    run_script(
        """
        import jax
        jax.config.update("jax_platforms", "cpu")
        from jaxserve.runtime.hardware.jax_private import devices_are_open

        assert not devices_are_open()
        jax.devices()
        assert devices_are_open()
        """,
        timeout_s=PATIENCE_S,
    )


def test_values_are_set_waited_for_listed_and_deleted():
    run_script(
        """
        import socket, threading
        import jax, pytest
        jax.config.update("jax_platforms", "cpu")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)
        from jaxserve.runtime.hardware.hosts import KeyValueStore, StoreError

        store = KeyValueStore()
        store.set("job/a", b"\\x00\\xff")
        assert store.get("job/a", 1.0) == b"\\x00\\xff"
        with pytest.raises(StoreError):
            store.set("job/a", b"again")
        store.set("job/a", b"again", overwrite=True)
        store.set("jobs/c", b"of another")
        with pytest.raises(TimeoutError):
            store.get("job/b", 0.3)
        threading.Timer(0.2, store.set, ("job/b", b"late")).start()
        assert store.get("job/b", 300.0) == b"late"
        assert store.list("job/") == {"job/a": b"again", "job/b": b"late"}
        store.delete("job/a")
        assert store.list("job/") == {"job/b": b"late"}
        jax.distributed.shutdown()
        with pytest.raises(StoreError):
            store.set("job/d", b"")
        """,
        timeout_s=PATIENCE_S,
    )
