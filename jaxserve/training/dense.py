"""A model over whole sequences, without pages or batching of requests, as training computes it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.models.drafters import eagle
from jaxserve.models.drafters.feature_layer import FeatureLayer
from jaxserve.models.family import Family, LayeredAttention, Params


def hidden_states(
    family: Family, config: ModelConfig, params: Params, token_ids: jax.Array
) -> jax.Array:
    """Final hidden states [sequences, tokens, hidden] of int32 [sequences, tokens]."""
    sequences, tokens = token_ids.shape
    positions = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), sequences)
    attention = functools.partial(_attention, config, sequences)
    hidden = family.forward(params, config, token_ids.reshape(-1), positions, attention)
    return hidden.reshape(sequences, tokens, -1)


def followed_states(
    family: Family,
    config: ModelConfig,
    params: Params,
    token_ids: jax.Array,
    aux_layers: Sequence[int],
) -> tuple[jax.Array, jax.Array]:
    """As `hidden_states`, and what enters `aux_layers`, side by side [sequences, tokens, layers *
    hidden]."""
    entered = []

    def layer(p: Params, config: ModelConfig, kind: LayerKind, x: jax.Array, *rest: Any) -> Any:
        entered.append(x)
        return family.layer(p, config, kind, x, *rest)

    watched = dataclasses.replace(family, layer=layer)
    hidden = hidden_states(watched, config, params, token_ids)
    kept = [entered[index].reshape(hidden.shape) for index in aux_layers]
    return hidden, jnp.concatenate([hidden[..., :0], *kept], axis=-1)


def draft_states(
    config: ModelConfig,
    params: Params,
    embedded: jax.Array,
    states: jax.Array,
    feature_layer: FeatureLayer = eagle.FEATURE_LAYER,
    attention: LayeredAttention | None = None,
) -> jax.Array:
    """What a layer expects after `states` [sequences, tokens, hidden], each followed by a token
    that is `embedded` [sequences, tokens, hidden]: of that shape. `attention` is by default causal
    within each sequence."""
    sequences, tokens, size = embedded.shape
    positions = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), sequences)
    embedded, flat = (x.reshape(-1, size) for x in (embedded, states))
    x, shared = feature_layer.fuse(params, config, embedded, flat, positions)
    attention = attention or functools.partial(_attention, config, sequences)
    (layer,), (kind,) = params["layers"], config.layer_kinds
    own = functools.partial(attention, 0)
    x = feature_layer.family.layer(layer, config, kind, x, shared, own)
    return feature_layer.expected(params, config, x).reshape(sequences, tokens, size)


def _attention(
    config: ModelConfig,
    sequences: int,
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """As LayeredAttention, causal within each of the sequences that follow one another."""
    q, k, v = (x.reshape(sequences, -1, *x.shape[1:]) for x in (q, k, v))
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("sqhgd,skhd->shgqk", grouped, k, preferred_element_type=jnp.float32)
    scores *= config.attention_scale
    if cap := config.attention_soft_cap:
        scores = cap * jnp.tanh(scores / cap)
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    seen = (distance >= 0) & (distance < (window or q.shape[1]))
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        own = sinks.reshape(1, *scores.shape[1:3], 1, 1).astype(jnp.float32)
        scores = jnp.concatenate([scores, jnp.broadcast_to(own, (*scores.shape[:-1], 1))], -1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : q.shape[1]].astype(v.dtype)
    out = jnp.einsum("shgqk,skhd->sqhgd", weights, v)
    return out.reshape(-1, q.shape[2], v.shape[3])
