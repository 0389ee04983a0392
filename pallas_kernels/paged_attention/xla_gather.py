"""Pages of blocks of a context, gathered in plain XLA, or the tokens on paths through trees."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import as_bits
from pallas_kernels.paged_attention.layout import LatentPages, Pages, Paths, unpacked_int4
from pallas_kernels.platforms import by_platform

_CONVERTED = (jnp.bfloat16, jnp.float8_e4m3fn)
"""Dtypes of which XLA on CPUs would convert the whole pool, and not the pages that are read."""


class Slots(NamedTuple):
    """In the place of the page ids `pages`: the place on a path of each page's positions, int32
    [pages, page_size], where the tokens of these places are, int32 [pages, most] each, and whether
    any of the pages has one of them."""

    pages: jax.Array
    places: jax.Array
    page_ids: jax.Array
    offsets: jax.Array
    any_on_path: jax.Array


def on_paths(ids, position, paths: Paths, sees):
    """The slots of pages `ids` [pages], of which page p has the positions `position[p]`, or those
    of its only entry, and is read by the token of `paths[p]`, if it `sees` any of them."""
    places = position - paths.first[:, None]
    any_on_path = jnp.any((places[:, -1] >= 0) & sees)
    return Slots(ids, places, paths.page_ids, paths.offsets, any_on_path)


def gathered_pages(array, ids, axis, viewed=lambda array: array):
    """Pages `ids` int32 [pages], or slots, of an array whose positions are along `axis`, `viewed`
    as another just before it is read."""
    if not isinstance(ids, Slots):
        return viewed(array).at[ids].get(mode="clip")

    def in_order(array):
        return viewed(array).at[ids.pages].get(mode="clip")

    def along_paths(array):
        index = (ids.page_ids, *[slice(None)] * (axis - 1), ids.offsets)
        tokens = viewed(array).at[index].get(mode="clip")
        pages = in_order(array)
        dtype = pages.dtype
        # XLA on CPUs would convert small floats for each select.
        tokens, pages = as_bits(tokens), as_bits(pages)
        for place in range(tokens.shape[1]):  # Selects in one pass; a gather by token is slower.
            here = jnp.expand_dims(ids.places == place, [n for n in (1, 2, 3) if n != axis])
            pages = jnp.where(here, jnp.expand_dims(tokens[:, place], axis), pages)
        return lax.bitcast_convert_type(pages, dtype)

    def on_cpu(array):
        return lax.cond(ids.any_on_path, along_paths, in_order, array)

    # GPUs would wait for the host to decide, once for each block.
    return by_platform(array, cpu=on_cpu, default=along_paths)


def block_of_pages(pages: Pages, ids, block, dtype):
    """Keys [kv_heads, head_dim, span] and values [kv_heads, span, value_dim] of consecutive pages
    `ids`, or slots, in `dtype` and with their scales, within the loop over blocks."""
    k, v = keys_and_values(pages, ids, block, dtype)
    if pages.scales is not None:  # Of the fewer: there are more scores than elements.
        scales = gathered_pages(pages.scales, ids, 3)
        k = (k * scales[:, :, :1]).astype(dtype)
        v = (v * scales[:, :, 1, :, None]).astype(dtype)
    _, kv_heads, dim, _ = k.shape
    k = k.transpose(1, 2, 0, 3).reshape(kv_heads, dim, -1)
    return k, v.transpose(1, 0, 2, 3).reshape(kv_heads, -1, v.shape[3])


def keys_and_values(pages: Pages, ids, block, dtype):
    """Keys [ids, kv_heads, head_dim, page_size] and values [ids, kv_heads, page_size, value_dim]
    of pages `ids`, or slots, in `dtype`, within the loop over blocks."""
    k = _features(pages.k, ids, block, dtype, axis=2)
    if isinstance(pages, LatentPages):
        return k, k[:, :, : pages.value_dim].swapaxes(2, 3)
    return k, _features(pages.v, ids, block, dtype, axis=3)


def _features(array, ids, block, dtype, axis):
    """Pages `ids`, or slots, of an array with features along `axis`, in `dtype`, within the loop
    over blocks."""

    def gathered(array, **viewed):
        # Positions and features are the last two.
        return gathered_pages(array, ids, 5 - axis, **viewed)

    def on_cpu(array):
        # Of small floats XLA would convert the whole pool, and their bits would be a copy of the
        # pool, made before the loop, but for a condition that only the loop knows.
        def bits():
            return gathered(array, viewed=as_bits)

        nothing = jax.eval_shape(bits)
        some = lax.cond(block >= 0, bits, lambda: jnp.zeros(nothing.shape, nothing.dtype))
        if array.dtype == jnp.float8_e4m3fn:
            return _from_float8(some, dtype)
        return lax.bitcast_convert_type(some, array.dtype).astype(dtype)

    def elsewhere(array):
        return gathered(array).astype(dtype)

    if array.dtype == jnp.uint8:
        return unpacked_int4(gathered(array), axis).astype(dtype)
    if array.dtype not in _CONVERTED:
        return elsewhere(array)
    return by_platform(array, cpu=on_cpu, default=elsewhere)


def _from_float8(bits, dtype):
    """float8_e4m3fn of these bits, exactly; NaN becomes 480. As float16 the bits are 256 times
    less, subnormal ones included."""
    bits = bits.astype(jnp.uint16)
    half = lax.bitcast_convert_type((bits & 0x80) << 8 | (bits & 0x7F) << 7, jnp.float16)
    return (half.astype(jnp.float32) * 256).astype(dtype)
