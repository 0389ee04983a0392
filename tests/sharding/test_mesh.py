"""Meshes of real (virtual CPU) devices, in one process and in several."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import jax
import pytest
from scripts import on_eight_devices

from sharding_rules import MESH_AXES, make_mesh


@on_eight_devices
def test_all_devices_in_order_with_tensor_innermost():
    mesh = make_mesh(stage=2, tensor=4)
    assert mesh.axis_names == MESH_AXES == ("stage", "seq", "tensor")
    assert dict(mesh.shape) == {"stage": 2, "seq": 1, "tensor": 4}
    ids = [[device.id for device in row] for row in mesh.devices[:, 0]]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]
    two = jax.devices()[6:]
    assert list(make_mesh(seq=2, devices=two).devices.flat) == two


@on_eight_devices
def test_degrees_that_do_not_multiply_out_are_refused_with_what_would_work():
    with pytest.raises(ValueError, match=r"takes 6 .* are 8; .*: tensor 4, or only 6 of the dev"):
        make_mesh(stage=2, tensor=3)
    with pytest.raises(ValueError, match=r"takes 16 .* are 8; what would work: seq 1, or tensor 4"):
        make_mesh(seq=2, tensor=8)
    with pytest.raises(ValueError, match=r"takes 15 .* are 8; .* degrees whose product is 8"):
        make_mesh(seq=3, tensor=5)


@pytest.mark.parametrize("degree", [0, -1])
def test_degrees_below_one_are_refused(degree):
    with pytest.raises(ValueError, match=f"'seq' has degree {degree}; it must be at least 1"):
        make_mesh(seq=degree)


def test_what_talks_most_stays_within_a_process():
    """Two hosts of four devices: the outermost axis of more than one device crosses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = """
        import sys, jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
        jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
        from sharding_rules import make_mesh

        def hosts(**degrees):
            ranks = make_mesh(**degrees).devices.reshape(-1, degrees["tensor"])
            return ["".join(str(device.process_index) for device in row) for row in ranks]

        print(hosts(stage=2, tensor=4), hosts(stage=2, seq=2, tensor=2),
              hosts(seq=4, tensor=2), hosts(tensor=8), sep="; ")
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), f"127.0.0.1:{port}", str(rank)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), ended
    pairs = "['00', '00', '11', '11']"
    expected = f"['0000', '1111']; {pairs}; {pairs}; ['00001111']\n"
    assert [out for out, _ in ended] == [expected, expected]
