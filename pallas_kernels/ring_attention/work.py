"""Which keys of one rank the queries of another rank see, as ranges."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import RaggedBatch, Visible
from pallas_kernels.ring_attention.layout import Array, Layout


@dataclasses.dataclass(frozen=True)
class Work:
    """The new tokens of some sequences and all their keys, both split over the same ranks.

    queries: layout of the new tokens. keys: layout of the positions of the whole sequence.
    context [rows] int32: tokens of each sequence, the new ones included.
    lengths [rows] int32: the new ones among them, which come last.
    shard: capacity of a rank in tokens of each sequence, padded at the end.
    causal, window: as in `api`.
    """

    queries: Layout
    keys: Layout
    context: Array
    lengths: Array
    shard: int
    causal: bool
    window: int | None

    def visible(self, owner: int | Array, source: int | Array) -> Visible:
        """What the owner's tokens see of the source's keys; [rows, shard], by index on the source.

        Padding sees nothing: 0 to 0. The limits of real tokens do not decrease along a row.
        """
        new = self.queries.position(owner, np.arange(self.shard, dtype=np.int32)[None])
        until = (self.context - self.lengths)[:, None] + new + 1
        if not self.causal:
            until = until * 0 + self.context[:, None]
        until = until * (new < self.lengths[:, None])
        since = until * 0 if self.window is None else (until - self.window).clip(0)
        return Visible(self.keys.before(source, since), self.keys.before(source, until))

    def between(
        self, owner: jax.Array, source: jax.Array, tables: jax.Array
    ) -> tuple[RaggedBatch, Visible]:
        """The same for `attend`: the owner's tokens and the source's pages.

        Tokens are flat, [rows * shard]; tables [rows, pages] int32.
        """
        rows = len(self.lengths)
        batch = RaggedBatch(
            tables=tables,
            context=self.keys.before(source, self.context[:, None])[:, 0],
            starts=jnp.arange(rows, dtype=jnp.int32) * self.shard,
            lengths=self.queries.before(owner, self.lengths[:, None])[:, 0],
        )
        return batch, Visible(*(limit.reshape(-1) for limit in self.visible(owner, source)))


def pairs(work: Work) -> np.ndarray:
    """int64 [steps, ranks]: query-key pairs that each rank computes at each step of pass-KV.

    For numpy arrays. At step s, rank r has the keys of rank r - s.
    """
    ranks = work.queries.ranks
    counts = np.zeros((ranks, ranks), np.int64)
    for step, rank in np.ndindex(counts.shape):
        since, until = work.visible(rank, (rank - step) % ranks)
        counts[step, rank] = np.sum(until - since, dtype=np.int64)
    return counts
