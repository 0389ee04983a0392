"""Merges the splits of decode rows on Hopper GPUs.

The same sums as `merge`, over only the splits that were written: their number is known only on the
device, and with wide tables and short contexts it is a small part of the maximum.

A thread block, one warpgroup, merges 8 query heads of one KV head of one row. It loads their parts
straight into registers, with AT_ONCE splits in flight, 8 rows by head_dim: a warp has two of the
rows, a thread four columns in every 64.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import gpu as compat
from pallas_kernels.paged_attention.gpu.decode_work import Cutting
from pallas_kernels.paged_attention.gpu.hopper import across

AT_ONCE = 8
"""Splits in flight. At head_dim 128, 8 * 4 KiB per block, in 64 registers per thread."""

_ROWS = 8
_EMPTY = -1e30
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def merge_splits(
    outs: jax.Array,
    lses: jax.Array,
    since: jax.Array,
    until: jax.Array,
    *,
    cutting: Cutting,
    group: int,
    dtype: jnp.dtype,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each row over all of its splits.

    outs [splits, rows, kv_heads, padded, head_dim] and lses [splits, rows, kv_heads, padded], both
    float32: padded is a multiple of 8, of which the first `group` are used. Of a row's splits, the
    number that `cutting` gives for its visible positions since <= position < until, int32 [at least
    rows] each, is used. The rest is not read.

    Returns out [rows, kv_heads * group, head_dim] of `dtype` and lse [rows, kv_heads * group]
    float32; 0 and -inf for a row without splits.
    """
    _, rows, kv_heads, padded, dim = outs.shape
    in_layout = functools.partial(compat.in_layout, interpret=interpret)
    load = functools.partial(compat.load_gmem, interpret=interpret)
    per_row = _LAYOUT.reduce(1)

    def merge_splits_kernel(outs, lses, since, until, out, lse, out_tile, lse_tile):
        row, head = lax.axis_index("row"), lax.axis_index("kv_head")
        eight = lax.axis_index("eight")
        splits = cutting.cut(since[row], until[row]).splits

        def fold(chunk, carry):
            peak, total, values = carry
            part_outs, part_lses = [], []
            for n in range(AT_ONCE):
                split = chunk * AT_ONCE + n
                part = jnp.minimum(split, splits - 1), row, head, pl.ds(eight * _ROWS, _ROWS)
                part_outs.append(load(outs.at[part], _LAYOUT))
                # Past the last split, read the last one again, with zero weight.
                absent = jnp.where(split < splits, jnp.float32(0), jnp.float32(_EMPTY))
                part_lses.append(load(lses.at[part], per_row) + absent)
            new_peak = functools.reduce(jnp.maximum, part_lses, peak)
            shrink = jnp.exp(peak - new_peak)
            total, values = total * shrink, values * across(shrink, dim)
            for part_out, part_lse in zip(part_outs, part_lses):
                weight = jnp.exp(part_lse - new_peak)
                total, values = total + weight, values + part_out * across(weight, dim)
            return new_peak, total, values

        def full(value, *columns):
            layout = _LAYOUT if columns else per_row
            return in_layout(jnp.full((_ROWS, *columns), value, jnp.float32), layout)

        carry = full(_EMPTY), full(0), full(0, dim)
        chunks = lax.div(splits + (AT_ONCE - 1), AT_ONCE)
        peak, total, values = lax.fori_loop(0, chunks, fold, carry)
        divisor = jnp.where(total > 0, total, jnp.ones_like(total))
        out_tile[...] = (values * across(1 / divisor, dim)).astype(dtype)
        lse_tile[...] = peak + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse_tile, lse.at[row, head, pl.ds(eight * _ROWS, _ROWS)])

        def store(count):
            target = out.at[row, pl.ds(head * group + eight * _ROWS, count)]
            plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, count)], target)

        whole, rest = divmod(group, _ROWS)
        pl.when(eight < whole)(lambda: store(_ROWS))
        if rest:
            pl.when(eight == whole)(lambda: store(rest))
        plgpu.wait_smem_to_gmem(0)

    out, lse = plgpu.kernel(
        merge_splits_kernel,
        out_type=(
            jax.ShapeDtypeStruct((rows, kv_heads * group, dim), dtype),
            jax.ShapeDtypeStruct((rows, kv_heads, padded), jnp.float32),
        ),
        grid=(padded // _ROWS, kv_heads, rows),
        grid_names=("eight", "kv_head", "row"),
        scratch_types=(plgpu.SMEM((_ROWS, dim), dtype), plgpu.SMEM((_ROWS,), jnp.float32)),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=interpret,
    )(outs, lses, since, until)
    return out, lse[..., :group].reshape(rows, kv_heads * group)
