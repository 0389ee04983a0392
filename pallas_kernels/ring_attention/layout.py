"""Which rank holds which positions of a sequence, and how many of them lie before a position.

A sequence is cut into blocks of equal length, and the blocks are dealt to the ranks like cards:

    contiguous    0 1 2 3                    one block each, blocks of a whole share
    zigzag        0 1 2 3 3 2 1 0            there and back: early and late ones meet
    round robin   0 1 2 3 0 1 2 3 0 1 ...    a page at a time, for as long as there are pages

A rank keeps what it was dealt in order of position. So of any range of positions, what lies on one
rank is a range of that rank's own, whose ends `before` gives. That one function makes every mask of
every scheme into data: causal, windowed, ragged, between any two ranks.

Causal work is balanced when ranks hold early and late positions alike. Contiguous blocks leave the
last rank nearly twice the mean. Zigzag (Llama 3's training, 2407.21783, and ring-flash-attention)
is even at each step to within a block's diagonal, and so are pages dealt in turn once a rank has
many of them.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Layout:
    """Blocks of `block` positions dealt to `ranks` ranks in turn, or there and back.

    block: an integer, or int32 [rows, 1] where each row, a sequence, is cut by its own length.

    In what follows a rank may be an integer or an int32 scalar of a device, positions are int32
    [rows, n] (of any shape for an integer block), and arrays are numpy's or JAX's, as given.
    """

    ranks: int
    block: int | Array
    there_and_back: bool = False

    @property
    def _dealt(self) -> int:
        """Blocks that a rank is dealt in each cycle."""
        return 2 if self.there_and_back else 1

    def before(self, rank: int | Array, positions: Array) -> Array:
        """How many of the rank's positions are less than each of `positions`."""
        cycle = self.ranks * self._dealt * self.block
        rest = positions % cycle
        count = positions // cycle * self._dealt * self.block
        count = count + (rest - rank * self.block).clip(0, self.block)
        if self.there_and_back:
            back = 2 * self.ranks - 1 - rank
            count = count + (rest - back * self.block).clip(0, self.block)
        return count

    def position(self, rank: int | Array, indices: Array) -> Array:
        """The position of each of the rank's tokens, given their indices on that rank.

        It increases with the index, and without end: an index beyond the sequence's share gives a
        position beyond the sequence.
        """
        share = self._dealt * self.block
        rest = indices % share
        position = indices // share * self.ranks * share + rank * self.block + rest
        if self.there_and_back:
            position = position + (rest >= self.block) * (2 * (self.ranks - 1 - rank) * self.block)
        return position

    def rank(self, positions: Array) -> Array:
        """The rank that holds each position."""
        card = positions // self.block % (self.ranks * self._dealt)
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
        """The inverse of `order`: where each position comes in it."""
        rank = self.rank(positions)
        return rank * shard + self.before(rank, positions)


def contiguous(lengths: Array, ranks: int) -> Layout:
    """Each sequence cut into as many blocks as there are ranks; lengths int32 [rows]."""
    return Layout(ranks, _blocks(lengths, ranks))


def zigzag(lengths: Array, ranks: int) -> Layout:
    """Each sequence cut into two blocks a rank: rank r has numbers r and 2 * ranks - 1 - r."""
    return Layout(ranks, _blocks(lengths, 2 * ranks), there_and_back=True)


def round_robin(page_size: int, ranks: int) -> Layout:
    """Page j of a sequence on rank j % ranks, as that rank's page j // ranks of the sequence.

    A sequence grows page by page without anything that was written having to move. With a page
    size of 1 this is striped attention's layout (2311.09431).
    """
    return Layout(ranks, page_size)


def _blocks(lengths: Array, count: int) -> Array:
    """[rows, 1]: the least length of blocks such that `count` of them hold the sequence."""
    return (-(-lengths // count)).clip(1)[:, None]
