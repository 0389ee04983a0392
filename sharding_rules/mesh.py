"""Device meshes, ordered so that devices that communicate most are nearest."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from sharding_rules.axes import MESH_AXES, SEQ, STAGE, TENSOR


def make_mesh(
    *,
    stage: int = 1,
    seq: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Mesh of `devices` (by default all) with the axes `MESH_AXES`.

    Within a slice (TPUs joined by their torus, hosts that are one NVLink domain or one machine)
    `tensor` gets the nearest devices. Across slices goes `stage` first, then `seq`, and
    `tensor` last. Raises ValueError when the product of the degrees is not the number of
    devices, when slices differ in size, and when TPUs do not fill a box.
    """
    devices = list(jax.devices() if devices is None else devices)
    degrees = {STAGE: stage, SEQ: seq, TENSOR: tensor}
    _check(degrees, len(devices))
    across = _across_slices(degrees, devices)
    within = [degree // factor for degree, factor in zip(degrees.values(), across, strict=True)]
    try:
        if math.prod(across) == 1:
            grid = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
        else:
            grid = mesh_utils.create_hybrid_device_mesh(
                within, across, devices, allow_split_physical_axes=True
            )
    except AssertionError as error:  # raised by JAX for scattered chips
        coordinates = ", ".join(str(tuple(device.coords)) for device in devices)
        raise ValueError(
            f"the chips at {coordinates} do not fill a box; choose devices that do."
        ) from error
    return Mesh(grid, tuple(degrees), axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _check(degrees: dict[str, int], num_devices: int) -> None:
    for axis, degree in degrees.items():
        if degree < 1:
            raise ValueError(f"mesh axis {axis!r} has degree {degree}; it must be at least 1.")
    total = math.prod(degrees.values())
    if total == num_devices:
        return
    choices = [
        f"{axis} {degree * num_devices // total}"
        for axis, degree in degrees.items()
        if degree * num_devices % total == 0
    ]
    if total < num_devices:
        choices.append(f"only {total} of the devices")
    if not choices:
        choices.append(f"degrees whose product is {num_devices}")
    product = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    raise ValueError(
        f"a mesh of {product} takes {total} devices, but there are {num_devices}; "
        f"what would work: {', or '.join(choices)}."
    )


def _across_slices(degrees: dict[str, int], devices: Sequence[jax.Device]) -> list[int]:
    """The factor of each degree that is across slices: outer axes first."""
    # With several processes, JAX numbers the slices from information about their hosts.
    sizes = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{index}: {size}" for index, size in sorted(sizes.items()))
        raise ValueError(f"slices must have equally many devices; they have {each}.")
    # Equal slices divide the devices, and so the product of degrees: the remainder ends at 1.
    remaining = len(sizes)
    across = []
    for degree in degrees.values():
        across.append(math.gcd(degree, remaining))
        remaining //= across[-1]
    return across
