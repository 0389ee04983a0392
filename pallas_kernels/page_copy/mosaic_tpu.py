"""Page copies on TPUs: one kernel for the arrays of all layers, which only issues copies.

The DMA engines copy whole pages, memory to memory. The copies of one staged page are started
together, one for each array, before waiting for those of the previous page, so the engines always
have copies in flight. Page ids are in scalar memory before the kernel begins. Ids outside the pool
are skipped.

TPUs store an array in tiles of its last two dimensions, and staging is tiled differently from
pages. The kernel therefore gathers into, and scatters from, arrays [n, *page], one for each array
of the pool, and XLA rearranges those in a pass over the staged pages alone. An array whose last
dimension is not whole tiles wide is stored with the last two swapped, so the kernel takes it in
that order and nothing is transposed.

Arithmetic behind having two staged pages in flight (not a measurement): a page of 128 tokens of 32
layers with 8 KV heads and head_dim 128 in bfloat16 has 64 copies of 256 KiB, 16 MiB. A chip of 1.6
TB/s reads and writes that in 21 us, ten times the latency of a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arrays import as_bits
from pallas_kernels.page_copy.rows import elements_of_each, row_dtype, to_elements, to_pages

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.layout import Pages

LANES = 128
"""Elements along the last dimension of a tile."""

ROWS = 32
"""Elements along its other dimension, for the smallest dtypes."""


def unsupported(
    layers: Sequence[Pages],
    page_ids: jax.Array,
    staging: jax.Array | None = None,
    *,
    interpret: Any = None,
) -> str | None:
    """Why `gather_pages`, or `scatter_pages` of `staging`, refuses arrays of these shapes; None if
    it does not."""
    for _, _, head_dim, page_size in (pages.k.shape for pages in layers):
        if not interpret and (page_size % LANES or head_dim % ROWS):
            return (
                f"pages have {page_size} tokens and head_dim {head_dim}; they must be multiples of "
                f"{LANES} and {ROWS}."
            )
    return None


def gather_pages(
    layers: Sequence[Pages], page_ids: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """`api.gather_pages`; interpret is True or `pltpu.InterpretParams`, to run on the host.

    Raises ValueError for what `unsupported` names.
    """
    _check(unsupported(layers, page_ids, interpret=interpret))
    pool = _stored(layers, interpret)
    num_pages, rows = pool[0].shape[0], len(page_ids)
    gathered = _copy(
        page_ids,
        sources=pool,
        targets=[jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype) for array in pool],
        pair=lambda source, target, row, page: (source.at[page], target.at[row]),
        num_pages=num_pages,
        interpret=interpret,
    )
    # As integers, which no compiler rounds. Skipped rows are uninitialised.
    inside = (page_ids >= 0) & (page_ids < num_pages)
    bits = jnp.dtype(f"uint{8 * row_dtype(layers).itemsize}")
    parts = [
        to_elements(_turned(as_bits(part), array), bits)
        for part, array in zip(gathered, jax.tree.leaves(layers))
    ]
    staging = jnp.where(inside[:, None], jnp.concatenate(parts, axis=1), 0)
    return lax.bitcast_convert_type(staging, row_dtype(layers))


def scatter_pages(
    layers: Sequence[Pages], page_ids: jax.Array, staging: jax.Array, *, interpret: Any = None
) -> list[Pages]:
    """`api.scatter_pages`; interpret is True or `pltpu.InterpretParams`, to run on the host.

    Raises ValueError for what `unsupported` names.
    """
    _check(unsupported(layers, page_ids, staging, interpret=interpret))
    pool, arrays = _stored(layers, interpret), jax.tree.leaves(layers)
    bounds = [*itertools.accumulate(elements_of_each(layers))][:-1]
    parts = jnp.split(as_bits(staging) if interpret else staging, bounds, axis=1)
    written = _copy(
        page_ids,
        sources=[
            _turned(to_pages(part, array.shape[1:], own.dtype), array)
            for part, array, own in zip(parts, arrays, pool)
        ],
        targets=pool,
        pair=lambda source, target, row, page: (source.at[row], target.at[page]),
        num_pages=pool[0].shape[0],
        interpret=interpret,
    )
    written = [
        lax.bitcast_convert_type(_turned(part, array), array.dtype)
        for part, array in zip(written, arrays)
    ]
    return jax.tree.unflatten(jax.tree.structure(layers), written)


def _copy(page_ids, *, sources, targets, pair, num_pages, interpret):
    """The targets after one copy for each staged page and each array.

    pair(source, target, row, page): source and target references of one copy. Targets that are
    arrays and not only shapes are written in place.
    """
    rows, arrays = len(page_ids), len(sources)
    given = [target for target in targets if isinstance(target, jax.Array)]

    def page_copy_kernel(page_ids, *refs):
        sources, targets, done = refs[:arrays], refs[-arrays - 1 : -1], refs[-1]

        def for_each_copy(row, act):
            page = page_ids[row]

            @pl.when((page >= 0) & (page < num_pages))
            def _():
                for source, target in zip(sources, targets):
                    ends = pair(source, target, row, page)
                    act(pltpu.make_async_copy(*ends, done.at[lax.rem(row, 2)]))

        def step(row, _):
            @pl.when(row < rows)
            def _():
                for_each_copy(row, lambda copy: copy.start())

            @pl.when(row > 0)
            def _():
                for_each_copy(row - 1, lambda copy: copy.wait())

        lax.fori_loop(0, rows + 1, step, None)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        page_copy_kernel,
        out_shape=[jax.ShapeDtypeStruct(target.shape, target.dtype) for target in targets],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[anywhere] * (arrays + len(given)),
            out_specs=[anywhere] * arrays,
            scratch_shapes=[pltpu.SemaphoreType.DMA((2,))],
        ),
        input_output_aliases={1 + arrays + index: index for index in range(len(given))},
        interpret=interpret or False,
    )(page_ids, *sources, *given)


def _stored(layers, interpret):
    """The arrays in the dimension order in which a TPU stores them. XLA on the host has no bfloat16
    and rounds when it copies, so there they are integers; on a TPU copies round nothing and the
    conversion would copy the whole pool."""
    arrays = [_turned(array, array) for array in jax.tree.leaves(layers)]
    return [as_bits(array) for array in arrays] if interpret else arrays


def _turned(array, of):
    """`array`, pages of `of`, switched between logical and stored dimension order."""
    return array.swapaxes(2, 3) if of.shape[3] % LANES else array


def _check(reason):
    if reason:
        raise ValueError(f"Mosaic TPU page_copy: {reason}")
