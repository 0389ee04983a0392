"""Signatures of KV writes. Kernels write elements; their scales are written here, once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import backends
from pallas_kernels.paged_attention import checks, write_check_case, xla
from pallas_kernels.paged_attention.layout import LatentPages, Pages, rotated

_WRITE = backends.Operation(
    name="write_kv",
    xla=xla.write_kv,
    kernels={"gpu": None, "tpu": "pallas_kernels.paged_attention.tpu.write"},
    shapes_class=write_check_case.shapes_class,
    check_case=write_check_case.check_case,
)

_WRITE_LATENTS = dataclasses.replace(
    _WRITE, name="write_latents", kernels={"gpu": None, "tpu": None}
)


def write_kv(
    pages: Pages,
    k: jax.Array,
    v: jax.Array | None,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: backends.Backend = "auto",
) -> Pages:
    """Write k, v [tokens, kv_heads, head_dim] to slots (page_ids, offsets), int32 [tokens] each.
    Of LatentPages `v` is part of `k`, and is not read.

    In place when the pages are donated. An id outside the pool or an offset outside the page,
    negative ones included, writes nothing, and writes to page 0 may be dropped. For quantized
    pages, values are divided by their scale, rounded to nearest and clipped to the range of the
    dtype. In pages with scales, every token and head gets those with which its largest value is the
    dtype's largest; in others they are k_scale and v_scale, float32 [kv_heads] and 1 by default.
    backend: see `backends.Backend`.

    Raises ValueError for inconsistent shapes, and where `backend` is "pallas" for what the device's
    kernel does not support.
    """
    checks.check_pages(pages)
    _, kv_heads, _, page_size = pages.k.shape
    dim = pages.head_dim
    new = [("k", k)] if isinstance(pages, LatentPages) else [("k", k), ("v", v)]
    for name, array, shape in (
        *((name, array, (len(page_ids), kv_heads, dim)) for name, array in new),
        ("offsets", offsets, (len(page_ids),)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; it must be {shape}.")
    checks.check_factors(pages, k_scale, v_scale)
    page_ids = jnp.where((offsets >= 0) & (offsets < page_size), page_ids, -1)
    if isinstance(pages, LatentPages):
        return _WRITE_LATENTS.run(backend, pages, k.astype(pages.k.dtype), None, page_ids, offsets)
    scales = pages.scales
    if pages.k.dtype == jnp.uint8:
        k, v = rotated(k), rotated(v)
    if scales is not None:
        k_scale, v_scale = (xla.scales_of(values, pages.k.dtype) for values in (k, v))
        new = jnp.stack([k_scale, v_scale], axis=-1)
        scales = xla.write_scales(scales, new, page_ids, offsets)
    k = xla.to_elements(k, k_scale, pages.k.dtype)
    v = xla.to_elements(v, v_scale, pages.v.dtype)
    written = _WRITE.run(backend, pages.elements, k, v, page_ids, offsets)
    return written._replace(scales=scales)


def move_kv(
    pages: Pages,
    sources: tuple[jax.Array, jax.Array],
    targets: tuple[jax.Array, jax.Array],
    *,
    backend: backends.Backend = "auto",
) -> Pages:
    """The pages with the keys and values of n tokens, and their scales, moved from `sources` to
    `targets`: page ids and offsets, int32 [n] each.

    All are read before any is written. In place when the pages are donated. A target outside the
    pool or the page, negative ids included, moves nothing; a source must be inside. backend: see
    `backends.Backend`.
    """
    checks.check_pages(pages)
    from_pages, from_offsets = sources
    page_ids, offsets = targets
    page_ids = jnp.where((offsets >= 0) & (offsets < pages.k.shape[3]), page_ids, -1)
    # Indices around slices: [n, kv_heads, head_dim] of both.
    k = pages.k[from_pages, :, :, from_offsets]
    if isinstance(pages, LatentPages):
        return _WRITE_LATENTS.run(backend, pages, k, None, page_ids, offsets)
    v = pages.v[from_pages, :, from_offsets]
    scales = pages.scales
    if scales is not None:
        moved = scales[from_pages, :, :, from_offsets]
        scales = xla.write_scales(scales, moved, page_ids, offsets)
    written = _WRITE.run(backend, pages.elements, k, v, page_ids, offsets)
    return written._replace(scales=scales)
