"""What the device can do at most: copies and products that are measured, not quoted."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from device.problem import Problem


@dataclasses.dataclass(frozen=True)
class Limit:
    """Bytes read and written a second by a copy of 2 GiB, or the rate of a product of squares.

    "copy" is what XLA hands to the driver, "negate" a kernel that XLA writes.
    """

    what: Literal["copy", "negate", "matmul"]

    @property
    def op(self) -> str:
        return self.what

    def problem(self) -> Problem:
        if self.what == "matmul":
            size = 8192
            return Problem(
                carry=lambda make: (),
                inputs=lambda make: [make.random(size, size, dtype="bfloat16") for _ in range(2)],
                kernel=lambda carry, inputs: (carry, jnp.matmul(*inputs)),
                bytes_moved=3 * 2 * size**2,
                flops=2 * size**3,
            )
        act = jnp.copy if self.what == "copy" else jnp.negative
        return Problem(
            carry=lambda make: (),
            inputs=lambda make: make.random(1 << 30, dtype="bfloat16"),
            kernel=lambda carry, inputs: (carry, act(inputs)),
            bytes_moved=2 << 31,
        )
