"""A decode step through layers of a model's size: unrolled, or one loop over stacked weights."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from device.attention import Attention
from device.problem import Make, Problem
from pallas_kernels.paged_attention import RaggedBatch, write_kv

_ATTENTION = Attention((1024,) * 64)


@dataclasses.dataclass(frozen=True)
class DecodeLayers:
    """64 rows of 1k tokens through 8 layers of Llama 3 8B's size, without norms and rotations.

    "unrolled": each layer has weights and pages of its own. "scanned": weights are stacked and a
    loop takes one slice of them after the other; a pool has the pages of all layers, so that
    it can be changed in place.
    """

    how: Literal["unrolled", "scanned"]
    layers: int = 8
    hidden: int = 4096
    intermediate: int = 14336
    attention: Attention = _ATTENTION

    @property
    def op(self) -> str:
        return "decode_layers"

    @property
    def weight_shapes(self) -> dict[str, tuple[int, int]]:
        a = self.attention
        return {
            "qkv": (self.hidden, (a.heads + 2 * a.kv_heads) * a.head_dim),
            "o": (a.heads * a.head_dim, self.hidden),
            "up": (self.hidden, 2 * self.intermediate),
            "down": (self.intermediate, self.hidden),
        }

    def carry(self, make: Make) -> tuple[jax.Array, Any, Any]:
        """Activations, weights and pages: lists of each layer's, or arrays for all."""

        def weights(*stack):
            return {
                name: make.random(*stack, *shape, dtype="bfloat16")
                for name, shape in self.weight_shapes.items()
            }

        def pages(pools):
            return jax.tree.map(
                lambda s: make.random(pools * s.shape[0], *s.shape[1:], dtype=s.dtype),
                self.attention.pages.shapes,
            )

        x = make.random(len(self.attention.contexts), self.hidden, dtype="bfloat16")
        if self.how == "scanned":
            return x, weights(self.layers), pages(self.layers)
        each = range(self.layers)
        return x, [weights() for _ in each], [pages(1) for _ in each]

    def inputs(self, make: Make) -> RaggedBatch:
        """The batch."""
        return self.attention.batch(make)

    def problem(self) -> Problem:
        per_layer = sum(2 * rows * columns for rows, columns in self.weight_shapes.values())
        return Problem(
            carry=self.carry,
            inputs=self.inputs,
            kernel=self._unrolled if self.how == "unrolled" else self._scanned,
            bytes_moved=self.layers * (per_layer + self.attention.bytes_moved),
        )

    def _unrolled(self, carry, batch):
        x, weights, pages = carry
        layer, written = jax.jit(self._layer), []  # traced once for all layers
        for weight, pool in zip(weights, pages):
            x, pool = layer(x, pool, weight, batch)
            written.append(pool)
        return (x, weights, written), ()

    def _scanned(self, carry, batch):
        x, weights, pages = carry

        def layer(carry, of_layer):
            weight, first_page = of_layer
            own = batch._replace(tables=batch.tables + first_page)
            return self._layer(*carry, weight, own), None

        first_pages = jnp.arange(self.layers) * self.attention.pages.num_pages
        (x, pages), _ = lax.scan(layer, (x, pages), (weights, first_pages))
        return (x, weights, pages), ()

    def _layer(self, x, pages, weight, batch):
        a = self.attention
        q, k, v = jnp.split(
            (x @ weight["qkv"]).reshape(len(x), -1, a.head_dim), (a.heads, a.heads + a.kv_heads), 1
        )
        last = batch.context - 1
        page_ids = jnp.take_along_axis(batch.tables, last[:, None] // a.page_size, 1)[:, 0]
        pages = write_kv(pages, k, v, page_ids, last % a.page_size)
        out, _ = a.attend("pallas", q, pages, batch)
        x = x + out.reshape(len(x), -1) @ weight["o"]
        gate, up = jnp.split(x @ weight["up"], 2, axis=1)
        x = x + (jax.nn.silu(gate) * up) @ weight["down"]
        # Without norms, what grows must be kept in bounds.
        return x / (1 + jnp.max(jnp.abs(x))), pages
