"""How steps along the inputs of tiles are divided among thread blocks.

Stream-K (Osama et al. 2023): whatever the number of tiles, all blocks have equal work.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Shares(NamedTuple):
    """Each block takes `run` steps: every `blocks`-th whole tile, or consecutive steps in the order
    of tiles.
    """

    tiles: int
    steps: int  # of a tile
    blocks: int
    run: int

    @classmethod
    def of(cls, tiles: int, steps: int, blocks: int) -> Shares:
        """Whole tiles if they lose at most a tenth of the time or each block has four or more."""
        whole = math.ceil(tiles / blocks) * steps
        even = math.ceil(tiles * steps / blocks)
        run = whole if even >= 0.9 * whole or tiles >= 4 * blocks else even
        return cls(tiles, steps, min(blocks, math.ceil(tiles * steps / run)), run)

    @property
    def whole(self) -> bool:
        return self.run % self.steps == 0

    def parts(self) -> np.ndarray:
        """How many blocks share each tile, [tiles]."""
        if self.whole:
            return np.ones(self.tiles, np.int32)
        first = np.arange(self.tiles) * self.steps
        return (first + self.steps - 1) // self.run - first // self.run + 1

    def tiles_of(self, block: jax.Array) -> jax.Array:
        """How many tiles `block` works on."""
        if self.whole:
            return lax.div(self.tiles - block + (self.blocks - 1), self.blocks)
        start = block * self.run
        last = jnp.minimum(start + self.run, self.tiles * self.steps) - 1
        return lax.div(last, self.steps) - lax.div(start, self.steps) + 1

    def tile_of(self, block: jax.Array, index: jax.Array) -> tuple[jax.Array, ...]:
        """The `index`-th of them: tile, part of the tile, first step, number of steps."""
        if self.whole:
            return block + index * self.blocks, jnp.int32(0), jnp.int32(0), jnp.int32(self.steps)
        start = block * self.run
        tile = lax.div(start, self.steps) + index
        first = jnp.maximum(start - tile * self.steps, 0)
        last = jnp.minimum(start + self.run - tile * self.steps, self.steps)
        return tile, block - lax.div(tile * self.steps, self.run), first, last - first
