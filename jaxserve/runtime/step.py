"""The functions that become programs: forward a batch, sample a token.

They are pure, their shapes are fixed by a StepLayout, and what they replace (KV pages, page tables,
last tokens, sampling state) is donated to them. The model is one program, `forward`, or three kinds
of them, `begin`, `layers` and `finish`, of which the middle one serves every group of layers that
are alike (docs/decisions/002-programs.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models import parallel
from jaxserve.models.config import LayerKind, ModelConfig
from jaxserve.models.family import Family, Params
from jaxserve.runtime import sequence
from jaxserve.runtime.batch import Addresses, StepLayout
from jaxserve.runtime.sequence import DealtTokens
from jaxserve.runtime.tiles import batch_of_tile, num_real_tokens, scan_tiles
from jaxserve.sampling import SampleOutput, SamplingState, TokenLogprobs, token_logprobs
from jaxserve.sampling import general as sample_general
from jaxserve.sampling import greedy as sample_greedy
from jaxserve.sampling.rows import SLOT
from pallas_kernels.paged_attention import KVPages, paged_attention, write_kv
from sharding_rules import STAGE

PROMPT_TILE = 32
"""Prompt tokens that are scored together."""


def forward(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    kv: list[KVPages],
    tables: jax.Array,
    last_tokens: jax.Array,
    metadata: jax.Array,
) -> tuple[list[KVPages], jax.Array, jax.Array, jax.Array]:
    """Run the whole model over one packed step.

    `kv` holds one KVPages a layer, `tables` int32 [slots + 1, max_pages] the page table of every
    slot, `last_tokens` [slots + 1] int32 the newest token of every slot. Returns the pages with the
    step's keys and values written, the tables with its changes, the hidden states to sample from
    [hidden, sample_width], and those of the prefill tokens [hidden, prefill_tokens].
    """
    tables, x, shared, addresses, sampled = begin(
        family, config, layout, params, tables, last_tokens, metadata
    )
    kv, x = layers(
        family, config, layout, config.layer_kinds, params["layers"], kv, x, shared, addresses
    )
    return kv, tables, *finish(family, config, layout, params, x, sampled)


def begin(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    tables: jax.Array,
    last_tokens: jax.Array,
    metadata: jax.Array,
) -> tuple[jax.Array, jax.Array, Any, Addresses, jax.Array]:
    """The first part of `forward`: page tables, activations, what layers share, addresses, sampled
    tokens."""
    tables, step = layout.unpack(tables, metadata)
    token_ids = jnp.concatenate([last_tokens[step.slots], step.prefill_ids])
    token_ids = jnp.pad(token_ids, (0, layout.num_tokens - len(token_ids)))
    positions = step.positions
    if layout.seq > 1:
        token_ids, positions = map(DealtTokens(layout).own, (token_ids, positions))

    def embed(carry, tokens):
        return carry, family.begin(params, config, *tokens)

    count = num_real_tokens(step.addresses.batch)
    _, (x, shared) = scan_tiles(embed, (), (token_ids, positions), layout.tile, count)
    return tables, x, shared, step.addresses, step.sampled


def layers(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    kinds: Sequence[LayerKind],
    params: Sequence[Params],
    kv: Sequence[KVPages],
    x: jax.Array,
    shared: Any,
    addresses: Addresses,
) -> tuple[list[KVPages], jax.Array]:
    """The middle part of `forward`: consecutive layers of these kinds, parameters and pages.

    Returns the pages with the new keys and values, and the activations after the last layer.
    """
    written = []
    count, tokens = num_real_tokens(addresses.batch), jnp.arange(layout.num_tokens)
    x = parallel.enter_layers(x)
    for kind, p, pages in zip(kinds, params, kv):

        def layer(pages, arrays, kind=kind, p=p):
            x, shared, page_ids, offsets, tokens = arrays
            own = Addresses(page_ids, offsets, addresses.batch)
            if layout.tile is not None:
                own = own._replace(batch=batch_of_tile(own.batch, tokens[0], layout.tile))

            def attention(q, k, v, *, window):
                nonlocal pages
                attend = _attend if layout.seq == 1 else sequence.attend
                out, pages = attend(
                    layout, own, pages, q, k, v, scale=config.attention_scale, window=window
                )
                return out

            x = family.layer(p, config, kind, x, shared, attention)
            return pages, x

        arrays = (x, shared, addresses.page_ids, addresses.offsets, tokens)
        pages, x = scan_tiles(layer, pages, arrays, layout.tile, count)
        written.append(pages)
    return written, parallel.leave_layers(x)


def _attend(
    layout: StepLayout,
    addresses: Addresses,
    pages: KVPages,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: int | None,
) -> tuple[jax.Array, KVPages]:
    """Attention of a device that has whole pages, and the pages with k and v written."""
    pages = write_kv(pages, k, v, addresses.page_ids, addresses.offsets)
    decodes = layout.key.rows if layout.tile is None else 0
    out, _ = paged_attention(
        q, pages, addresses.batch, num_decodes=decodes, scale=scale, window=window
    )
    return out, pages


def finish(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    x: jax.Array,
    sampled: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The last part of `forward`: hidden states to sample from, and of the prefill tokens."""
    picked, of_prefill = _finish(family, config, layout, params, x, sampled)
    return _for_sampling(layout, picked), of_prefill


def _finish(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    x: jax.Array,
    sampled: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def norm(carry, x):
        return carry, family.finish(params, config, x)

    _, hidden = scan_tiles(norm, (), x, layout.tile, x.shape[1])
    picked = hidden[:, sampled] if layout.seq == 1 else DealtTokens(layout).pick(hidden, sampled)
    own_prefill = layout.key.prefill_tokens // layout.seq
    return picked, hidden[:, layout.key.rows : layout.key.rows + own_prefill]


def _for_sampling(layout: StepLayout, picked: jax.Array) -> jax.Array:
    """Hidden states [hidden, sample_rows] in the one shape that sampling programs take."""
    return jnp.pad(picked, ((0, 0), (0, layout.sample_width - layout.sample_rows)))


def tick(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    kv: list[KVPages],
    tables: jax.Array,
    carry: tuple[jax.Array, jax.Array],
    last_tokens: jax.Array,
    metadata: jax.Array,
) -> tuple[list[KVPages], jax.Array, tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """What one stage of a pipeline does while as many steps as there are stages are under way.

    Stage s has the layers `params["layers"]`, one place of a stack each, and works on the step that
    `metadata[s]` describes; the newest is the first stage's. Its `tables` are as they were planned
    for that step. `carry` is what it was handed by the stage before, of decodes and of prefill
    tokens.

    Returns what `forward` does, for the oldest step, with what is handed on. The hidden states of
    prefill tokens are the last stage's only.
    """
    stages, stage = lax.axis_size(STAGE), lax.axis_index(STAGE)
    rows, tokens = layout.key.rows, layout.key.prefill_tokens // layout.seq
    _, newest, *_ = begin(family, config, layout, params, tables, last_tokens, metadata[0])
    _, oldest = layout.unpack(tables, metadata[stages - 1])
    tables, _, shared, addresses, _ = begin(
        family, config, layout, params, tables, last_tokens, metadata[stage]
    )
    handed = jnp.concatenate([carry[0][:, :rows], carry[1][:, :tokens]], axis=1)
    handed = jnp.pad(handed, ((0, 0), (0, newest.shape[1] - handed.shape[1])))
    x = jnp.where(stage == 0, newest, handed)

    own = jax.tree.map(lambda array: array[0], params["layers"])
    kv, x = layers(family, config, layout, config.layer_kinds, own, kv, x, shared, addresses)
    hidden, of_prefill = _finish(family, config, layout, params, x, oldest.sampled)
    x = lax.ppermute(x, STAGE, [(s, s + 1) for s in range(stages - 1)])
    carry = (
        carry[0].at[:, :rows].set(x[:, :rows]),
        carry[1].at[:, :tokens].set(x[:, rows : rows + tokens]),
    )
    return kv, tables, carry, _for_sampling(layout, parallel.of_last_stage(hidden)), of_prefill


def greedy(
    family: Family,
    config: ModelConfig,
    tile: int | None,
    head: Params,
    last_tokens: jax.Array,
    hidden: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The most likely token int32 [rows] for the sequences in `slots` [rows], after the first of
    hidden [hidden, sample_width].

    `tile` as in StepLayout. Returns `last_tokens` with the tokens in their slots, and the tokens.
    """

    def sample(carry, hidden):
        return carry, sample_greedy(family.logits(head, config, hidden))

    hidden = hidden[:, : len(slots)]
    _, token_ids = scan_tiles(sample, (), hidden, tile, _num_real(last_tokens, slots))
    return last_tokens.at[slots].set(jnp.maximum(token_ids, 0)), token_ids


def general(
    family: Family,
    config: ModelConfig,
    tile: int | None,
    head: Params,
    last_tokens: jax.Array,
    state: SamplingState,
    hidden: jax.Array,
    rows: jax.Array,
    masks: jax.Array,
) -> tuple[jax.Array, SamplingState, SampleOutput]:
    """One token a row with everything a request may ask for; `rows` as `pack_rows` made them, and
    `masks` int32 [rows, mask_words] of what those with a grammar may sample. `tile` as in
    StepLayout."""

    def sample(state, arrays):
        hidden, rows, masks = arrays
        output, state = sample_general(family.logits(head, config, hidden.T), state, rows, masks)
        return state, output

    slots = rows[:, SLOT]
    arrays = (hidden[:, : len(rows)].T, rows, masks)
    count = _num_real(last_tokens, slots)
    state, output = scan_tiles(sample, state, arrays, tile, count, axis=0)
    return last_tokens.at[slots].set(jnp.maximum(output.token_ids, 0)), state, output


def _num_real(last_tokens: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows that sample for a sequence; those after them are padding, in the trash slot."""
    return jnp.sum(slots != len(last_tokens) - 1)


def prompt_logprobs(
    family: Family,
    config: ModelConfig,
    tile: int | None,
    head: Params,
    hidden: jax.Array,
    targets: jax.Array,
) -> TokenLogprobs:
    """Log probabilities of the prompt's next tokens, `targets` int32 [tokens]."""

    def score(carry, arrays):
        hidden, targets = arrays
        logits = family.logits(head, config, hidden.T)
        return carry, token_logprobs(logits, targets, jnp.bool_(True))

    # Tiles in any case: [vocab, tokens] of a whole prompt would not fit.
    tile = tile or PROMPT_TILE
    hidden = parallel.of_last_stage(hidden).T
    tokens = len(targets)
    padding = -tokens % tile
    arrays = jnp.pad(hidden, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
    _, scored = scan_tiles(score, (), arrays, tile, tokens, axis=0)
    return jax.tree.map(lambda x: x[:tokens], scored)
