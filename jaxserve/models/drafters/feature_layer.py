"""What a layer that follows a model's hidden states, and drafts for it, provides.

Its entry at position p is of the model's states at p and of the token after it. It gives a state
that stands for the model's at p + 1, of which a draft is made, and which it follows in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxserve.core.model_config import ModelConfig
from jaxserve.models import layers
from jaxserve.models.family import Family, Params

Logits = Callable[[Params, Params, Family, ModelConfig, jax.Array], jax.Array]
"""Float32 [rows, vocab] of states [rows, hidden], for the layer's parameters, the model's outside
its layers, and the model's family and config; on a mesh, of each rank's part of the vocabulary."""


@dataclasses.dataclass(frozen=True)
class FeatureLayer:
    """One method's layer, `config` being its own.

    family: whose `layer` computes it.
    fuse(params, config, embedded, states, positions): what enters the layer [tokens, hidden], and
        what `layer` gets as `shared`, for states [tokens, hidden] at `positions` int32 [tokens],
        each followed by a token that is `embedded` [tokens, hidden].
    expected(params, config, x): the states of what the layer gives, [tokens, hidden].
    logits: of these states.
    aux_layers: the layers of the model whose inputs, side by side, are the states that it follows;
        none for its final states.
    features(params, states): what enters `fuse` of the model's own states.
    """

    family: Family
    fuse: Callable[[Params, ModelConfig, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
    expected: Callable[[Params, ModelConfig, jax.Array], jax.Array]
    logits: Logits
    aux_layers: tuple[int, ...] = ()
    features: Callable[[Params, jax.Array], jax.Array] = lambda params, states: states

    def embed(
        self,
        params: Params,
        outside: Params,
        family: Family,
        config: ModelConfig,
        token_ids: jax.Array,
        positions: jax.Array,
    ) -> jax.Array:
        """Embeddings [tokens, hidden] of int32 token_ids [tokens]: the layer's own if it has some,
        else the model's."""
        if "embed" in params:
            return layers.embed(params["embed"], token_ids, params["norm"].dtype)
        return family.embed(outside, config, token_ids, positions)[0]


def as_it_is(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Of a layer whose result stands for the model's state."""
    return x


def model_logits(
    params: Params, outside: Params, family: Family, config: ModelConfig, states: jax.Array
) -> jax.Array:
    """Those of the model's own head."""
    return family.logits(outside, config, states)
