"""Parts of products, residuals and norms, at real shapes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from device import errors
from device.problem import Make, Problem
from pallas_kernels.residual_norm import add_and_norm
from pallas_kernels.self_check import eps

_EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class ResidualNorm:
    """`parts` float32 parts of a product of `tokens` tokens, added to a bfloat16 residual."""

    tokens: int
    parts: int = 8
    hidden: int = 4096

    @property
    def op(self) -> str:
        return "add_and_norm"

    def arguments(self, make: Make) -> tuple[jax.Array, jax.Array, jax.Array]:
        shape = self.tokens, self.hidden
        x = make.random(*shape, dtype="bfloat16")
        parts = make.random(self.parts, *shape, dtype="float32")
        return x, parts, make.random(self.hidden, dtype="bfloat16")

    def problem(self) -> Problem:
        """All of it read once; the sum and its norm written once. XLA has the parts, too."""

        def by(backend):
            return lambda carry, inputs: (
                carry,
                jnp.stack(add_and_norm(*inputs, eps=_EPS, backend=backend)),
            )

        return Problem(
            carry=lambda make: (),
            inputs=self.arguments,
            kernel=by("pallas"),
            xla=by("xla"),
            exact=lambda carry, inputs: (carry, _exactly(*inputs)),
            error=errors.in_rows,
            tolerance=16 * eps("bfloat16"),
            bytes_moved=self.tokens * self.hidden * (4 * self.parts + 6) + 2 * self.hidden,
        )


def _exactly(x, parts, weight):
    added = x.astype(jnp.float32) + jnp.sum(parts, axis=0)
    mean = jnp.mean(added * added, axis=-1, keepdims=True)
    return jnp.stack([added, added * jax.lax.rsqrt(mean + _EPS) * weight.astype(jnp.float32)])
