"""Checks of the arguments of paged attention and KV writes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.layout import (
    PAGE_DTYPES,
    QUANTIZED,
    LatentPages,
    Pages,
    RaggedBatch,
)


def check(q: jax.Array, pages: Pages, batch: RaggedBatch, num_decodes: int, scale: float) -> None:
    """Raises ValueError for queries, pages or rows that do not fit each other."""
    check_pages(pages)
    tokens, heads, dim = q.shape
    kv_heads, k_dim = pages.k.shape[1], pages.head_dim
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"Queries are {q.dtype}; they must be of a floating dtype.")
    if dim != k_dim:
        raise ValueError(f"Queries have head_dim {dim} and keys {k_dim}.")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot be shared evenly among {kv_heads} KV heads.")
    if scale <= 0:
        raise ValueError(f"scale is {scale}; it must be positive.")
    rows = len(batch.tables)
    for name, array in batch._asdict().items():
        if len(array) != rows or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"{name} is {array.dtype} {array.shape}; it must be of integers, with {rows} rows "
                "like tables."
            )
    if not 0 <= num_decodes <= min(tokens, rows):
        raise ValueError(
            f"num_decodes is {num_decodes}; there are {tokens} tokens and {rows} rows."
        )


def check_pages(pages: Pages) -> None:
    """Raises ValueError for pages whose arrays do not fit each other."""
    num_pages, kv_heads, dim, page_size = pages.k.shape
    if isinstance(pages, LatentPages):
        if pages.k.dtype.name in QUANTIZED or pages.k.dtype.name not in PAGE_DTYPES:
            raise ValueError(f"Latents are {pages.k.dtype}; they must be of a floating dtype.")
        if not 0 < pages.value_dim <= dim:
            raise ValueError(f"value_dim is {pages.value_dim}; latents have {dim} features.")
        return
    if pages.v.shape != (num_pages, kv_heads, page_size, dim):
        raise ValueError(
            f"Pages of keys are {pages.k.shape}, so those of values must be "
            f"{(num_pages, kv_heads, page_size, dim)}, and not {pages.v.shape}."
        )
    if pages.k.dtype != pages.v.dtype or pages.k.dtype.name not in PAGE_DTYPES:
        raise ValueError(
            f"Keys are {pages.k.dtype} and values {pages.v.dtype}; both must be of one of "
            f"{', '.join(PAGE_DTYPES)}."
        )
    if pages.scales is None:
        if pages.k.dtype == jnp.uint8:
            raise ValueError("Pages of uint8 have no scales; features of 4 bits need them.")
        return
    if pages.k.dtype.name not in QUANTIZED:
        raise ValueError(
            f"Pages of {pages.k.dtype} have scales; only {' and '.join(QUANTIZED)} have any."
        )
    expected = num_pages, kv_heads, 2, page_size
    if pages.scales.shape != expected or pages.scales.dtype != jnp.float32:
        raise ValueError(
            f"scales are {pages.scales.dtype} {pages.scales.shape}; with these pages they must be "
            f"float32 {expected}."
        )


def check_factors(pages: Pages, k_scale: jax.Array | None, v_scale: jax.Array | None) -> None:
    """Raises ValueError for scales of all tokens where pages have none."""
    if k_scale is v_scale is None:
        return
    if isinstance(pages, LatentPages):
        raise ValueError("Latents have no scales, so k_scale and v_scale must be None.")
    if pages.scales is not None:
        raise ValueError("Pages have scales of their own, so k_scale and v_scale must be None.")
