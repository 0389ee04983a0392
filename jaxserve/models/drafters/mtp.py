"""The layer of a model that predicts a further token (DeepSeek V3, 2412.19437, section 2.2): from
the final hidden state of a token and the embedding of the token after it, both normed, it makes the
state that the model's own output layer guesses the next token but one from.

The layer is one more of the model's own, of latents and experts, in the model's own checkpoint. Its
copies of the embeddings and of the output layer are not loaded. Drafts beyond the first follow from
its own normed states, as in SGLang.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import ModelConfig
from jaxserve.models import layers, rope
from jaxserve.models.drafters.feature_layer import FeatureLayer, model_logits
from jaxserve.models.families import llama
from jaxserve.models.family import Params, one_tensor
from jaxserve.models.registry import get_family


def layer_of(target: ModelConfig) -> ModelConfig:
    """The config of the layer alone.

    Raises ConfigError for a model without one.
    """
    if not target.num_mtp_layers:
        raise ConfigError(
            f"the method is 'mtp', but this {target.architecture} has no layer that predicts "
            "further tokens (num_nextn_predict_layers of DeepSeek V3); use another method."
        )
    moe = target.moe and dataclasses.replace(target.moe, sparse_layers=(True,))
    return dataclasses.replace(
        target, num_layers=1, sliding_windows=(None,), rope_layers=(True,), moe=moe
    )


def param_specs(target: ModelConfig) -> Params:
    """The first such layer of a model, and what is before and after it."""
    index, size = target.num_layers, target.hidden_size
    moe = target.moe
    if moe is not None:
        moe = dataclasses.replace(moe, sparse_layers=(*moe.sparse_layers, True))
    longer = dataclasses.replace(
        target,
        num_layers=index + 1,
        sliding_windows=(*target.sliding_windows, None),
        rope_layers=(*target.rope_layers, True),
        moe=moe,
    )
    layer = get_family(target.architecture).param_specs(longer)["layers"][index]
    prefix = f"model.layers.{index}."

    def norm(name: str) -> Params:
        return one_tensor(f"{prefix}{name}.weight", (size,), ("embed",), init="ones")

    return {
        "embed_norm": norm("enorm"),
        "hidden_norm": norm("hnorm"),
        "fc": one_tensor(prefix + "eh_proj.weight", (size, 2 * size), (None, None), num_inputs=1),
        "layers": [layer],
        "norm": norm("shared_head.norm"),
    }


def fuse(
    params: Params,
    config: ModelConfig,
    embedded: jax.Array,
    states: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, llama.Rotations]:
    """As FeatureLayer.fuse."""
    rotations = rope.rotation(config.rope, config.max_position_embeddings, positions)
    eps = config.rms_norm_eps
    both = [
        layers.rms_norm(embedded, params["embed_norm"], eps),
        layers.rms_norm(states.astype(embedded.dtype), params["hidden_norm"], eps),
    ]
    return layers.replicated(params["fc"], jnp.concatenate(both, axis=-1)), rotations


def expected(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """As FeatureLayer.expected."""
    return layers.rms_norm(x, params["norm"], config.rms_norm_eps)


def feature_layer(target: ModelConfig) -> FeatureLayer:
    """The layer of a model."""
    return FeatureLayer(get_family(target.architecture), fuse, expected, model_logits)
