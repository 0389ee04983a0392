"""Whether a kernel may be trusted on a device.

A kernel that is wrong on some device, or miscompiled for it, gives wrong answers without a sound.
So it is used without further ado only where `verified.json` says that it was found right: on this
kind of device, by this version of JAX, for shapes of this class. Elsewhere its first use is a small
random problem that XLA solves as well, and where they disagree it is not used.

`verified.json` is written on real devices, by the project's benchmark of its kernels. It is a tree:
{device kind: {JAX version: {operation: [classes of shapes]}}}.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

VERIFIED = Path(__file__).with_name("verified.json")


class Trial(NamedTuple):
    """A small problem of the same class as a call's, and how much results may differ by.

    An operation has two functions of a call's positional arguments, which may be tracers or only
    shapes, and its keyword ones. `shapes_class(*arguments, **options)` is a text that tells apart
    what may differ in being right. `trial(arguments, options, rng)` is the problem, random by a
    numpy Generator. `tolerance` is relative to a result's size and to 1.
    """

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    tolerance: float


def why_not(
    operation: str,
    device_kind: str,
    shapes: str,
    kernel: Callable[..., Any],
    xla: Callable[..., Any],
    trial: Callable[[np.random.Generator], Trial],
) -> str | None:
    """Why `kernel` must not be used on the default device for this class of shapes, else None.

    Tries it when nothing is known yet. May be called while something else is traced.
    """
    if shapes in verified().get(device_kind, {}).get(jax.__version__, {}).get(operation, ()):
        return None
    key = operation, device_kind, shapes
    with _lock:
        if key not in _tried:
            # What is being traced, and for which mesh, is a matter of threads: a new one has none.
            with ThreadPoolExecutor(1) as thread:
                _tried[key] = thread.submit(disagreement, kernel, xla, trial).result()
        return _tried[key]


_lock = threading.Lock()
_tried: dict[tuple[str, str, str], str | None] = {}


def disagreement(
    kernel: Callable[..., Any],
    xla: Callable[..., Any],
    trial: Callable[[np.random.Generator], Trial],
) -> str | None:
    """What speaks against `kernel` once both have done `trial` on the default device."""
    arguments, options, tolerance = trial(np.random.default_rng(0))
    expected = _run(xla, arguments, options)
    try:
        found = _run(kernel, arguments, options)
    except Exception as error:  # Whatever a compiler or a driver raises: XLA's path is there.
        return f"it failed at its first use: {error}"
    errors = map(_error, jax.tree.leaves(expected), jax.tree.leaves(found))
    worst = max(errors, default=0.0)
    if worst <= tolerance:
        return None
    return (
        f"at its first use on this device it was wrong by {worst:.2g}, where rounding explains "
        f"{tolerance:.2g}; please report it."
    )


def _run(function, arguments, options):
    program = jax.jit(functools.partial(function, **options)).lower(*arguments).compile()
    return jax.block_until_ready(program(*arguments))


def _error(expected, found) -> float:
    """The largest difference of two arrays, relative to `expected` and to 1."""
    expected, found = (np.asarray(array).astype(np.float64) for array in (expected, found))
    same = (expected == found) | (np.isnan(expected) & np.isnan(found))
    with np.errstate(invalid="ignore"):
        errors = np.abs(expected - found) / (1 + np.abs(expected))
    return float(np.max(np.where(same, 0, np.nan_to_num(errors, nan=np.inf)), initial=0))


def verified() -> dict[str, dict[str, dict[str, list[str]]]]:
    """What `verified.json` says."""
    return _read(VERIFIED)


@functools.cache
def _read(path: Path):
    return json.loads(path.read_text())


def random_like(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Normal numbers, in integer dtypes rounded ones of a tenth of the range."""
    dtype = jnp.dtype(dtype)
    values = rng.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.integer):
        values = np.clip(np.round(values * jnp.iinfo(dtype).max / 10), *_range(dtype))
    return values.astype(dtype)


def _range(dtype):
    return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max


def eps(dtype: Any) -> float:
    """Distance from 1 to the next number of a floating dtype."""
    return float(jnp.finfo(dtype).eps)
