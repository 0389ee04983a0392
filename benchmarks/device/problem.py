"""A case made concrete: functions and their arguments, which are arrays or only their shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from device import errors

Step = Callable[[Any, Any], tuple[Any, Any]]
"""(carry, inputs) -> (carry, result): one call of an operation. `carry` is what it changes in
place, and what all calls read."""

ENOUGH_BYTES = 1 << 30
MAX_CALLS = 8


class Make(Protocol):
    """Makes the leaves of arguments. A benchmark gets arrays, a dry run their shapes."""

    rng: np.random.Generator

    def random(self, *shape: int, dtype: Any) -> jax.Array:
        """Normal numbers; of an integer dtype, random bits."""

    def known(self, values: Any, dtype: Any = jnp.int32) -> jax.Array:
        """These values."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a case computes, by whom, and the least it could cost.

    carry, inputs: of a Make, the arguments of a Step; `inputs` of one call among several, which
        each have their own.
    kernel: the step to measure.
    xla: the same without our kernel, or None where there is nothing else.
    exact: a step whose results are right, or None where nothing is to be compared.
    error, tolerance: how far a result is from what `exact` has (see `errors.py`), and may be.
    bytes_moved: that must be read or written at the least.
    flops: that must be done, 2 for a multiplication and an addition.
    """

    carry: Callable[[Make], Any]
    inputs: Callable[[Make], Any]
    kernel: Step
    bytes_moved: int
    flops: int = 0
    xla: Step | None = None
    exact: Step | None = None
    error: Callable[[Any, Any], jax.Array] | None = None
    tolerance: float = 0.0

    @property
    def calls(self) -> int:
        """Calls in one program: enough to keep the device busy while the host issues the next.

        ENOUGH_BYTES take an H200 at least 0.22 ms (arithmetic, 4.8 TB/s). MAX_CALLS of a weight
        of 33 MB take 0.05 ms and are five times what its second-level cache holds. Operations that
        take 0.1 ms are one call.
        """
        if self.flops > 1e11:
            return 1
        return min(MAX_CALLS, math.ceil(ENOUGH_BYTES / self.bytes_moved))

    def worst(self, found: tuple[Any, list[Any]], exact: tuple[Any, list[Any]]) -> jax.Array:
        """The largest error of what `program` returned. A carry must be right to the last bit."""
        errors_found = [self.error(*pair) for pair in zip(found[1], exact[1])]
        return jnp.max(jnp.stack([*errors_found, errors.differing(found[0], exact[0])]))


def program(step: Step, carry: Any, calls: list[Any]) -> tuple[Any, list[Any]]:
    """One call after the other. To be jitted with the carry donated."""
    step = jax.jit(step)  # traced once for all calls
    results = []
    for inputs in calls:
        carry, result = step(carry, inputs)
        results.append(result)
    return carry, results


def jitted(step: Step) -> Any:
    return jax.jit(functools.partial(program, step), donate_argnums=0)


class Shapes:
    """A Make of shapes alone, for a device that need not be there."""

    def __init__(self, sharding: jax.sharding.Sharding | None) -> None:
        self.rng = np.random.default_rng(0)
        self._sharding = sharding

    def random(self, *shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def known(self, values, dtype=jnp.int32):
        return self.random(*np.shape(values), dtype=dtype)


class Arrays:
    """A Make of arrays on the default device, fresh ones each time."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def random(self, *shape, dtype):
        return _random(self.rng.integers(1 << 31), shape, jnp.dtype(dtype))

    def known(self, values, dtype=jnp.int32):
        return jnp.asarray(values, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(seed, shape, dtype):
    key = jax.random.key(seed, impl="rbg")  # the quickest to compile
    if jnp.issubdtype(dtype, jnp.integer):
        return lax.bitcast_convert_type(
            jax.random.bits(key, shape, f"u{dtype.name.strip('u')}"), dtype
        )
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)
