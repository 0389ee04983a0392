"""Paged attention at real shapes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from device import errors
from device.problem import Make, Problem
from pallas_kernels.paged_attention import KVPages, PageLayout, RaggedBatch, paged_attention
from pallas_kernels.self_check import eps


@dataclasses.dataclass(frozen=True)
class Attention:
    """A batch of rows that each own the pages of their context, in random order.

    decodes: contexts of the rows with one new token, which comes last.
    chunks: (context, new tokens) of the others.
    kv_dtype: of pages, that of queries unless given.
    kv_scale: of elements of quantized pages; unless given, 1 / 64 of integers, so that values are
        of about 1 in size, and 1 of others.
    scaled: whether quantized tokens have scales of their own, as those of an engine.
    sinks: whether heads have them.
    tree: most tokens of a chunk that is a speculation tree, a binary one; none unless given.
    sms: multiprocessors that the kernel uses, all of them unless given.
    """

    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    kv_scale: float | None = None
    scaled: bool = False
    sinks: bool = False
    tree: int = 0
    sms: int | None = None

    @property
    def op(self) -> str:
        return "paged_attention"

    @property
    def contexts(self) -> tuple[int, ...]:
        return (*self.decodes, *(context for context, _ in self.chunks))

    @property
    def lengths(self) -> tuple[int, ...]:
        """New tokens of each row."""
        return (*(1 for _ in self.decodes), *(new for _, new in self.chunks))

    @property
    def is_plain_decode(self) -> bool:
        """Decodes of equal contexts, without any option and with pages that are not quantized."""
        return not self.chunks and len(set(self.decodes)) == 1 and self._is_plain

    @property
    def is_plain_prefill(self) -> bool:
        """Likewise whole prompts of equal length."""
        whole = all(context == new for context, new in self.chunks)
        return not self.decodes and len(set(self.chunks)) == 1 and whole and self._is_plain

    @property
    def _is_plain(self) -> bool:
        return not (self.window or self.soft_cap or self.kv_dtype or self.sinks or self.tree)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def pages(self) -> PageLayout:
        needed = sum(-(-context // self.page_size) for context in self.contexts)
        dtype = jnp.dtype(self.kv_dtype or self.dtype)
        shape = 1 + needed, self.page_size, self.kv_heads, self.head_dim
        return PageLayout(*shape, dtype, scaled=self.scaled)

    @property
    def seen(self) -> int:
        """Pairs of a token and a position that it sees."""
        window = self.window or max(self.contexts)
        ends = [context - np.arange(new) for context, new in zip(self.contexts, self.lengths)]
        return int(np.minimum(np.concatenate(ends), window).sum())

    @property
    def bytes_moved(self) -> int:
        """Keys and values that any token of a row sees, queries and results."""
        window = self.window or max(self.contexts)
        read = sum(min(c, window + new - 1) for c, new in zip(self.contexts, self.lengths))
        token = self.pages.page_bytes // self.page_size
        tokens = sum(self.lengths) * self.heads * self.head_dim
        return read * token + 2 * tokens * jnp.dtype(self.dtype).itemsize

    def batch(self, make: Make) -> RaggedBatch:
        """Each row's pages are anywhere in the pool; unused entries of the tables are 0."""
        lengths, contexts = np.array(self.lengths), np.array(self.contexts)
        used = -(-contexts // self.page_size)
        tables = np.zeros((len(used), used.max()), np.int32)
        tables[np.arange(used.max()) < used[:, None]] = 1 + make.rng.permutation(used.sum())
        starts = np.cumsum(lengths) - lengths
        return RaggedBatch(*map(make.known, (tables, contexts, starts, lengths)))

    @property
    def tree_mask(self) -> np.ndarray:
        """bool [tokens, tree]: each token's ancestors in its tree, itself included."""
        ancestors = np.eye(self.tree, dtype=bool)
        for node in range(1, self.tree):
            ancestors[node] |= ancestors[(node - 1) // 2]
        own = np.concatenate([np.arange(new) for new in self.lengths])
        return ancestors[np.minimum(own, self.tree - 1)]

    def arguments(self, make: Make) -> tuple[jax.Array, KVPages, RaggedBatch]:
        """Queries, pages and batch."""
        q = make.random(sum(self.lengths), self.heads, self.head_dim, dtype=self.dtype)
        pages = jax.tree.map(lambda s: make.random(*s.shape, dtype=s.dtype), self.pages.shapes)
        if self.scaled:
            scales = make.rng.uniform(0.5, 2, self.pages.shapes.scales.shape) / 64
            pages = pages._replace(scales=make.known(scales, jnp.float32))
        return q, pages, self.batch(make)

    def problem(self) -> Problem:
        return Problem(
            carry=lambda make: (),
            inputs=self.arguments,
            kernel=lambda carry, inputs: (carry, self._by_kernel(*inputs)),
            xla=lambda carry, inputs: (carry, self.attend("xla", *inputs)),
            exact=lambda carry, inputs: (carry, self._exactly(*inputs)),
            error=_error,
            tolerance=4 * eps(self.dtype),
            bytes_moved=self.bytes_moved,
            flops=4 * self.seen * self.heads * self.head_dim,
        )

    def _by_kernel(self, *inputs):
        if self.sms is None:
            return self.attend("pallas", *inputs)
        from pallas_kernels.compat import gpu

        with gpu.limited_to(self.sms):
            return self.attend("pallas", *inputs)

    def attend(self, backend, q, pages, batch):
        unscaled = self.kv_dtype == "int8" and not self.scaled
        scale = self.kv_scale or (1 / 64 if unscaled else None)
        scales = jnp.full(self.kv_heads, scale) if scale else None
        return paged_attention(
            q,
            pages,
            batch,
            num_decodes=len(self.decodes),
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=jnp.linspace(-2, 2, self.heads) if self.sinks else None,
            tree_mask=jnp.asarray(self.tree_mask) if self.tree else None,
            k_scale=scales,
            v_scale=scales,
            backend=backend,
        )

    def _exactly(self, q, pages, batch):
        with jax.default_matmul_precision("highest"):
            return self.attend("xla", q.astype(jnp.float32), pages, batch)


def _error(found, exact):
    (out, lse), (exact_out, exact_lse) = found, exact
    return jnp.maximum(errors.in_rows(out, exact_out), errors.absolute(lse, exact_lse))
