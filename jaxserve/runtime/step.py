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
from jaxserve.sampling import SampleOutput, SamplingState, TokenLogprobs
from jaxserve.sampling import general as sample_general
from jaxserve.sampling import greedy as sample_greedy
from jaxserve.sampling import prompt_logprobs as score_prompt
from jaxserve.sampling.rows import SLOT
from pallas_kernels.paged_attention import KVPages, paged_attention, write_kv
from sharding_rules import STAGE


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
    [hidden, sample_rows], and those of the prefill tokens [hidden, prefill_tokens].
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
    token_ids, positions = (
        jnp.concatenate([last_tokens[step.slots], step.prefill_ids]),
        step.positions,
    )
    if layout.seq > 1:
        token_ids, positions = map(DealtTokens(layout).own, (token_ids, positions))
    x, shared = family.begin(params, config, token_ids, positions)
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
    x = parallel.enter_layers(x)
    for kind, p, pages in zip(kinds, params, kv):

        def attention(q, k, v, *, window, pages=pages):
            attend = _attend if layout.seq == 1 else sequence.attend
            out, pages = attend(
                layout, addresses, pages, q, k, v, scale=config.attention_scale, window=window
            )
            written.append(pages)
            return out

        x = family.layer(p, config, kind, x, shared, attention)
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
    rows = layout.key.rows
    out, _ = paged_attention(
        q, pages, addresses.batch, num_decodes=rows, scale=scale, window=window
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
    hidden = family.finish(params, config, x)
    picked = hidden[:, sampled] if layout.seq == 1 else DealtTokens(layout).pick(hidden, sampled)
    return picked, hidden[:, layout.key.rows :]


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
    x = jnp.where(stage == 0, newest, handed)

    own = jax.tree.map(lambda array: array[0], params["layers"])
    kv, x = layers(family, config, layout, config.layer_kinds, own, kv, x, shared, addresses)
    hidden, of_prefill = finish(family, config, layout, params, x, oldest.sampled)
    x = lax.ppermute(x, STAGE, [(s, s + 1) for s in range(stages - 1)])
    carry = (carry[0].at[:, :rows].set(x[:, :rows]), carry[1].at[:, :tokens].set(x[:, rows:]))
    return kv, tables, carry, parallel.of_last_stage(hidden), of_prefill


def greedy(
    family: Family,
    config: ModelConfig,
    head: Params,
    last_tokens: jax.Array,
    hidden: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The most likely token int32 [rows] after each of hidden [hidden, rows].

    Returns `last_tokens` with the tokens in their slots, and the tokens.
    """
    logits = family.logits(head, config, hidden)
    token_ids = parallel.likeliest(sample_greedy(logits), jnp.max(logits, axis=0), len(logits))
    return last_tokens.at[slots].set(jnp.maximum(token_ids, 0)), token_ids


def general(
    family: Family,
    config: ModelConfig,
    head: Params,
    last_tokens: jax.Array,
    state: SamplingState,
    hidden: jax.Array,
    rows: jax.Array,
    masks: jax.Array,
) -> tuple[jax.Array, SamplingState, SampleOutput]:
    """One token a row with everything a request may ask for; `rows` as `pack_rows` made them, and
    `masks` int32 [rows, mask_words] of what those with a grammar may sample."""
    logits = parallel.whole_vocab(family.logits(head, config, hidden), config.vocab_size)
    output, state = sample_general(logits, state, rows, masks)
    token_ids = jnp.maximum(output.token_ids, 0)
    return last_tokens.at[rows[:, SLOT]].set(token_ids), state, output


def prompt_logprobs(
    family: Family, config: ModelConfig, head: Params, hidden: jax.Array, targets: jax.Array
) -> TokenLogprobs:
    """Log probabilities of the prompt's next tokens, `targets` int32 [tokens]."""

    def logits(block: jax.Array) -> jax.Array:
        return parallel.whole_vocab(family.logits(head, config, block), config.vocab_size)

    return score_prompt(logits, parallel.of_last_stage(hidden), targets)
