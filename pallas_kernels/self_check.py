"""Self-check of kernels: whether a kernel gives correct results on a device.

A kernel that is wrong on some device, or miscompiled for it, fails silently. It is used without a
self-check only where `verified.json` lists it as correct: for this kind of device, this version of
JAX and this class of shapes. Elsewhere, before its first use, it and XLA run a small random
problem; if they disagree, the kernel is not used.

`verified.json` is written on real devices by the project's kernel benchmark. It is a tree:
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


class CheckCase(NamedTuple):
    """A small problem of the same shapes class as a call, and the allowed error.

    An operation has two functions of a call's positional arguments, which may be tracers or only
    shapes, and its keyword arguments. `shapes_class(*arguments, **options)` is a string; calls with
    equal strings share one self-check. `check_case(arguments, options, rng)` is a problem, random
    by a numpy Generator. `tolerance` is relative to a result's size and to 1.
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
    check_case: Callable[[np.random.Generator], CheckCase],
) -> str | None:
    """Why `kernel` must not be used on the default device for this class of shapes, else None.

    Runs the self-check unless its result is known. May be called during tracing.
    """
    if shapes in verified().get(device_kind, {}).get(jax.__version__, {}).get(operation, ()):
        return None
    key = operation, device_kind, shapes
    with _lock:
        if key not in _tried:
            # Trace and mesh contexts are thread-local: a new thread has neither.
            with ThreadPoolExecutor(1) as thread:
                _tried[key] = thread.submit(disagreement, kernel, xla, check_case).result()
        return _tried[key]


_lock = threading.Lock()
_tried: dict[tuple[str, str, str], str | None] = {}


def disagreement(
    kernel: Callable[..., Any],
    xla: Callable[..., Any],
    check_case: Callable[[np.random.Generator], CheckCase],
) -> str | None:
    """Run `check_case` with both on the default device: why `kernel` is wrong, else None."""
    arguments, options, tolerance = check_case(np.random.default_rng(0))
    expected = _run(xla, arguments, options)
    try:
        found = _run(kernel, arguments, options)
    except Exception as error:  # any compiler or driver error: fall back to XLA
        return f"its self-check raised: {error}"
    errors = map(_error, jax.tree.leaves(expected), jax.tree.leaves(found))
    worst = max(errors, default=0.0)
    if worst <= tolerance:
        return None
    return (
        f"its self-check on this device was wrong by {worst:.2g}; rounding explains "
        f"{tolerance:.2g}. Please report it."
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
    """Contents of `verified.json`."""
    return _read(VERIFIED)


@functools.cache
def _read(path: Path):
    return json.loads(path.read_text())


def random_like(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Normal numbers; for integer dtypes rounded, with a tenth of the range as the deviation."""
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
