"""What layers that follow a model's hidden states should have computed for its engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_engines import first_path
from tiny_engines import CONTEXT, TinyModel

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.engine.engine import Engine
from jaxserve.models.family import Family, Params
from jaxserve.models.follower import Follower
from jaxserve.training.dense import draft_states, hidden_states


def aux_states(
    family: Family,
    config: ModelConfig,
    params: Params,
    token_ids: jax.Array,
    aux_layers: Sequence[int],
) -> jax.Array:
    """What enters these layers, side by side [sequences, tokens, layers * hidden], for int32
    [sequences, tokens]."""
    kept = []

    def layer(p: Params, config: ModelConfig, kind: LayerKind, x: jax.Array, *rest: Any) -> Any:
        kept.append(x)
        return family.layer(p, config, kind, x, *rest)

    hidden_states(dataclasses.replace(family, layer=layer), config, params, token_ids)
    found = jnp.concatenate([kept[layer] for layer in aux_layers], axis=-1)
    return found.reshape(*token_ids.shape, -1)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A draft layer with its parameters, and the speculative_config that names it."""

    drafts: dict[str, Any]
    config: ModelConfig
    params: Params
    follower: Follower


class Reference:
    """What the layer makes of a whole sequence, computed densely."""

    def __init__(self, model: TinyModel, layer: Layer, tokens: list[int]) -> None:
        self._model, self._layer, follower = model, layer, layer.follower
        self._tokens = np.zeros(CONTEXT, np.int32)  # One shape; what follows is not attended to.
        self._tokens[: len(tokens)] = tokens
        self._length = len(tokens)
        arguments = model.family, model.config, model.params, jnp.asarray(self._tokens[None])
        followed = follower.aux_layers
        states = aux_states(*arguments, followed) if followed else hidden_states(*arguments)
        self._features = np.asarray(follower.features(layer.params, states[0]))
        self.states = self._after(self._tokens, self._features)

    def _after(self, tokens: np.ndarray, features: np.ndarray) -> np.ndarray:
        """What it expects after each position that a token follows, [CONTEXT - 1, hidden]."""
        model, layer, positions = self._model, self._layer, jnp.arange(CONTEXT)
        embedded, _ = model.family.embed(model.params, model.config, tokens, positions)
        states = embedded[None, 1:], jnp.asarray(features)[None, :-1]
        return np.asarray(draft_states(layer.config, layer.params, *states, layer.follower)[0])

    def drafts(self, length: int) -> list[int]:
        """The likeliest after the first `length` tokens, from its own states."""
        tokens, features, model = self._tokens.copy(), self._features.copy(), self._model
        head = model.params, model.family, model.config
        stop = length + self._layer.drafts["num_speculative_tokens"]
        for place in range(length, stop):
            own = features[place - 1] = self._after(tokens, features)[place - 2]
            logits = self._layer.follower.logits(self._layer.params, *head, own[None])
            tokens[place] = logits[0].argmax()
        return tokens[length:stop].tolist()

    def check(self, seen: Iterable[Slot], num_prompt: int, of_drafts: bool) -> int:
        """What an engine's slots knew (`slots`) while it answered a prompt of so many tokens; some
        of the drafts too, which are greedy. Returns how many lengths were checked."""
        checked: set[int] = set()
        for history, length, drafts, own, gained, *tree in seen:
            known = num_prompt < length <= self._length  # A step in flight may go beyond the last.
            if length in checked or not known:
                continue
            if not np.array_equal(history[:length], self._tokens[:length]):
                continue
            assert own == pytest.approx(self.states[length - 2], abs=1e-3)
            before, found = length - gained, first_path(drafts, *tree[:1])
            if of_drafts and len(checked) % 4 == 1 and before > num_prompt:
                assert found == self.drafts(before)[: len(found)]
            checked.add(length)
        return len(checked)


Slot = Sequence[Any]
"""What is known of a sequence: the leaves of SpeculationState."""


def slots(engine: Engine) -> list[Slot]:
    return list(zip(*map(np.asarray, jax.tree.leaves(engine._runner._state.speculation))))
