"""Differences among JAX 0.10.2 to 0.12, and between a TPU and its interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as _interpreter
from jax.experimental.pallas import tpu as pltpu


def tpu_cores() -> int:
    """Tensor cores of the target device that share a kernel's grid, 1 if unknown.

    Two on TPUs v4 and v5p, where both cores of a chip are one device.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.platform == "tpu":
        return described.num_cores or 1
    return getattr(jax.devices()[0], "num_cores", None) or 1


@contextlib.contextmanager
def tpu_interpreter(*, cores: int = 1) -> Iterator[Any]:
    """What to pass as `interpret` to run Mosaic TPU kernels on the host, with races detected.

    Uninitialised memory holds NaNs. Raises RuntimeError at the end when a race was found; until
    0.12 the interpreter itself only prints it. Not thread-safe. Passing True instead compiles a
    kernel to XLA, which is fast and detects nothing.

    cores: number of cores that share a kernel's grid.
    """
    try:
        yield pltpu.InterpretParams(
            detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores
        )
        races = _interpreter.races
        if races is not None and races.races_found:
            raise RuntimeError("The interpreter found a race; see its output.")
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
