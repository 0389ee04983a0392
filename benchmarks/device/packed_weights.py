"""Products with packed weights at real shapes."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from device import errors
from device.problem import Make, Problem
from pallas_kernels.quantized_matmul import (
    Format,
    QuantizedWeight,
    abstract_weight,
    dequantize,
    quantized_matmul,
)
from pallas_kernels.self_check import eps


@dataclasses.dataclass(frozen=True)
class PackedMatmul:
    """A weight [num_outputs, num_inputs] in `format`, times `tokens` rows of `dtype`."""

    format: Format
    tokens: int
    num_outputs: int = 4096
    num_inputs: int = 14336
    dtype: str = "bfloat16"

    @property
    def op(self) -> str:
        return "quantized_matmul"

    @property
    def weight(self) -> QuantizedWeight:
        """Its shapes."""
        return abstract_weight(self.num_outputs, self.num_inputs, self.format)

    def arguments(self, make: Make) -> tuple[QuantizedWeight, jax.Array]:
        weight = jax.tree.map(lambda s: make.random(*s.shape, dtype=s.dtype), self.weight)
        return weight, make.random(self.tokens, self.num_inputs, dtype=self.dtype)

    def problem(self) -> Problem:
        """The weight's bytes, what it multiplies, and products of the result's dtype."""
        result = "bfloat16" if self.dtype == "float8_e4m3fn" else self.dtype
        activations = self.tokens * (
            self.num_inputs * jnp.dtype(self.dtype).itemsize
            + self.num_outputs * jnp.dtype(result).itemsize
        )
        packed = sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(self.weight))
        return Problem(
            carry=lambda make: (),
            inputs=self.arguments,
            kernel=lambda carry, inputs: (carry, quantized_matmul(*inputs, backend="pallas")),
            xla=lambda carry, inputs: (carry, quantized_matmul(*inputs, backend="xla")),
            exact=lambda carry, inputs: (carry, _exactly(*inputs)),
            error=errors.in_rows,
            tolerance=4 * eps(result),
            bytes_moved=packed + activations,
            flops=2 * self.num_outputs * self.num_inputs * self.tokens,
        )


def _exactly(weight, x):
    return jnp.matmul(x.astype(jnp.float32), dequantize(weight).T, precision="highest")
