"""Steps computed in tiles of a fixed number of tokens, for `batch_invariant=True`.

Compilers and libraries choose the order of a sum by shape, so a token's values round differently in
another batch, chunk or bucket. Here every computation is a loop whose body has one shape,
TILE_TOKENS tokens, whatever the step holds; only the trip count differs. Tokens of a tile are
treated alike: decodes are chunks of one token, and attention walks each context in blocks that
begin at multiples of one size. Tiles run in token order, so that a tile's queries see the keys of
all earlier tokens.

The trip count is hidden from the compiler on purpose: a loop of one trip would be inlined, fused
with its surroundings, and round differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import RaggedBatch

TILE_TOKENS = {"cpu": 16}
"""By platform. On CPUs one vector of float32 with AVX-512, two with AVX2: matrix products treat the
tokens of a full vector alike, but not those of a partial one."""

DEFAULT_TILE_TOKENS = 128


def scan_tiles(
    function: Callable[..., tuple[Any, Any]],
    carry: Any,
    arrays: Any,
    tile: int | None,
    count: jax.Array | int,
) -> tuple[Any, Any]:
    """`function(carry, arrays) -> (carry, results)` on tiles of `tile` entries of every array
    [entries, ...], in order; results are concatenated.

    The arrays have a multiple of `tile` entries, the first `count` of which are real: tiles after
    them are not computed, and their results are zero. With `tile` None there is one tile, of any
    size.
    """
    if tile is None:
        return function(carry, arrays)

    def cut(first: jax.Array | int) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, tile), arrays)

    total = jax.tree.leaves(arrays)[0].shape[0]

    def empty(result: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((total, *result.shape[1:]), result.dtype)

    _, shapes = jax.eval_shape(function, carry, jax.eval_shape(lambda: cut(0)))
    results = jax.tree.map(empty, shapes)

    def body(index: jax.Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, results = state
        carry, own = function(carry, cut(index * tile))
        results = jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, index * tile, 0),
            results,
            own,
        )
        return carry, results

    trips = lax.div(jnp.int32(count) + tile - 1, jnp.int32(tile))
    return lax.fori_loop(0, lax.optimization_barrier(trips), body, (carry, results))


def batch_of_tile(batch: RaggedBatch, first: jax.Array, tile: int) -> RaggedBatch:
    """The rows of a step's tokens `first .. first + tile - 1`, each clipped to that range.

    Every row with tokens in the range is among `tile` consecutive rows.
    """
    ends = batch.starts + batch.lengths
    row = jnp.sum(ends <= first) + jnp.arange(tile)
    exists = row < len(ends)
    row = jnp.minimum(row, len(ends) - 1)
    start, end = (jnp.clip(x[row], first, first + tile) for x in (batch.starts, ends))
    start = jnp.where(exists, start, first + tile)
    length = jnp.where(exists, end - start, 0)
    context = jnp.maximum(batch.context[row] - (ends[row] - end), 0)
    return RaggedBatch(batch.tables[row], context, start - first, length)


def num_real_tokens(batch: RaggedBatch) -> jax.Array:
    """Tokens of a step up to the last one that belongs to a sequence."""
    real = (batch.context > 0) & (batch.lengths > 0)
    return jnp.max(jnp.where(real, batch.starts + batch.lengths, 0))
