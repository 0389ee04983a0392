"""Signatures of paged attention and partial attention.

Everything that can be expressed as data or applied to a partial result is handled here, once, which
keeps kernels simple: masks become ranges of positions (`Visible`), scales of all tokens of a head
are folded into queries and results, attention within speculation trees and sinks are merged in.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backends
from pallas_kernels.merge import empty_partial, merge_sinks, merge_two
from pallas_kernels.paged_attention import check_case, checks, masks, xla, xla_prefix
from pallas_kernels.paged_attention.layout import (
    DecodeGroups,
    LatentPages,
    Pages,
    Paths,
    RaggedBatch,
    Visible,
    as_keys,
)
from pallas_kernels.paged_attention.tree import attend_within_trees

_FLOAT32 = jnp.dtype(jnp.float32)

_ATTEND = backends.Operation(
    name="paged_attention",
    xla=xla.paged_attention,
    kernels={
        "gpu": "pallas_kernels.paged_attention.gpu.attention",
        "tpu": "pallas_kernels.paged_attention.tpu.attention",
    },
    shapes_class=check_case.shapes_class,
    check_case=check_case.check_case,
)

_ATTEND_LATENTS = dataclasses.replace(_ATTEND, name="latent_attention", kernels={})


def paged_attention(
    q: jax.Array,
    pages: Pages,
    batch: RaggedBatch,
    *,
    num_decodes: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    groups: DecodeGroups | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: backends.Backend = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of each token over its row's pages.

    q [tokens, query_heads, head_dim]; query head h reads KV head h // (query_heads / kv_heads). Of
    LatentPages a value is the first `value_dim` features of its key; no kernel attends to them.
    A token at position p sees positions (p - window, p], or [0, p] without a window. The keys and
    values of the batch's own tokens must have been written (`write_kv`).

    soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2, 2408.00118).
    sinks: float32 [query_heads], logits in each softmax without a value (2309.17453, as trained in
        gpt-oss).
    tree_mask: bool [tokens, width]. A row after the decodes with at most `width` tokens is a tree,
        parents before children and in order of depth: token t sees the committed context and token
        j of its own row where tree_mask[t, j], itself included. Its position is the end of the
        context plus its depth. Longer rows are prefill chunks, as without a mask.
    groups: decodes that share their first pages. Each group reads these once, and its decodes'
        results are merged with those of their other pages, so they differ by rounding. Without a
        window only.
    k_scale, v_scale: float32 [kv_heads], factor of an element of quantized pages that have no
        scales of their own; 1 by default.
    backend: see `backends.Backend`.

    Returns out [tokens, query_heads, value_dim], where value_dim is head_dim except of LatentPages,
    and lse [tokens, query_heads] float32, the log-sum-exp of the scaled scores, by which partial
    results merge. Tokens of no row, and rows with no context, get out = 0 and lse = -inf, whatever
    the sinks. A row's result does not depend on the other rows, but for its group. Raises
    ValueError for inconsistent shapes or dtypes, and where `backend` is "pallas" for what the
    device's kernel does not support.
    """
    checks.check(q, pages, batch, num_decodes, scale)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a token sees at least itself, so 1 or more.")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None for no cap.")
    tokens, heads, _ = q.shape
    kv_heads = pages.k.shape[1]
    checks.check_factors(pages, k_scale, v_scale)
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
    if groups is not None and window is not None:
        raise ValueError(f"window is {window}; with groups of decodes it must be None.")
    if len(batch.tables) == 0:
        return _empty(q, pages, q.dtype)
    if len(batch.tables) == num_decodes or (tree_mask is not None and tree_mask.shape[1] == 0):
        tree_mask = None  # no row can be a tree

    dtype = q.dtype
    if k_scale is not None:
        q = (q * jnp.repeat(k_scale, heads // kv_heads)[:, None]).astype(dtype)
    visible = masks.causal(batch, tokens, num_decodes, window, tree_mask)
    scores = {"scale": scale, "soft_cap": soft_cap, "backend": backend}
    in_groups = groups is not None and num_decodes > 0
    if in_groups:
        visible, shared = masks.split_at_prefixes(visible, groups, num_decodes)
    in_parts = in_groups or any(part is not None for part in (tree_mask, sinks, v_scale))
    out, lse = _attend(
        q,
        pages,
        batch,
        visible,
        num_decodes=num_decodes,
        out_dtype=_FLOAT32 if in_parts else dtype,
        **scores,
    )
    if in_groups:
        out, lse = _with_groups(out, lse, q, pages, batch, groups, shared, **scores)
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
        out, lse = merge_sinks(out, lse, sinks.astype(jnp.float32))
    if v_scale is not None:
        out = out * jnp.repeat(v_scale, heads // kv_heads)[:, None]
    return out.astype(dtype), lse


def tree_attention(
    q: jax.Array,
    pages: Pages,
    batch: RaggedBatch,
    trees: RaggedBatch,
    tree_mask: jax.Array,
    *,
    positions: jax.Array,
    until: jax.Array,
    paths: Paths,
    num_decodes: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    backend: backends.Backend = "auto",
) -> tuple[jax.Array, jax.Array]:
    """As `paged_attention`, of a batch whose first tokens are those of small trees.

    Each of these tokens is a row of `batch`, with the page table of its tree, and sees the
    committed context before `paths.first` and then its path; the other rows are prefill chunks. A
    token at `positions` int32 [tokens] sees none of `until` int32 [tokens] or after.

    In plain XLA a token attends as a decode would whose context is its path, to the last bit.
    Kernels know no paths: there the rows of `trees`, with at most `width` tokens each, see
    themselves by `tree_mask` bool [tokens, width] as in `paged_attention`, and the rest of their
    paths, all trees being decodes, is merged in. Many short rows as decodes do not pay for blocks
    of a chunk's queries.
    """
    since = jnp.zeros_like(until) if window is None else jnp.maximum(positions + 1 - window, 0)
    visible = Visible(jnp.minimum(since, until), until)
    options = {"scale": scale, "soft_cap": soft_cap}
    of_batch = {"num_decodes": num_decodes, "backend": backend} | options
    if _uses_xla(backend, q, pages, batch, visible, num_decodes=num_decodes, **options):
        dtype = q.dtype if sinks is None else _FLOAT32
        out, lse = _attend(q, pages, batch, visible, out_dtype=dtype, paths=paths, **of_batch)
    else:
        trees_at = slice(num_decodes)
        before = until.at[trees_at].min(paths.first)
        committed = Visible(jnp.minimum(since, before), before)
        context = attend(q, pages, batch, committed, **of_batch)
        own = attend_within_trees(
            q, pages, trees, tree_mask, num_decodes=0, window=window, **options
        )
        out, lse = merge_two(*context, *own)
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks.astype(jnp.float32))
    return out.astype(q.dtype), lse


def attend(
    q: jax.Array,
    pages: Pages,
    batch: RaggedBatch,
    visible: Visible,
    *,
    num_decodes: int,
    scale: float,
    soft_cap: float | None = None,
    backend: backends.Backend = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Partial attention of each token to any range of its row's positions.

    As `paged_attention`, with `visible` in place of every mask, and out float32, so that merging
    rounds no partial: the caller rounds the result. `batch.context` is not read, and `batch.starts`
    and `batch.lengths` only for rows that are not decodes. Elements of pages without scales are
    used as they are. Visible ranges are limited to the capacity of a row's page table.
    """
    return _attend(
        q,
        pages,
        batch,
        visible,
        num_decodes=num_decodes,
        scale=scale,
        soft_cap=soft_cap,
        backend=backend,
        out_dtype=_FLOAT32,
    )


def _attend(
    q: jax.Array,
    pages: Pages,
    batch: RaggedBatch,
    visible: Visible,
    *,
    num_decodes: int,
    scale: float,
    soft_cap: float | None,
    backend: backends.Backend,
    out_dtype: jnp.dtype,
    paths: Paths | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `attend`, with out of `out_dtype`; in plain XLA where there are `paths`."""
    checks.check(q, pages, batch, num_decodes, scale)
    rows, max_pages = batch.tables.shape
    # If all rows are decodes, the tokens after them belong to no row.
    served = num_decodes if rows == num_decodes else len(q)
    if served == 0 or max_pages == 0:
        return _empty(q, pages, out_dtype)
    until = jnp.minimum(visible.until, max_pages * pages.k.shape[3])
    visible = Visible(visible.since[:served], until[:served])
    arguments = as_keys(q[:served], pages), pages, batch, visible
    options = {
        "num_decodes": num_decodes,
        "scale": scale,
        "soft_cap": soft_cap,
        "out_dtype": out_dtype,
    }
    if paths is not None:
        out, lse = xla.paged_attention(*arguments, paths=paths, **options)
    else:
        out, lse = _operation(pages).run(backend, *arguments, **options)
    out = as_keys(out, pages)
    if served == len(q):
        return out, lse
    return tuple(map(jnp.concatenate, zip((out, lse), _empty(q[served:], pages, out_dtype))))


def _operation(pages: Pages) -> backends.Operation:
    return _ATTEND_LATENTS if isinstance(pages, LatentPages) else _ATTEND


def _uses_xla(backend: backends.Backend, *arguments, **options) -> bool:
    """Whether `attend` of these arguments runs in plain XLA."""
    _, pages, *_ = arguments
    chosen = _operation(pages).choose(backend, *arguments, out_dtype=_FLOAT32, **options)
    return chosen is xla.paged_attention


def _with_groups(
    out: jax.Array,
    lse: jax.Array,
    q: jax.Array,
    pages: Pages,
    batch: RaggedBatch,
    groups: DecodeGroups,
    visible: Visible,
    *,
    scale: float,
    soft_cap: float | None,
    backend: backends.Backend,
) -> tuple[jax.Array, jax.Array]:
    """The partial of all tokens, merged with that of decodes over what their groups share, which is
    `visible` of [decodes]. A kernel takes a group for a prefill chunk without a causal mask."""
    decodes = len(visible.until)
    owner = masks.first_of_groups(batch, groups, decodes)
    rows = RaggedBatch(batch.tables[owner], groups.context, groups.starts, groups.lengths)
    until = jnp.minimum(visible.until, batch.tables.shape[1] * pages.k.shape[3])
    arguments = as_keys(q[:decodes], pages), pages, rows, Visible(visible.since, until)
    scores = {"scale": scale, "soft_cap": soft_cap}
    in_xla = _uses_xla(backend, *arguments, num_decodes=0, **scores)

    def merged():
        if in_xla:
            shared, its_lse = xla_prefix.attend(*arguments, **scores)
        else:
            options = {"num_decodes": 0, "out_dtype": _FLOAT32} | scores
            shared, its_lse = _operation(pages).run(backend, *arguments, **options)
        its_lse = jnp.where(batch.context[:decodes, None] > 0, its_lse, -jnp.inf)
        both = merge_two(out[:decodes], lse[:decodes], as_keys(shared, pages), its_lse)
        return tuple(map(jnp.concatenate, zip(both, (out[decodes:], lse[decodes:]))))

    if not in_xla:
        return merged()
    return lax.cond(jnp.any(groups.lengths > 0), merged, lambda: (out, lse))


def _empty(q: jax.Array, pages: Pages, out_dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The partial of these queries over no keys."""
    return empty_partial(q[..., : pages.value_dim], out_dtype)
