"""Paged attention on Hopper GPUs: one kernel for decode rows, another for prefill chunks.

Decode does little compute and must read pages at full memory bandwidth; prefill must keep the
tensor cores busy. A program whose batches are of one kind contains only that kernel.

The prefill kernel cannot dequantize pages of head_dim 256. In mixed steps XLA computes the prefill
chunks instead, so that decodes keep their kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.gpu import decode, prefill
from pallas_kernels.paged_attention.layout import RaggedBatch, Visible

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.layout import KVPages


def unsupported(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    visible: Visible,
    *,
    num_decodes: int,
    scale: float,
    soft_cap: float | None = None,
    out_dtype: jnp.dtype | None = None,
) -> str | None:
    """Why `paged_attention` refuses arrays of these shapes and dtypes, None if it does not."""
    if num_decodes:
        return decode.unsupported(q, pages, batch, num_decodes)
    return prefill.unsupported(q, pages)


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    visible: Visible,
    *,
    num_decodes: int,
    scale: float,
    soft_cap: float | None = None,
    out_dtype: jnp.dtype | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As `xla.paged_attention`. Raises ValueError for what `unsupported` names. The prefill kernel
    has room for results of q's dtype alone, so those are rounded to it in any case.

    interpret: what `compat.gpu_interpreter` gives, to run on the host.
    """
    options = {"scale": scale, "soft_cap": soft_cap, "interpret": interpret}
    out_dtype = out_dtype or q.dtype
    parts = []
    if num_decodes:
        decoded = decode.paged_decode(
            q, pages, batch, visible, num_decodes=num_decodes, out_dtype=out_dtype, **options
        )
        parts.append(decoded)
    if len(q) > num_decodes:
        rest = batch.after_decodes(num_decodes)
        visible = Visible(*(field[num_decodes:] for field in visible))
        arguments = q[num_decodes:], pages, rest, visible
        if num_decodes and prefill.unsupported(q, pages):
            part = xla.paged_attention(
                *arguments, num_decodes=0, scale=scale, soft_cap=soft_cap, out_dtype=out_dtype
            )
        else:
            part = prefill.paged_prefill(*arguments, **options)
            part = part[0].astype(out_dtype), part[1]
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    out, lse = (jnp.concatenate(part) for part in zip(*parts))
    return out, lse
