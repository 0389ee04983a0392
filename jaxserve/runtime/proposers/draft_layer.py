"""A layer that drafts from the target's hidden states (models/drafters/feature_layer.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxserve.core.model_config import ModelConfig
from jaxserve.models.drafters.feature_layer import FeatureLayer
from jaxserve.models.family import Family, Params
from jaxserve.runtime.programs.forward.step import TokenInputs
from jaxserve.runtime.programs.layout.step_inputs import SlotMapping
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.runtime.proposers.drafter import Drafter, run_layers
from pallas_kernels.paged_attention import Pages


@dataclasses.dataclass(frozen=True)
class DraftLayer:
    """The layer, as a Drafter, and the model whose embeddings and head it may use. `params` are the
    layer's, `outside` the model's outside its layers."""

    drafter: Drafter
    feature_layer: FeatureLayer
    family: Family
    config: ModelConfig

    def __call__(
        self,
        layout: StepLayout,
        params: Params,
        outside: Params,
        kv: list[Pages],
        token_ids: jax.Array,
        states: jax.Array,
        positions: jax.Array,
        real: jax.Array,
        slot_mappings: tuple[SlotMapping, ...],
    ) -> tuple[list[Pages], jax.Array]:
        """The pages with the entries at `positions` int32 [tokens], and the states after them
        [tokens, hidden], from the states there, `states` [tokens, hidden], and the next tokens
        int32 [tokens]; `real` bool [tokens] says which belong to a sequence."""
        x, shared = self.enter(params, outside, token_ids, states, positions)
        inputs = TokenInputs(shared, real=real if self.drafter.config.moe else None)
        kv, x = run_layers(self.drafter, layout, params, kv, x, inputs, slot_mappings)
        return kv, self.expected(params, x, states.dtype)

    def enter(
        self,
        params: Params,
        outside: Params,
        token_ids: jax.Array,
        states: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """What enters the layer, [tokens, hidden], and what it shares; arguments as above."""
        embedded = self.feature_layer.embed(
            params, outside, self.family, self.config, token_ids, positions
        )
        return self.feature_layer.fuse(params, self.drafter.config, embedded, states, positions)

    def expected(self, params: Params, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The states [tokens, hidden] of what the layer gives."""
        return self.feature_layer.expected(params, self.drafter.config, x).astype(dtype)

    def logits(self, params: Params, outside: Params, states: jax.Array) -> jax.Array:
        """Float32 [rows, vocab] of states [rows, hidden]."""
        return self.feature_layer.logits(params, outside, self.family, self.config, states)
