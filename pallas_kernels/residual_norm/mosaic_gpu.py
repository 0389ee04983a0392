"""Sum of parts, residual and RMS norm on Hopper GPUs, as one kernel in Mosaic GPU.

A thread block, one warpgroup, has one token: it adds the parts to the token's residual in
registers, which then are what the norm needs. Of a hidden size of 4096 a thread has 32 elements.
Few tokens leave multiprocessors idle, but as separate kernels the norm alone would, too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import gpu as compat

DTYPES = ("bfloat16", "float16")
MAX_HIDDEN = 8192
"""64 registers of a thread for the sum, and as many for a part."""

_THREADS = 128


def unsupported(x: jax.Array, parts: jax.Array, weight: jax.Array, *, eps: float) -> str | None:
    """Why `add_and_norm` refuses arrays of these shapes and dtypes, None if it does not."""
    hidden = x.shape[1]
    if x.dtype.name not in DTYPES or weight.dtype != x.dtype:
        return f"x is {x.dtype}, weight {weight.dtype}; both can be one of {', '.join(DTYPES)}."
    if parts.dtype not in (x.dtype, jnp.float32):
        return f"parts are {parts.dtype}; they can be {x.dtype} or float32."
    if hidden % (2 * _THREADS) or hidden > MAX_HIDDEN:
        return f"hidden is {hidden}; it can be a multiple of {2 * _THREADS} up to {MAX_HIDDEN}."
    return None


def add_and_norm(
    x: jax.Array, parts: jax.Array, weight: jax.Array, *, eps: float, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """`api.add_and_norm`; interpret is what `compat.gpu_interpreter` gives, to run on the host.

    Raises ValueError for what `unsupported` names.
    """
    reason = unsupported(x, parts, weight, eps=eps)
    if reason:
        raise ValueError(f"Mosaic GPU add_and_norm: {reason}")
    tokens, hidden = x.shape
    dtype = x.dtype
    vector = 4 if hidden % (4 * _THREADS) == 0 else 2
    layout = plgpu.Layout.WG_STRIDED((hidden,), vec_size=vector)

    def add_and_norm_kernel(x, parts, weight, summed, normed, sum_tile, norm_tile):
        token = lax.axis_index("token")

        def load(ref):
            return compat.load_gmem(ref, layout, interpret).astype(jnp.float32)

        total = load(parts.at[0, token])
        for part in range(1, len(parts)):
            total += load(parts.at[part, token])
        added = (load(x.at[token]) + total.astype(dtype).astype(jnp.float32)).astype(dtype)
        sum_tile[...] = added
        wide = added.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(wide * wide) * (1 / hidden) + eps)
        unit = (wide * scale).astype(dtype).astype(jnp.float32)
        norm_tile[...] = (unit * load(weight)).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sum_tile, summed.at[token])
        plgpu.copy_smem_to_gmem(norm_tile, normed.at[token])
        plgpu.wait_smem_to_gmem(0)

    result = jax.ShapeDtypeStruct((tokens, hidden), dtype)
    return plgpu.kernel(
        add_and_norm_kernel,
        out_type=(result, result),
        grid=(tokens,),
        grid_names=("token",),
        scratch_types=(plgpu.SMEM((hidden,), dtype), plgpu.SMEM((hidden,), dtype)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(x, parts, weight)
