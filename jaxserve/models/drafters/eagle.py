"""EAGLE's draft layer (Li et al. 2024, 2401.15077): from the final hidden state of a token and the
embedding of the token after it, it guesses the next hidden state, of which the model's own output
layer makes a token.

The layer is one of the Llama family, without the norm before its attention and without one after
it: what it gives stands for a final hidden state as it is. Embeddings are the model's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import ModelConfig, RopeConfig
from jaxserve.models import layers, rope
from jaxserve.models.drafters.feature_layer import FeatureLayer, as_it_is, model_logits
from jaxserve.models.families import llama
from jaxserve.models.family import Params, one_tensor

EMBEDDINGS = "embed_tokens."
"""Checkpoints may have a copy of the model's embeddings under this name."""


def layer_for(target: ModelConfig, method: str = "eagle") -> ModelConfig:
    """A layer for a model: of its sizes, with full attention and plain rotations.

    Raises ConfigError for a model of latents, whose attention no layer of the Llama family has.
    """
    if target.mla is not None:
        raise ConfigError(
            f"the method is {method!r}, but {target.architecture} keeps latents, which a draft "
            "layer cannot have; use 'medusa'."
        )
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rope=RopeConfig(target.rope.theta, rotary_dim=target.head_dim),
        rms_norm_eps=target.rms_norm_eps,
    )


def param_specs(config: ModelConfig, *, biased: bool) -> Params:
    """The layer and the linear layer `fc` before it, which may be `biased`; `config` has one
    layer."""
    size = config.hidden_size
    layer = llama.layer_specs(config, "layers.0.")
    del layer["attn_norm"]
    fc = one_tensor("fc.weight", (size, 2 * size), (None, None), num_inputs=1)
    specs: Params = {"fc": fc, "layers": [layer]}
    if biased:
        specs["fc_bias"] = one_tensor("fc.bias", (size,), (None,), init="zeros")
    return specs


def fuse(
    params: Params,
    config: ModelConfig,
    embedded: jax.Array,
    hidden: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, llama.Rotations]:
    """What enters the layer, [tokens, hidden], for tokens at `positions` int32 [tokens] with the
    final states `hidden` [tokens, hidden], each followed by a token that is `embedded` [tokens,
    hidden]; and the rotations, as `Family.embed` has them."""
    rotations = rope.rotation(config.rope, config.max_position_embeddings, positions)
    both = jnp.concatenate([embedded, hidden.astype(embedded.dtype)], axis=-1)
    return layers.replicated(params["fc"], both, params.get("fc_bias")), rotations


FEATURE_LAYER = FeatureLayer(llama.FAMILY, fuse, as_it_is, model_logits)
