"""Page copies in plain XLA: one formulation for CPUs, one for all other devices.

On CPUs, page by page: a loop over the ids whose body takes one slice of every array and updates in
place, with one staged page of temporary memory. For 16 pages of 30 layers, `array.at[ids].set`
takes three times as long or more and needs memory for all staged pages. In bfloat16 it takes sixty
times as long: XLA has no bfloat16 on CPUs and converts to float32 and back, which here converts the
*whole pool* and also quietens signalling NaNs. Even a slice, an update or a `jnp.where` of bfloat16
converts. Hence slices and updates are of the bits, reinterpreted right where they are used
(reinterpreting the whole pool once would copy it), and an id outside the pool is skipped by a
conditional and not masked. Gathered parts are joined into one staged page before it is written to
staging, because a chain of reinterpreted updates is not done in place. Gathering by array is as
fast or faster for four pages in float32, but takes up to four times the pages' size in bfloat16.

Elsewhere, array by array, chosen by reasoning and not by measurement: one gather or scatter per
array keeps the number of kernels independent of the number of pages, and no conditional makes a GPU
wait for its host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import as_bits
from pallas_kernels.page_copy.rows import elements_of_each, row_dtype, to_elements, to_pages
from pallas_kernels.platforms import by_platform

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.layout import Pages


def gather_pages(layers: Sequence[Pages], page_ids):
    arrays = jax.tree.leaves(layers)
    return by_platform(arrays, page_ids, cpu=gather_by_page, default=gather_by_array)


def scatter_pages(layers: Sequence[Pages], page_ids, staging):
    arrays, structure = jax.tree.flatten(layers)
    arrays = by_platform(arrays, page_ids, staging, cpu=scatter_by_page, default=scatter_by_array)
    return jax.tree.unflatten(structure, arrays)


def gather_by_page(arrays, page_ids):
    """Staging [n, row_elements] from arrays [pages, ...]."""
    offsets = _offsets(arrays)

    def add_row(index, staging):
        page = page_ids[index]

        def add(staging):
            row = jnp.zeros((1, offsets[-1]), as_bits(staging).dtype)
            for array, offset in zip(arrays, offsets):
                part = _slice(as_bits(array), (page, 0, 0, 0), (1, *array.shape[1:]))
                row = _update(row, to_elements(part, row.dtype), (0, offset))
            bits = _update(as_bits(staging), row, (index, 0))
            return lax.bitcast_convert_type(bits, staging.dtype)

        return lax.cond(_inside(page, arrays), add, _unchanged, staging)

    zeros = jnp.zeros((len(page_ids), offsets[-1]), row_dtype(arrays))
    return lax.fori_loop(0, len(page_ids), add_row, zeros)


def scatter_by_page(arrays, page_ids, staging):
    """Arrays [pages, ...] with the rows of staging [n, row_elements] written."""
    bounds = [*itertools.pairwise(_offsets(arrays))]

    def write_row(index, arrays):
        page = page_ids[index]

        def write(arrays):
            written = []
            for array, (start, stop) in zip(arrays, bounds):
                part = _slice(as_bits(staging), (index, start), (1, stop - start))
                own = as_bits(array)
                page_of_it = to_pages(part, array.shape[1:], own.dtype)
                bits = _update(own, page_of_it, (page, 0, 0, 0))
                written.append(lax.bitcast_convert_type(bits, array.dtype))
            return written

        return lax.cond(_inside(page, arrays), write, _unchanged, arrays)

    return lax.fori_loop(0, len(page_ids), write_row, arrays)


def gather_by_array(arrays, page_ids):
    """As `gather_by_page`."""
    parts = [
        array.at[page_ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        for array in arrays
    ]
    return jnp.concatenate([to_elements(part, row_dtype(arrays)) for part in parts], axis=1)


def scatter_by_array(arrays, page_ids, staging):
    """As `scatter_by_page`."""
    written = []
    for array, (start, stop) in zip(arrays, itertools.pairwise(_offsets(arrays))):
        parts = to_pages(staging[:, start:stop], array.shape[1:], array.dtype)
        at = array.at[page_ids]
        written.append(at.set(parts, mode="drop", wrap_negative_indices=False))
    return written


def _offsets(arrays):
    """Offset of each array's part in a staged page, then the size of a staged page."""
    return [*itertools.accumulate(elements_of_each(arrays), initial=0)]


def _inside(page, arrays):
    return (page >= 0) & (page < arrays[0].shape[0])


def _unchanged(carry):
    return carry


def _slice(array, start, sizes):
    """No index is negative here, so JAX's handling of negative indices is left out."""
    return lax.dynamic_slice(array, start, sizes, allow_negative_indices=False)


def _update(array, part, start):
    return lax.dynamic_update_slice(array, part, start, allow_negative_indices=False)
