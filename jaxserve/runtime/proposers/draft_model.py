"""A smaller model of the same vocabulary drafts."""

from __future__ import annotations

import dataclasses

from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import ModelConfig
from jaxserve.kv.layout import KVGroup, KVPlace
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.device_step import PackedInputs
from jaxserve.runtime.programs.page_programs import SetTables
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.proposers.drafter import Draft, Drafter, DraftPrefill
from jaxserve.runtime.proposers.proposer import Proposer

_NUM_RECENT = 2


class _DraftByModel(Draft):
    reads = ("draft_params", *Draft.reads[1:])


class DraftModelProposer(Proposer):
    """A model with parameters and pages of its own, which computes every token that the target
    does: prompts in the same step, and the others when it drafts after them."""

    def __init__(self, shapes: ProgramShapes, set_tables: SetTables) -> None:
        draft, first = shapes.draft_model, shapes.kv_layout.layers_per_page
        # Its pages are those of the first KV group, of all tokens where any group keeps them.
        config = within(shapes.local_draft_model, shapes.kv_layout.groups[0])
        places = tuple(KVPlace(0, first + layer) for layer in range(config.num_layers))
        drafter = Drafter(draft.family, config, places, _NUM_RECENT)
        self._draft = _DraftByModel(shapes, drafter, set_tables)
        self._prefill = DraftPrefill(shapes, drafter, set_tables)
        self.kinds = (self._draft, self._prefill)

    def propose(self, state: DeviceState, step: PackedInputs) -> None:
        if step.plan.prefills:
            self._prefill(state, step)
        # It computes the newest tokens even where it drafts nothing, to draft after them later.
        if any(chunk.seq.num_speculative_tokens for chunk in step.plan.decodes):
            self._draft(state, step)


def within(config: ModelConfig, group: KVGroup) -> ModelConfig:
    """`config` with no attention window wider than that of `group`."""
    if group.window is None:
        return config
    windows = tuple(min(group.window, window or group.window) for window in config.sliding_windows)
    return dataclasses.replace(config, sliding_windows=windows)


def check_draft_model(draft: ModelConfig, target: ModelConfig, max_model_len: int) -> None:
    """Raises ConfigError for a draft model that does not fit the target, or its context."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the model of speculative_config has a vocabulary of {draft.vocab_size} tokens, and "
            f"the model that it drafts for of {target.vocab_size}; choose one of the same "
            "tokenizer."
        )
    check_context(draft, max_model_len)


def check_context(draft: ModelConfig, max_model_len: int) -> None:
    """Raises ConfigError for a model, or a layer, that drafts in a shorter context."""
    context = draft.max_position_embeddings
    if context < max_model_len and draft.rope.kind != "dynamic":
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the context of the model of "
            f"speculative_config is {context} tokens; set max_model_len to at most {context}, or "
            "choose another model to draft."
        )
