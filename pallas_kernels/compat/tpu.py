"""What differs among JAX 0.10.2 to 0.12, and between a TPU and its interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as _interpreter
from jax.experimental.pallas import tpu as pltpu


def tpu_cores() -> int:
    """Tensor cores that the device traced for shares a kernel's grid among, 1 where nothing says.

    Two on TPUs v4 and v5p, where both of a chip's are one device.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.platform == "tpu":
        return described.num_cores or 1
    return getattr(jax.devices()[0], "num_cores", None) or 1


@contextlib.contextmanager
def tpu_interpreter(*, cores: int = 1) -> Iterator[Any]:
    """What to pass as `interpret` to run Mosaic TPU kernels on the host, with races detected.

    Uninitialised memory holds NaNs. Raises RuntimeError at the end when a race was found; until
    0.12 the interpreter itself only prints it. Not for several threads of Python at once. Passing
    True instead compiles a kernel to XLA, which is fast and detects nothing.

    cores: those that share the grid of a kernel.
    """
    try:
        yield pltpu.InterpretParams(
            detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores
        )
        races = _interpreter.races
        if races is not None and races.races_found:
            raise RuntimeError("The interpreter found a race; see what it printed.")
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
