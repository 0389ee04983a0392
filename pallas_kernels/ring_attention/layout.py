"""Which rank holds which positions of a sequence, and how many of its positions precede a position.

A sequence is cut into blocks of equal length, which are assigned to ranks in this order:

    contiguous    0 1 2 3                    one block per rank
    zigzag        0 1 2 3 3 2 1 0            there and back: each rank has early and late blocks
    round robin   0 1 2 3 0 1 2 3 0 1 ...    a page at a time, without end

A rank stores its tokens in order of position. So the part of any range of positions that is on one
rank is a range of that rank's indices, whose ends `before` gives. That function turns every mask of
every scheme into data: causal, windowed, ragged, between any two ranks.

Causal work is balanced when ranks hold early and late positions alike. Contiguous blocks give the
last rank nearly twice the mean. Zigzag (Llama 3's training, 2407.21783, and ring-flash-attention)
is balanced at each step to within a block's diagonal, and so is round robin once a rank has many
pages.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Layout:
    """Blocks of `block` positions assigned to `ranks` ranks in turn, or there and back.

    block: an integer, or int32 [rows, 1] where each row, a sequence, is cut by its own length.

    In the methods a rank is an integer or a JAX int32 scalar, positions are int32 [rows, n] (any
    shape for an integer block), and arrays are numpy's or JAX's, as given.
    """

    ranks: int
    block: int | Array
    there_and_back: bool = False

    @property
    def _blocks_of_a_rank(self) -> int:
        """Blocks of a rank in each cycle."""
        return 2 if self.there_and_back else 1

    def before(self, rank: int | Array, positions: Array) -> Array:
        """How many of the rank's positions are less than each of `positions`."""
        cycle = self.ranks * self._blocks_of_a_rank * self.block
        rest = positions % cycle
        count = positions // cycle * self._blocks_of_a_rank * self.block
        count = count + (rest - rank * self.block).clip(0, self.block)
        if self.there_and_back:
            back = 2 * self.ranks - 1 - rank
            count = count + (rest - back * self.block).clip(0, self.block)
        return count

    def position(self, rank: int | Array, indices: Array) -> Array:
        """The position of each of the rank's tokens, given their indices on that rank.

        It increases with the index, without bound: an index beyond the rank's share gives a
        position beyond the sequence.
        """
        share = self._blocks_of_a_rank * self.block
        rest = indices % share
        position = indices // share * self.ranks * share + rank * self.block + rest
        if self.there_and_back:
            position = position + (rest >= self.block) * (2 * (self.ranks - 1 - rank) * self.block)
        return position

    def rank(self, positions: Array) -> Array:
        """The rank that holds each position."""
        card = positions // self.block % (self.ranks * self._blocks_of_a_rank)
        if self.there_and_back:
            card = card + (card >= self.ranks) * (2 * self.ranks - 1 - 2 * card)
        return card

    def order(self, shard: int) -> Array:
        """int32 [rows, ranks * shard]: the positions of all ranks' tokens, rank after rank.

        It permutes a sequence so that an even split over a mesh axis gives each rank its own
        `shard` tokens. Positions beyond the sequence are padding. [ranks * shard] for an integer
        block.
        """
        indices = np.arange(shard, dtype=np.int32)
        return np.concatenate([self.position(rank, indices) for rank in range(self.ranks)], axis=-1)

    def places(self, positions: Array, shard: int) -> Array:
        """The inverse of `order`: the index of each position in it."""
        rank = self.rank(positions)
        return rank * shard + self.before(rank, positions)


def contiguous(lengths: Array, ranks: int) -> Layout:
    """Each sequence cut into one block per rank; lengths int32 [rows]."""
    return Layout(ranks, _blocks(lengths, ranks))


def zigzag(lengths: Array, ranks: int) -> Layout:
    """Each sequence cut into two blocks per rank: rank r has blocks r and 2 * ranks - 1 - r."""
    return Layout(ranks, _blocks(lengths, 2 * ranks), there_and_back=True)


def round_robin(page_size: int, ranks: int) -> Layout:
    """Page j of a sequence on rank j % ranks, as that rank's page j // ranks of the sequence.

    A sequence grows page by page without moving written pages. With a page size of 1 this is the
    layout of striped attention (2311.09431).
    """
    return Layout(ranks, page_size)


def _blocks(lengths: Array, count: int) -> Array:
    """[rows, 1]: the least length of blocks such that `count` of them hold the sequence."""
    return (-(-lengths // count)).clip(1)[:, None]
