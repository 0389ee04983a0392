"""Masks as ranges: which positions each token of a ragged batch sees."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.layout import DecodeGroups, RaggedBatch, Visible


class Owners(NamedTuple):
    """Owner of each token, [tokens] each: its row (0 if none), its index among the row's tokens,
    and whether it belongs to a row."""

    row: jax.Array
    index: jax.Array
    owned: jax.Array


def owners(batch: RaggedBatch, num_tokens: int) -> Owners:
    """The owner of each of `num_tokens` tokens."""
    token = jnp.arange(num_tokens)[:, None]
    inside = (token >= batch.starts) & (token < batch.starts + batch.lengths)
    row = jnp.argmax(inside, axis=1)
    return Owners(row, token[:, 0] - batch.starts[row], jnp.any(inside, axis=1))


def causal(
    batch: RaggedBatch,
    num_tokens: int,
    num_decodes: int,
    window: int | None,
    tree_mask: jax.Array | None,
) -> Visible:
    """A token at position p sees (p - window, p], or [0, p] without a window.

    Tokens of a tree see the committed context, within the window before their own position.
    """
    # Decodes need no owner lookup, which keeps decode-only programs short.
    seen = [(batch.context[:num_decodes] - 1, batch.context[:num_decodes])]
    if num_tokens > num_decodes:
        row, index, owned = (field[num_decodes:] for field in owners(batch, num_tokens))
        committed = (batch.context - batch.lengths)[row]
        position, until = committed + index, committed + index + 1
        if tree_mask is not None:
            in_tree = is_tree(batch, num_decodes, tree_mask)[row]
            position = jnp.where(in_tree, committed + depths(tree_mask)[num_decodes:], position)
            until = jnp.where(in_tree, committed, until)
        seen.append((position, jnp.where(owned, until, 0)))
    position, until = (jnp.concatenate(parts) for parts in zip(*seen))
    since = jnp.zeros_like(until) if window is None else jnp.maximum(position + 1 - window, 0)
    return Visible(jnp.minimum(since, until), until)


def split_at_prefixes(
    visible: Visible, groups: DecodeGroups, num_decodes: int
) -> tuple[Visible, Visible]:
    """What each token sees beyond the shared pages of its group, and what each of the decodes sees
    of them, which is the same for the whole group, padding rows included."""
    inside = _in_groups(groups, num_decodes)
    shared = jnp.sum(jnp.where(inside, groups.context[:, None], 0), axis=0, dtype=jnp.int32)
    beyond = visible.since.at[:num_decodes].max(shared)
    return visible._replace(since=beyond), Visible(jnp.zeros_like(shared), shared)


def first_of_groups(batch: RaggedBatch, groups: DecodeGroups, num_decodes: int) -> jax.Array:
    """int32 [groups]: the first decode of each that is no padding row, so that its table has the
    shared pages; 0 where there is none."""
    present = _in_groups(groups, num_decodes) & (batch.context[:num_decodes] > 0)
    return jnp.argmax(present, axis=1).astype(jnp.int32)


def _in_groups(groups: DecodeGroups, num_decodes: int) -> jax.Array:
    """bool [groups, decodes]"""
    decode = jnp.arange(num_decodes)
    starts, ends = groups.starts[:, None], (groups.starts + groups.lengths)[:, None]
    return (decode >= starts) & (decode < ends)


def is_tree(batch: RaggedBatch, num_decodes: int, tree_mask: jax.Array) -> jax.Array:
    """bool [rows]: rows that are a tree, those with no more tokens than the mask's width."""
    few = batch.lengths <= tree_mask.shape[1]
    return few & (jnp.arange(len(batch.lengths)) >= num_decodes)


def depths(tree_mask: jax.Array) -> jax.Array:
    """int32 [tokens]: number of ancestors of a token within its tree."""
    return jnp.sum(tree_mask, axis=1, dtype=jnp.int32) - 1
