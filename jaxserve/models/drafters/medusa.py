"""Medusa heads (Cai et al. 2024, 2401.10774): from the hidden state that predicts the next token,
each head guesses a token further ahead, by the model's own output layer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models.family import Params, ParamSpec, TensorPart


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Shapes of the heads of a model: head i, from 0 on, guesses the token after the next i + 1.

    Attributes:
        num_heads: how many tokens they guess.
        num_layers: residual blocks of a head.
        hidden_size: that of the model.
        vocab_size: that of the model.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int


def tensor_name(head: int, layer: int) -> str:
    """Of a block's weight [hidden, hidden] in a checkpoint, as vLLM names it."""
    return f"blocks.{head}.layers.{layer}.weight"


def param_specs(config: MedusaConfig) -> Params:
    """The blocks of all heads, [heads * layers, hidden, hidden], as [outputs, inputs] each."""
    size = config.hidden_size
    parts = tuple(
        TensorPart(tensor_name(head, layer), (1, size, size))
        for head in range(config.num_heads)
        for layer in range(config.num_layers)
    )
    shape = (config.num_heads * config.num_layers, size, size)
    return {"blocks": ParamSpec(shape, (None, None, None), parts, num_inputs=1)}


def head(params: Params, config: MedusaConfig, index: jax.Array, hidden: jax.Array) -> jax.Array:
    """What head `index` (int32 scalar) gives to the output layer, for final hidden states
    [rows, hidden]."""
    for layer in range(config.num_layers):
        place = index * config.num_layers + layer
        block = lax.dynamic_index_in_dim(params["blocks"], place, keepdims=False)
        hidden = hidden + jax.nn.silu(jnp.einsum("ri,oi->ro", hidden, block))
    return hidden
