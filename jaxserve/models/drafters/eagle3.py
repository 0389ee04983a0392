"""EAGLE-3's draft layer (Li et al. 2025, 2503.01840): it follows low, middle and high hidden states
of the model, fused by a linear layer, and guesses tokens, not hidden states.

The layer is one of the Llama family. Its attention reads two vectors side by side, the normed
embedding of the token after a position and the normed state there; the residual stream is the
state's. It has a norm and an output layer of its own, often of a part of the model's vocabulary:
draft token i is token i + d2t[i] of the model. What the layer gives, before that norm, is the state
that it follows after its own guess.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.models import layers, parallel, rope
from jaxserve.models.drafters import eagle
from jaxserve.models.drafters.feature_layer import FeatureLayer, as_it_is
from jaxserve.models.families import llama
from jaxserve.models.family import Attention, Family, Params, ParamSpec, one_tensor

Shared = tuple[llama.Rotations, jax.Array]
"""Rotations, and the embeddings [tokens, hidden]."""


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """What a layer has beyond its ModelConfig.

    Attributes:
        aux_layers: layers of the model whose inputs it follows.
        draft_vocab_size: tokens that it can guess.
        mapped: whether these are given as `d2t`; otherwise they are the model's first.
        norm_first: whether the residual stream begins with the normed state.
        own_embeddings: whether it has embeddings of its own.
        prefix: what the names of the layer's tensors begin with.
    """

    aux_layers: tuple[int, ...]
    draft_vocab_size: int
    mapped: bool = True
    norm_first: bool = False
    own_embeddings: bool = False
    prefix: str = "midlayer."


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high: those of the authors' checkpoints.

    Raises ConfigError for a model of fewer than six layers, where they are not one after another.
    """
    found = 2, num_layers // 2, num_layers - 3
    if not found[0] < found[1] <= found[2]:
        raise ConfigError(
            f"the model has {num_layers} layers; the method 'eagle3' needs 6 or more, or an "
            "eagle_aux_hidden_state_layer_ids in the config.json of the draft layer."
        )
    return found


def layer_for(target: ModelConfig) -> ModelConfig:
    """As `eagle.layer_for`."""
    return eagle.layer_for(target, "eagle3")


def param_specs(config: ModelConfig, own: Eagle3Config) -> Params:
    """The layer, and what is before and after it; `config` has one layer."""
    size, vocab, prefix = config.hidden_size, own.draft_vocab_size, own.prefix
    layer = llama.layer_specs(config, prefix)
    layer["qkv"] = _of_two(layer["qkv"])
    norm = one_tensor(prefix + "hidden_norm.weight", (size,), ("embed",), init="ones")
    specs: Params = {
        "fc": one_tensor(
            "fc.weight", (size, len(own.aux_layers) * size), (None, None), num_inputs=1
        ),
        "layers": [layer],
        "norm": one_tensor("norm.weight", (size,), ("embed",), init="ones"),
        "lm_head": one_tensor("lm_head.weight", (vocab, size), ("vocab", "embed"), num_inputs=1),
    }
    (specs if own.norm_first else layer)["hidden_norm"] = norm
    if own.mapped:
        d2t = one_tensor("d2t", (vocab,), (None,), init="zeros")
        specs["d2t"] = dataclasses.replace(d2t, dtype="int32")
    if own.own_embeddings:
        shape = config.vocab_size, size
        specs["embed"] = one_tensor("embed_tokens.weight", shape, ("vocab", "embed"), num_inputs=1)
    return specs


def _of_two(spec: ParamSpec) -> ParamSpec:
    """A linear layer of twice as many inputs."""

    def doubled(shape: tuple[int, ...]) -> tuple[int, ...]:
        return *shape[:-1], 2 * shape[-1]

    parts = tuple(dataclasses.replace(part, shape=doubled(part.shape)) for part in spec.parts)
    return dataclasses.replace(spec, shape=doubled(spec.shape), parts=parts)


def features(params: Params, states: jax.Array) -> jax.Array:
    """The model's states [tokens, layers * hidden], fused: [tokens, hidden]."""
    return layers.replicated(params["fc"], states)


def fuse(
    params: Params,
    config: ModelConfig,
    embedded: jax.Array,
    states: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, Shared]:
    """As FeatureLayer.fuse."""
    rotations = rope.rotation(config.rope, config.max_position_embeddings, positions)
    x = states.astype(embedded.dtype)
    if "hidden_norm" in params:
        x = layers.rms_norm(x, params["hidden_norm"], config.rms_norm_eps)
    return x, (rotations, embedded)


def layer(
    p: Params,
    config: ModelConfig,
    kind: LayerKind,
    x: jax.Array,
    shared: Shared,
    attention: Attention,
) -> jax.Array:
    """One block: x [tokens, hidden] plus its attention, plus its MLP."""
    rotations, embedded = shared
    embedded = layers.rms_norm(embedded, p["attn_norm"], config.rms_norm_eps)
    states = layers.rms_norm(x, p["hidden_norm"], config.rms_norm_eps) if "hidden_norm" in p else x
    both = jnp.concatenate([embedded, states], axis=-1)
    heads = llama.project_qkv(config, p, both)
    attended = llama.attend(config, kind, heads, rotations, attention)
    x = x + layers.row_parallel(p["attn_out"], attended, p.get("attn_out_bias"))
    normed = layers.rms_norm(x, p["mlp_norm"], config.rms_norm_eps)
    biases = p.get("gate_up_bias"), p.get("down_bias")
    return x + layers.gated_mlp(normed, p["gate_up"], p["down"], *biases)


def draft_logits(eps: float, params: Params, states: jax.Array) -> jax.Array:
    """Logits float32 [rows, draft vocabulary] of states [rows, hidden], of this rank's part."""
    normed = layers.rms_norm(states, params["norm"], eps)
    return layers.matmul(params["lm_head"], normed, jnp.float32)


def _logits(
    own: Eagle3Config,
    eps: float,
    params: Params,
    outside: Params,
    family: Family,
    config: ModelConfig,
    states: jax.Array,
) -> jax.Array:
    """As `feature_layer.Logits`; -inf for tokens that the layer cannot guess."""
    found = draft_logits(eps, params, states)
    found = parallel.gather_over_vocab(found)[:, : own.draft_vocab_size]
    ranks = parallel.num_vocab_ranks()
    count = cdiv(config.vocab_size, ranks)
    targets = jnp.arange(own.draft_vocab_size) + params.get("d2t", 0)
    places = targets - parallel.first_of_vocab(count)
    places = jnp.where((places >= 0) & (places < count), places, count)
    nothing = jnp.full((len(found), count), -jnp.inf)
    return nothing.at[:, places].set(found, mode="drop")


def feature_layer(config: ModelConfig, own: Eagle3Config) -> FeatureLayer:
    """The layer of this config."""
    return FeatureLayer(
        dataclasses.replace(llama.FAMILY, layer=layer),
        fuse,
        as_it_is,
        functools.partial(_logits, own, config.rms_norm_eps),
        own.aux_layers,
        features,
    )
