"""Meshes over TPU slices that are only described: nearest chips innermost, slices crossed last."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tpu  # noqa: F401  (sets what libtpu reads)
from jax.experimental import topologies

from sharding_rules import make_mesh

pytestmark = pytest.mark.deviceless


@functools.cache
def chips(num_slices: int = 1) -> list:
    """Chips of v5e slices of 4x4."""
    described = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:4x4", num_slices=num_slices
    )
    return described.devices


def hops(ring: np.ndarray) -> list[int]:
    """Links between each chip of a ring and the next."""
    coords = np.array([chip.coords for chip in ring])
    return np.abs(coords - np.roll(coords, -1, axis=0)).sum(axis=1).tolist()


def test_tensor_goes_around_a_ring_of_neighbours():
    [ring] = make_mesh(tensor=16, devices=chips()).devices.reshape(1, 16)
    assert hops(ring) == [1] * 16


def test_stages_are_rows_of_the_torus():
    mesh = make_mesh(stage=4, tensor=4, devices=chips())
    for row in mesh.devices.reshape(4, 4):
        assert len({tuple(chip.coords[1:]) for chip in row}) == 1


@pytest.mark.parametrize(
    ("degrees", "crossing"),
    [
        ({"stage": 4, "tensor": 8}, "stage"),
        ({"stage": 2, "seq": 2, "tensor": 8}, "stage"),
        ({"seq": 4, "tensor": 8}, "seq"),
        ({"tensor": 32}, "tensor"),
    ],
)
def test_the_outermost_axis_crosses_slices(degrees, crossing):
    mesh = make_mesh(**degrees, devices=chips(num_slices=2))
    slices = np.vectorize(lambda chip: chip.slice_index)(mesh.devices)
    crosses = {
        name
        for axis, name in enumerate(mesh.axis_names)
        if not (slices == slices.take([0], axis=axis)).all()
    }
    assert crosses == {crossing}


def test_slices_of_unequal_size_are_refused():
    with pytest.raises(ValueError, match=r"equally many devices; they have 0: 16, 1: 8"):
        make_mesh(stage=3, tensor=8, devices=chips(num_slices=2)[:24])


def test_chips_that_lie_scattered_are_refused():
    scattered = [chip for chip in chips() if chip.coords[:2] in ([0, 0], [1, 1], [2, 2], [3, 3])]
    with pytest.raises(ValueError, match=r"\(0, 0, 0\), \(1, 1, 0\).* do not fill a box"):
        make_mesh(tensor=4, devices=scattered)
