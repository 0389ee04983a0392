"""Page copies on Hopper GPUs: one launch for the arrays of all layers, in Mosaic GPU.

Pages are cut into slabs of at most SLAB_BYTES, contiguous in memory on either side. The copy engine
copies a slab into shared memory and out of it (bulk copies of TMA). No element passes through a
register, so nothing can round it. One thread block per multiprocessor takes every n-th slab of all
staged pages, with one warpgroup, which only issues copies. The array that a slab belongs to is
known only at run time: a switch with a branch for each array, which compiles to a select among
addresses.

Loads walk a ring in shared memory, and stores follow LOADS slabs behind. A load must wait for the
store that last read its slot, which is tracked by counting: stores complete in order, and at most
RING - LOADS - 1 later ones have been issued. Slabs outside the pool are not loaded. A gather stores
zeros for them from a slot of zeros. A scatter skips their store, which breaks the count, so it
waits for all issued stores instead.

Scatter writes the arrays in place, through JAX's mutable references: donated arrays are not copied.
Kernels take those references from JAX 0.11 on.

Arithmetic behind the sizes (not measurements), for an H200 (132 multiprocessors, 4.8 TB/s): copying
at full speed, a multiprocessor reads 18 KB per microsecond and writes as much. At a latency of 2 us
under load, 36 KB of loads and 36 KB of stores must be in flight. A ring of 8 slabs of 16 KiB keeps
64 KiB of loads and at least 48 KiB of stores in flight. One slab takes 0.9 us or 1600 cycles, of
which some 500 go to issuing it. A page of 64 tokens of 32 layers with 8 KV heads and head_dim 128
in bfloat16 is 8 MiB: 512 slabs, four per multiprocessor. A separate launch for each of its 64
arrays would copy 8 slabs, in less time than the launch takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import GPU_KERNELS_WRITE_IN_PLACE
from pallas_kernels.compat import gpu as compat

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.layout import Pages

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
SLAB_BYTES = 16 * 1024
RING = 8
LOADS = 4

_UNIT_BYTES = 1024
"""Slabs are multiples of this: the bytes that 128 threads fill with zeros in one store."""


def unsupported(
    layers: Sequence[Pages], page_ids: jax.Array, staging: jax.Array | None = None
) -> str | None:
    """Why `gather_pages`, or `scatter_pages` of `staging`, refuses arrays of these shapes and
    dtypes; None if it does not."""
    arrays = jax.tree.leaves(layers)
    dtypes = {array.dtype.name for array in arrays}
    sizes = {math.prod(array.shape[1:]) * array.dtype.itemsize for array in arrays}
    if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
        return f"pages are {', '.join(sorted(dtypes))}; they can be one of {', '.join(DTYPES)}."
    if len(sizes) > 1 or max(sizes) % _UNIT_BYTES:
        return (
            f"arrays have {', '.join(map(str, sorted(sizes)))} bytes a page; "
            f"all must have the same multiple of {_UNIT_BYTES}."
        )
    if staging is not None and not GPU_KERNELS_WRITE_IN_PLACE:
        return f"JAX is {jax.__version__}; kernels write in place from 0.11 on."
    return None


def gather_pages(
    layers: Sequence[Pages], page_ids: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """`api.gather_pages`; interpret is what `compat.gpu_interpreter` gives, to run on the host.

    Raises ValueError for what `unsupported` names.
    """
    _check(unsupported(layers, page_ids))
    arrays = jax.tree.leaves(layers)
    cut = _Cut.of(arrays, page_ids)

    def gather_pages_kernel(page_ids, *refs):
        *pool, staging, ring, full = refs
        nothing = RING
        ring[nothing] = jnp.zeros(cut.slab_size, ring.dtype)
        plgpu.commit_smem()

        def load(slab, slot):
            inside, array, source = cut.locate(slab, page_ids)

            @pl.when(inside)
            def _():
                _choose(array, pool, lambda chosen: _load(chosen.at[source], slot, ring, full))

        def store(slab, slot):
            inside, _, _ = cut.locate(slab, page_ids)

            @pl.when(inside)
            def _():
                plgpu.barrier_wait(full.at[slot])

            slot = jnp.where(inside, slot, nothing)
            plgpu.copy_smem_to_gmem(ring.at[slot], staging.at[slab])

        cut.walk(load, store)

    staging = cut.kernel(
        gather_pages_kernel,
        places=RING + 1,
        out_type=jax.ShapeDtypeStruct((cut.num_slabs, cut.slab_size), arrays[0].dtype),
        interpret=interpret,
    )(page_ids, *(cut.slabs(array) for array in arrays))
    return staging.reshape(len(page_ids), -1)


def scatter_pages(
    layers: Sequence[Pages], page_ids: jax.Array, staging: jax.Array, *, interpret: Any = None
) -> list[Pages]:
    """`api.scatter_pages`; interpret is what `compat.gpu_interpreter` gives, to run on the host.

    Raises ValueError for what `unsupported` names.
    """
    _check(unsupported(layers, page_ids, staging))
    arrays = jax.tree.leaves(layers)
    cut = _Cut.of(arrays, page_ids)

    def scatter_pages_kernel(page_ids, staging, *refs):
        *pool, ring, full = refs

        def load(slab, slot):
            inside, _, _ = cut.locate(slab, page_ids)

            @pl.when(inside)
            def _():
                _load(staging.at[slab], slot, ring, full)

        def store(slab, slot):
            inside, array, target = cut.locate(slab, page_ids)

            @pl.when(inside)
            def _():
                plgpu.barrier_wait(full.at[slot])
                _choose(
                    array,
                    pool,
                    lambda chosen: plgpu.copy_smem_to_gmem(ring.at[slot], chosen.at[target]),
                )

            @pl.when(jnp.logical_not(inside))
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        cut.walk(load, store)

    pool = [jax.new_ref(cut.slabs(array)) for array in arrays]
    cut.kernel(scatter_pages_kernel, places=RING, out_type=(), interpret=interpret)(
        page_ids, cut.slabs(staging), *pool
    )
    written = [jax.freeze(ref).reshape(array.shape) for ref, array in zip(pool, arrays)]
    return jax.tree.unflatten(jax.tree.structure(layers), written)


class _Cut(NamedTuple):
    """How `arrays` arrays of `num_pages` pages, and `rows` staged pages, are cut into slabs.

    A page of an array is `per_page` slabs of `slab_size` elements; a staged page is one page of
    each array in turn.
    """

    num_pages: int
    arrays: int
    rows: int
    per_page: int
    slab_size: int
    dtype: jnp.dtype

    @classmethod
    def of(cls, arrays, page_ids):
        num_pages, *page = arrays[0].shape
        dtype = arrays[0].dtype
        page_bytes = math.prod(page) * dtype.itemsize
        slab_bytes = next(
            size for size in range(SLAB_BYTES, 0, -_UNIT_BYTES) if page_bytes % size == 0
        )
        per_page, slab_size = page_bytes // slab_bytes, slab_bytes // dtype.itemsize
        return cls(num_pages, len(arrays), len(page_ids), per_page, slab_size, dtype)

    @property
    def num_slabs(self):
        """Of all staged pages."""
        return self.rows * self.arrays * self.per_page

    def slabs(self, array):
        """An array or staging as [slabs, slab_size]."""
        return array.reshape(-1, self.slab_size)

    def locate(self, slab, page_ids):
        """For slab `slab` of staging: whether its page is in the pool, its array and slab there."""
        part, place = lax.div(slab, self.per_page), lax.rem(slab, self.per_page)
        row, array = lax.div(part, self.arrays), lax.rem(part, self.arrays)
        page = page_ids[row]
        inside = (page >= 0) & (page < self.num_pages)
        return inside, array, page * self.per_page + place

    def walk(self, load: Callable, store: Callable):
        """`load(slab, slot)` each slab of this block and, LOADS loads later, `store` it."""
        block, blocks = lax.axis_index("block"), lax.axis_size("block")
        own = lax.div(self.num_slabs - block + (blocks - 1), blocks)

        def step(loaded, _):
            @pl.when(loaded < own)
            def _():
                plgpu.wait_smem_to_gmem(RING - LOADS - 1, wait_read_only=True)
                load(block + loaded * blocks, lax.rem(loaded, RING))

            stored = loaded - LOADS

            @pl.when(stored >= 0)
            def _():
                store(block + stored * blocks, lax.rem(stored, RING))

        lax.fori_loop(0, own + LOADS, step, None)
        plgpu.wait_smem_to_gmem(0)

    def kernel(self, body, *, places, out_type, interpret):
        """`body` with a ring of `places` slots and its barriers, on every multiprocessor."""
        return plgpu.kernel(
            body,
            out_type=out_type,
            grid=(min(compat.num_sms(), self.num_slabs),),
            grid_names=("block",),
            scratch_types=(
                plgpu.SMEM((places, self.slab_size), self.dtype),
                plgpu.Barrier(num_barriers=RING),
            ),
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            interpret=interpret,
        )


def _load(source, slot, ring, full):
    # For possibly out-of-bounds sources the compiler emits descriptor copies, one per array.
    inside = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    plgpu.copy_gmem_to_smem(source, ring.at[slot], full.at[slot], oob_mode=inside)


def _choose(index, references, act):
    """`act(references[index])`."""
    lax.switch(index, [lambda chosen=chosen: act(chosen) for chosen in references])


def _check(reason):
    if reason:
        raise ValueError(f"Mosaic GPU page_copy: {reason}")
