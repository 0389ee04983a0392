"""What a step gives to the model: the places of its tokens, and what each of them sees."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.paged_attention import DecodeGroups, Paths, RaggedBatch


class VisibleTrees(NamedTuple):
    """What the tokens of a step with trees see: each the positions before `until` int32 [tokens],
    its own being `positions` int32 [tokens]; the last of them, if it is a tree's, along its path in
    `paths`. `mask` bool [tokens, width] says which tokens of its tree are on it, and `rows` are the
    trees, with their pages; None where a step is cut into tiles."""

    positions: jax.Array
    until: jax.Array
    paths: Paths
    mask: jax.Array | None
    rows: RaggedBatch | None


class SlotMapping(NamedTuple):
    """Where a step's keys and values are written and read, in the layers of one KV group: token t
    is written to page `page_ids[t]` at `offsets[t]`, int32 [tokens] each; `batch` has each row's
    pages, `trees` what its decodes see where they are trees, and `decode_groups` the decodes
    that read their first pages together, None where none do."""

    page_ids: jax.Array
    offsets: jax.Array
    batch: RaggedBatch
    trees: VisibleTrees | None = None
    decode_groups: DecodeGroups | None = None


class StepInputs(NamedTuple):
    """Inputs of a step other than the model, int32 but for `real`.

    The first tokens are those of decodes, whose ids are on the device in `slots`, `width` of each;
    the ids of the others are `prefill_ids`. `sampled [sample_rows * width]` are indices of the
    tokens to sample from. There is a slot mapping for each KV group. `adapters` are the slots of
    the tokens' LoRA adapters, 0 for none; None without adapters. `since` are the positions from
    which on their sequences' KV is in the pool; None where that is always from the first. `real`
    bool [tokens] says which tokens belong to a sequence.
    """

    slots: jax.Array
    prefill_ids: jax.Array
    positions: jax.Array
    sampled: jax.Array
    slot_mappings: tuple[SlotMapping, ...]
    adapters: jax.Array | None
    since: jax.Array | None
    real: jax.Array


class DecodeRows(NamedTuple):
    """Decodes on the device: the page tables of all slots, and for each row int32 [rows] its slot
    and the position after the last that it may write."""

    tables: jax.Array
    slots: jax.Array
    stops: jax.Array
