"""The functions that become programs: forward a batch, sample a token.

They are pure, their shapes are fixed by a StepLayout, and what they replace (KV pages, last
tokens, sampling state) is donated to them. The model is one program, `forward`, or three kinds of
them, `begin`, `layers` and `finish`, of which the middle one serves every group of layers that are
alike (docs/decisions/002-programs.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.config import LayerKind, ModelConfig
from jaxserve.models.family import Family, Params
from jaxserve.runtime.batch import Addresses, StepLayout
from jaxserve.sampling import SampleOutput, SamplingState, TokenLogprobs
from jaxserve.sampling import general as sample_general
from jaxserve.sampling import greedy as sample_greedy
from jaxserve.sampling import prompt_logprobs as score_prompt
from jaxserve.sampling.rows import SLOT
from pallas_kernels.paged_attention import KVPages, paged_attention, write_kv


def forward(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    kv: list[KVPages],
    last_tokens: jax.Array,
    metadata: jax.Array,
) -> tuple[list[KVPages], jax.Array, jax.Array]:
    """Run the whole model over one packed step.

    `kv` holds one KVPages a layer, `last_tokens` [slots] int32 the newest token of every slot.
    Returns the pages with the step's keys and values written, the hidden states to sample from
    [hidden, sample_rows], and those of the prefill tokens [hidden, prefill_tokens].
    """
    x, shared, addresses, sampled = begin(family, config, layout, params, last_tokens, metadata)
    kv, x = layers(
        family, config, layout, config.layer_kinds, params["layers"], kv, x, shared, addresses
    )
    return kv, *finish(family, config, layout, params, x, sampled)


def begin(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    last_tokens: jax.Array,
    metadata: jax.Array,
) -> tuple[jax.Array, Any, Addresses, jax.Array]:
    """The first part of `forward`: activations, what layers share, addresses, sampled tokens."""
    step = layout.unpack(metadata)
    token_ids = jnp.concatenate([last_tokens[step.slots], step.prefill_ids])
    x, shared = family.begin(params, config, token_ids, step.positions)
    return x, shared, step.addresses, step.sampled


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
    for kind, p, pages in zip(kinds, params, kv):

        def attention(q, k, v, *, window, pages=pages):
            pages = write_kv(pages, k, v, addresses.page_ids, addresses.offsets)
            written.append(pages)
            out, _ = paged_attention(
                q,
                pages,
                addresses.batch,
                num_decodes=layout.key.rows,
                scale=config.attention_scale,
                window=window,
            )
            return out

        x = family.layer(p, config, kind, x, shared, attention)
    return written, x


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
    return hidden[:, sampled], hidden[:, layout.key.rows :]


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
    token_ids = sample_greedy(family.logits(head, config, hidden))
    return last_tokens.at[slots].set(jnp.maximum(token_ids, 0)), token_ids


def general(
    family: Family,
    config: ModelConfig,
    head: Params,
    last_tokens: jax.Array,
    state: SamplingState,
    hidden: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, SamplingState, SampleOutput]:
    """One token a row with everything a request may ask for; `rows` as `pack_rows` made them."""
    output, state = sample_general(family.logits(head, config, hidden), state, rows)
    token_ids = jnp.maximum(output.token_ids, 0)
    return last_tokens.at[rows[:, SLOT]].set(token_ids), state, output


def prompt_logprobs(
    family: Family, config: ModelConfig, head: Params, hidden: jax.Array, targets: jax.Array
) -> TokenLogprobs:
    """Log probabilities of the prompt's next tokens, `targets` int32 [tokens]."""
    return score_prompt(lambda block: family.logits(head, config, block), hidden, targets)
