"""Signatures of context-parallel attention: sequences split over several ranks.

For use inside `jax.shard_map`, where a rank is a position along the mesh axis `axis_name`, or along
several axes together. All functions take and return this rank's arrays. Attention itself is
`paged_attention.attend`, so each device uses its kernel: visibility becomes ranges of positions
(`work`), which need no mask, and partial results are merged by their log-sum-exps.

Keys and values are sent as pages, as they are stored: keys with positions last, values with
features last. Their owner brings them into that order once, and no hop transposes anything.

`shard_map` needs `check_vma=False`: the loops inside attention do not declare what varies.
"""

from __future__ import annotations

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backends
from pallas_kernels.paged_attention import KVPages, attend
from pallas_kernels.ring_attention.layout import Layout, round_robin
from pallas_kernels.ring_attention.pass_kv import pass_kv
from pallas_kernels.ring_attention.token_ring import token_ring
from pallas_kernels.ring_attention.work import Work

Scheme = Literal["pass_kv", "pass_kv_both_ways", "pass_q"]
"""What is sent around the ring: keys and values, halves of them in either direction (`pass_kv`), or
queries, with results sent the other way (`token_ring`, which compares the schemes)."""

PAGE_SIZE = 128
"""For keys and values that are not in pages yet: supported by the kernels of every device."""


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    layout: Layout,
    *,
    axis_name: str | tuple[str, ...],
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scheme: Scheme = "pass_kv",
    backend: backends.Backend = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Attention within whole sequences, each split over the ranks.

    q [rows, shard, query_heads, head_dim], k and v [rows, shard, kv_heads, head_dim]: this rank's
        tokens of each sequence in order of position, then padding. Query head h reads KV head
        h // (query_heads / kv_heads).
    lengths [rows] int32: tokens of the whole sequences, the same on every rank.
    layout: which tokens those are, as `contiguous(lengths, ranks)` or `zigzag(lengths, ranks)`
        assign them; `shard` must hold the largest share, which cannot be checked on traced data.
    causal: a token sees itself and those before it; otherwise its whole sequence.
    window: a token at position p sees (p - window, p] only; causal only.
    soft_cap: scores become soft_cap * tanh(score / soft_cap).

    Returns out [rows, shard, query_heads, head_dim] of q's dtype and lse [rows, shard, query_heads]
    float32, this rank's; padding gets (0, -inf). Raises ValueError for inconsistent options, shapes
    and dtypes.
    """
    rows, shard, _, dim = q.shape
    if k.shape != v.shape or k.shape[:2] != (rows, shard) or k.shape[3] != dim:
        raise ValueError(
            f"k has shape {k.shape} and v {v.shape}; with q {q.shape} both must be "
            f"({rows}, {shard}, kv_heads, {dim})."
        )
    work = Work(layout, layout, lengths, lengths, shard, causal, window)
    pages = _to_pages(k, v)
    tables = jnp.arange(len(pages.k), dtype=jnp.int32).reshape(rows, -1)
    return _around(q, pages, tables, work, axis_name, scale, soft_cap, scheme, backend)


def ring_paged_attention(
    q: jax.Array,
    pages: KVPages,
    tables: jax.Array,
    context: jax.Array,
    lengths: jax.Array,
    layout: Layout,
    *,
    axis_name: str | tuple[str, ...],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    scheme: Scheme = "pass_q",
    backend: backends.Backend = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of new tokens, split over the ranks, to all pages of their sequences.

    Page j of every sequence is on rank j % ranks, as that rank's page j // ranks of the sequence.

    q [rows, shard, query_heads, head_dim]: this rank's new tokens of each sequence in order of
        position, then padding.
    pages: this rank's pool, with the new tokens' keys and values written (`kvp_slots`).
    tables [rows, pages] int32: this rank's pages of each sequence.
    context [rows], lengths [rows] int32: tokens of the whole sequences, and the new ones among
        them, which come last; the same on every rank.
    layout: which of the new tokens are this rank's, counted from the first new one.
    scheme: with "pass_q" each rank attends to its pool in place. Otherwise all pages in `tables`,
        full width, are copied and sent. `choose_scheme` says which is faster.

    Otherwise as `ring_attention`. Pages with scales are sent with them; elements of others are used
    as they are.
    """
    keys = round_robin(pages.k.shape[3], layout.ranks)
    work = Work(layout, keys, context, lengths, q.shape[1], True, window)
    if scheme != "pass_q":
        pages = jax.tree.map(lambda array: array.at[tables.reshape(-1)].get(mode="clip"), pages)
    return _around(q, pages, tables, work, axis_name, scale, soft_cap, scheme, backend)


def _around(q, pages, tables, work, axis_name, scale, soft_cap, scheme, backend):
    """The scheme for a flat batch; with "pass_kv", `pages` are the rows' own, in order."""
    if scheme not in get_args(Scheme):
        raise ValueError(f"scheme is {scheme!r}; it can be {', '.join(get_args(Scheme))}.")
    if work.window is not None and (work.window < 1 or not work.causal):
        raise ValueError(f"window is {work.window}; it must be at least 1, and attention causal.")
    ranks = lax.axis_size(axis_name)
    if work.queries.ranks != ranks:
        raise ValueError(
            f"The layout is for {work.queries.ranks} ranks; axis {axis_name!r} has {ranks}."
        )
    # All steps are alike: one jitted function is traced and its kernel lowered once.
    attend_to = jax.jit(
        functools.partial(attend, num_decodes=0, scale=scale, soft_cap=soft_cap, backend=backend)
    )
    flat = q.reshape(-1, *q.shape[2:])
    if scheme == "pass_q":
        out, lse = token_ring(flat, pages, tables, work, axis_name=axis_name, attend=attend_to)
    else:
        both_ways = scheme == "pass_kv_both_ways"
        out, lse = pass_kv(
            flat, pages, work, axis_name=axis_name, both_ways=both_ways, attend=attend_to
        )
    return out.astype(q.dtype).reshape(q.shape), lse.reshape(q.shape[:3])


def _to_pages(k, v):
    """k, v [rows, shard, kv_heads, head_dim] as pages, in order within a row, row after row."""
    shard, heads, dim = k.shape[1:]
    padding = [(0, 0), (0, -shard % PAGE_SIZE), (0, 0), (0, 0)]
    k, v = (jnp.pad(array, padding).reshape(-1, PAGE_SIZE, heads, dim) for array in (k, v))
    return KVPages(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))
