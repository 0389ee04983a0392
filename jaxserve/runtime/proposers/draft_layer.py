"""A layer that drafts from the target's hidden states (models/eagle.py)."""

from __future__ import annotations

import dataclasses

import jax

from jaxserve.core.model_config import ModelConfig
from jaxserve.models import eagle
from jaxserve.models.family import Family, Params
from jaxserve.runtime.programs.step import TokenInputs
from jaxserve.runtime.programs.step_layout import SlotMapping, StepLayout
from jaxserve.runtime.proposers.drafter import Drafter, run_layers
from pallas_kernels.paged_attention import Pages


@dataclasses.dataclass(frozen=True)
class DraftLayer:
    """The layer, as a Drafter, and the model whose embeddings and head it uses."""

    drafter: Drafter
    family: Family
    config: ModelConfig

    def __call__(
        self,
        layout: StepLayout,
        params: Params,
        outside: Params,
        kv: list[Pages],
        token_ids: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        slot_mappings: tuple[SlotMapping, ...],
    ) -> tuple[list[Pages], jax.Array]:
        """The pages with the entries at `positions` int32 [tokens], and the hidden states after
        them [tokens, hidden], from the states there, `hidden` [tokens, hidden], and the next tokens
        int32 [tokens]. `outside` are the model's parameters outside its layers."""
        embedded, _ = self.family.embed(outside, self.config, token_ids, positions)
        x, shared = eagle.fuse(params, self.drafter.config, embedded, hidden, positions)
        inputs = TokenInputs(shared)
        kv, x = run_layers(self.drafter, layout, params, kv, x, inputs, slot_mappings)
        return kv, x.astype(hidden.dtype)
