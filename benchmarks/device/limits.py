"""What the device can do at most: copies and products that are measured, not quoted."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from device.problem import Problem


@dataclasses.dataclass(frozen=True)
class Limit:
    """Bytes read a second by the maximum of 2 GiB, read and written by a copy of them, or the rate
    of a product of squares.

    "copy" is what XLA hands to the driver, "read" and "negate" are kernels that XLA writes.
    """

    what: Literal["read", "copy", "negate", "matmul"]

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
        act = {"read": jnp.max, "copy": jnp.copy, "negate": jnp.negative}[self.what]
        return Problem(
            carry=lambda make: (),
            inputs=lambda make: make.random(1 << 30, dtype="bfloat16"),
            kernel=lambda carry, inputs: (carry, act(inputs)),
            bytes_moved=(1 if self.what == "read" else 2) << 31,
        )
