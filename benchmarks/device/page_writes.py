"""New keys and values written into pages, at real shapes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from device import errors
from device.problem import Make, Problem
from pallas_kernels.paged_attention import KVPages, PageLayout, write_kv


@dataclasses.dataclass(frozen=True)
class PageWrite:
    """`tokens` new tokens of one layer, each to a place of its own somewhere in the pool."""

    tokens: int
    num_pages: int = 1025
    page_size: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str | None = None

    @property
    def op(self) -> str:
        return "write_kv"

    @property
    def layout(self) -> PageLayout:
        dtype = jnp.dtype(self.kv_dtype or self.dtype)
        return PageLayout(self.num_pages, self.page_size, self.kv_heads, self.head_dim, dtype)

    def carry(self, make: Make) -> KVPages:
        """The pool."""
        return jax.tree.map(lambda s: make.random(*s.shape, dtype=s.dtype), self.layout.shapes)

    def inputs(self, make: Make):
        """Keys, values, page ids and offsets."""
        k, v = (
            make.random(self.tokens, self.kv_heads, self.head_dim, dtype=self.dtype) for _ in "kv"
        )
        places = make.rng.permutation((self.num_pages - 1) * self.page_size)[: self.tokens]
        ids, offsets = 1 + places // self.page_size, places % self.page_size
        return k, v, make.known(ids), make.known(offsets)

    def problem(self) -> Problem:
        """Elements read once and written once; on a GPU all of it is XLA's."""
        written = 2 * self.kv_heads * self.head_dim * self.tokens
        item_bytes = self.layout.dtype.itemsize + jnp.dtype(self.dtype).itemsize
        return Problem(
            carry=self.carry,
            inputs=self.inputs,
            kernel=self._write,
            bytes_moved=written * item_bytes,
            exact=self._write_one_by_one,
            error=errors.differing,
        )

    def _write(self, pages, inputs):
        return write_kv(pages, *inputs, k_scale=self._scale, v_scale=self._scale), ()

    def _write_one_by_one(self, pages, inputs):
        k, v, ids, offsets = inputs
        if self.kv_dtype == "int8":
            k, v = (jnp.clip(jnp.round(x.astype(jnp.float32) * 64), -127, 127) for x in (k, v))
        dtype = self.layout.dtype
        return KVPages(
            pages.k.at[ids, :, :, offsets].set(k.astype(dtype)),
            pages.v.at[ids, :, offsets].set(v.astype(dtype)),
        ), ()

    @property
    def _scale(self):
        return jnp.full(self.kv_heads, 1 / 64) if self.kv_dtype == "int8" else None
