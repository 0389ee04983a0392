"""Signatures of paged attention, partial attention and KV writes.

Everything that can be expressed as data or applied to a partial result is handled here, once, which
keeps kernels simple: masks become ranges of positions (`Visible`), scales of quantized pages are
folded into queries and results, attention within speculation trees and sinks are merged in.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backends
from pallas_kernels.merge import empty_partial, merge_two
from pallas_kernels.paged_attention import check_case, masks, write_check_case, xla
from pallas_kernels.paged_attention.layout import KVPages, RaggedBatch, Visible
from pallas_kernels.paged_attention.tree import attend_within_trees

PAGE_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
"""Dtypes of pages. The last two are quantized: a value is scale * element."""

_ATTEND = backends.Operation(
    name="paged_attention",
    xla=xla.paged_attention,
    kernels={
        "gpu": "pallas_kernels.paged_attention.mosaic_gpu",
        "tpu": "pallas_kernels.paged_attention.mosaic_tpu",
    },
    shapes_class=check_case.shapes_class,
    check_case=check_case.check_case,
)

_WRITE = backends.Operation(
    name="write_kv",
    xla=xla.write_kv,
    kernels={"gpu": None, "tpu": "pallas_kernels.paged_attention.mosaic_tpu_write"},
    shapes_class=write_check_case.shapes_class,
    check_case=write_check_case.check_case,
)


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    num_decodes: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: backends.Backend = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of each token over its row's pages.

    q [tokens, query_heads, head_dim]; query head h reads KV head h // (query_heads / kv_heads).
    A token at position p sees positions (p - window, p], or [0, p] without a window. The keys and
    values of the batch's own tokens must have been written (`write_kv`).

    soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2, 2408.00118).
    sinks: float32 [query_heads], logits in each softmax without a value (2309.17453, as trained in
        gpt-oss).
    tree_mask: bool [tokens, width]. A row after the decodes with at most `width` tokens is a tree,
        parents before children and in order of depth: token t sees the committed context and token
        j of its own row where tree_mask[t, j], itself included. Its position is the end of the
        context plus its depth. Longer rows are prefill chunks, as without a mask.
    k_scale, v_scale: float32 [kv_heads], factor of an element of quantized pages; 1 by default.
    backend: see `backends.Backend`.

    Returns out [tokens, query_heads, head_dim] and lse [tokens, query_heads] float32, the
    log-sum-exp of the scaled scores, by which partial results merge. Tokens of no row, and rows
    with no context, get out = 0 and lse = -inf, whatever the sinks. A row's result does not depend
    on the other rows. Raises ValueError for inconsistent shapes or dtypes, and where `backend` is
    "pallas" for what the device's kernel does not support.
    """
    _check(q, pages, batch, num_decodes, scale)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a token sees at least itself, so 1 or more.")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None for no cap.")
    tokens, heads, _ = q.shape
    kv_heads = pages.k.shape[1]
    for name, array, shape in (
        ("sinks", sinks, (heads,)),
        ("k_scale", k_scale, (kv_heads,)),
        ("v_scale", v_scale, (kv_heads,)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; it must be {shape}.")
    if tree_mask is not None and (
        tree_mask.ndim != 2 or tree_mask.shape[0] != tokens or tree_mask.dtype != bool
    ):
        raise ValueError(
            f"tree_mask is {tree_mask.dtype} {tree_mask.shape}; it must be bool ({tokens}, width)."
        )
    if len(batch.tables) == 0:
        return empty_partial(q, q.dtype)
    if len(batch.tables) == num_decodes or (tree_mask is not None and tree_mask.shape[1] == 0):
        tree_mask = None  # no row can be a tree

    dtype = q.dtype
    if k_scale is not None:
        q = (q * jnp.repeat(k_scale, heads // kv_heads)[:, None]).astype(dtype)
    visible = masks.causal(batch, tokens, num_decodes, window, tree_mask)
    out, lse = attend(
        q,
        pages,
        batch,
        visible,
        num_decodes=num_decodes,
        scale=scale,
        soft_cap=soft_cap,
        backend=backend,
    )
    if tree_mask is not None:
        own = attend_within_trees(
            q,
            pages,
            batch,
            tree_mask,
            num_decodes=num_decodes,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )
        out, lse = merge_two(out, lse, *own)
    if sinks is not None:
        whole = jnp.where(lse > -jnp.inf, jnp.logaddexp(lse, sinks), lse)
        out = out * jnp.exp(jnp.where(lse > -jnp.inf, lse - whole, 0))[..., None]
        lse = whole
    if v_scale is not None:
        out = out * jnp.repeat(v_scale, heads // kv_heads)[:, None]
    return out.astype(dtype), lse


def attend(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    visible: Visible,
    *,
    num_decodes: int,
    scale: float,
    soft_cap: float | None = None,
    backend: backends.Backend = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Partial attention of each token to any range of its row's positions.

    As `paged_attention`, with `visible` in place of every mask. `batch.context` is not read, and
    `batch.starts` and `batch.lengths` only for rows that are not decodes. Elements of quantized
    pages are used unscaled. Visible ranges are limited to the capacity of a row's page table.
    """
    _check(q, pages, batch, num_decodes, scale)
    rows, max_pages = batch.tables.shape
    # If all rows are decodes, the tokens after them belong to no row.
    served = num_decodes if rows == num_decodes else len(q)
    if served == 0 or max_pages == 0:
        return empty_partial(q, q.dtype)
    until = jnp.minimum(visible.until, max_pages * pages.k.shape[3])
    out, lse = _ATTEND.run(
        backend,
        q[:served],
        pages,
        batch,
        Visible(visible.since[:served], until[:served]),
        num_decodes=num_decodes,
        scale=scale,
        soft_cap=soft_cap,
    )
    if served == len(q):
        return out, lse
    return tuple(map(jnp.concatenate, zip((out, lse), empty_partial(q[served:], q.dtype))))


def write_kv(
    pages: KVPages,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: backends.Backend = "auto",
) -> KVPages:
    """Write k, v [tokens, kv_heads, head_dim] to slots (page_ids, offsets), int32 [tokens] each.

    In place when the pages are donated. An id outside the pool or an offset outside the page,
    negative ones included, writes nothing, and writes to page 0 may be dropped. For quantized
    pages, values are divided by their scale, float32 [kv_heads] and 1 by default, rounded to
    nearest and clipped to the range of the dtype. backend: see `backends.Backend`.

    Raises ValueError for inconsistent shapes, and where `backend` is "pallas" for what the device's
    kernel does not support.
    """
    _check_pages(pages)
    _, kv_heads, dim, page_size = pages.k.shape
    for name, array, shape in (
        ("k", k, (len(page_ids), kv_heads, dim)),
        ("v", v, (len(page_ids), kv_heads, dim)),
        ("offsets", offsets, (len(page_ids),)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; it must be {shape}.")
    page_ids = jnp.where((offsets >= 0) & (offsets < page_size), page_ids, -1)
    k = xla.to_elements(k, k_scale, pages.k.dtype)
    v = xla.to_elements(v, v_scale, pages.v.dtype)
    return KVPages(*_WRITE.run(backend, pages, k, v, page_ids, offsets))


def _check(q, pages, batch, num_decodes, scale):
    _check_pages(pages)
    tokens, heads, dim = q.shape
    _, kv_heads, k_dim, _ = pages.k.shape
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


def _check_pages(pages):
    num_pages, kv_heads, dim, page_size = pages.k.shape
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
