"""What layers that follow a model's hidden states should have computed for its engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_engines import first_path, prefilled
from tiny_checkpoints import write_hf
from tiny_engines import CONTEXT, PAGE_SIZE, Arrival, TinyModel, drive, wider_member

from jaxserve.core.model_config import ModelConfig
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.llm import LLM
from jaxserve.models import rope
from jaxserve.models.drafters.feature_layer import FeatureLayer, model_logits
from jaxserve.models.family import Params
from jaxserve.training.dense import draft_states, followed_states


@dataclasses.dataclass(frozen=True)
class Layer:
    """A draft layer with its parameters, and the speculative_config that names it."""

    drafts: dict[str, Any]
    config: ModelConfig
    params: Params
    feature_layer: FeatureLayer


class Reference:
    """What the layer makes of a whole sequence, computed densely."""

    def __init__(self, model: TinyModel, layer: Layer, tokens: list[int]) -> None:
        self._model, self._layer, feature_layer = model, layer, layer.feature_layer
        self._tokens = np.zeros(CONTEXT, np.int32)  # One shape; what follows is not attended to.
        self._tokens[: len(tokens)] = tokens
        self._length = len(tokens)
        arguments = model.family, model.config, model.params, jnp.asarray(self._tokens[None])
        followed = feature_layer.aux_layers
        hidden, entering = followed_states(*arguments, followed)
        states = entering if followed else hidden
        self._features = np.asarray(feature_layer.features(layer.params, states[0]))
        self.states = self._after(self._tokens, self._features)

    def _after(self, tokens: np.ndarray, features: np.ndarray) -> np.ndarray:
        """What it expects after each position that a token follows, [CONTEXT - 1, hidden]."""
        model, layer, positions = self._model, self._layer, jnp.arange(CONTEXT)
        embedded, _ = model.family.embed(model.params, model.config, tokens, positions)
        states = embedded[None, 1:], jnp.asarray(features)[None, :-1]
        return np.asarray(draft_states(layer.config, layer.params, *states, layer.feature_layer)[0])

    def drafts(self, length: int) -> list[int]:
        """The most likely after the first `length` tokens, from its own states."""
        tokens, features, model = self._tokens.copy(), self._features.copy(), self._model
        head = model.params, model.family, model.config
        stop = length + self._layer.drafts["num_speculative_tokens"]
        for place in range(length, stop):
            own = features[place - 1] = self._after(tokens, features)[place - 2]
            logits = self._layer.feature_layer.logits(self._layer.params, *head, own[None])
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


def check_moved(
    llm: LLM, model: TinyModel, layer: Layer, prompt: list[int], params: SamplingParams
) -> None:
    """A request that is exported, ended and imported again: the layer goes on as if it had stayed,
    its own KV included."""
    llm.reset_prefix_cache()  # What followed the last page was another token.
    stream = llm.stream({"prompt_token_ids": prompt}, params)
    for _ in range(8):
        llm.engine.step()
    parts, seen = list(llm.export_request(stream.request_id)), []
    stayed = stream.result()
    llm.reset_prefix_cache()
    drive(llm.engine, [Arrival(prompt[::-1], params)])  # Its KV is on those pages now.
    stream = llm.import_request(iter(parts))

    def going_on() -> None:
        while llm.engine.has_work:
            llm.engine.step()
            seen.extend(slots(llm.engine))

    assert prefilled(llm.engine, going_on)[0] <= PAGE_SIZE
    moved = stream.result()
    tokens = [completion.token_ids for completion in moved.outputs]
    assert tokens == [completion.token_ids for completion in stayed.outputs]
    reference = Reference(model, layer, [*prompt, *tokens[0]])
    assert reference.check(seen, len(prompt), of_drafts=False) > 3


Slot = Sequence[Any]
"""What is known of a sequence: the leaves of SpeculationState."""


def slots(engine: Engine) -> list[Slot]:
    return list(zip(*map(np.asarray, jax.tree.leaves(engine._runner._state.speculation))))


@dataclasses.dataclass(frozen=True)
class MTPCheckpoint:
    """A model's fields and tensors. Its last layer, of an index beyond the others', is the one for
    a further token, with what is before and after it in `own`."""

    raw: dict[str, Any]
    tensors: dict[str, np.ndarray]
    own: dict[str, np.ndarray]

    @property
    def all_tensors(self) -> dict[str, np.ndarray]:
        index = self.raw["num_hidden_layers"]
        own = {f"model.layers.{index}.{name}.weight": each for name, each in self.own.items()}
        return self.tensors | own

    def write(self, path: Path, **fields: Any) -> Path:
        return write_hf(path, self.raw | fields, self.all_tensors)

    def layer(self, directory: Path, drafts: dict[str, Any], quantization: str | None) -> Layer:
        """The layer as section 2.2 of the report has it, in numpy but for its block, which is
        loaded and computed as one more of a model's own layers, rounded if `quantization` says
        so."""
        fields = {
            "num_hidden_layers": self.raw["num_hidden_layers"] + 1,
            "num_nextn_predict_layers": 0,
        }
        longer = TinyModel.open(write_hf(directory, self.raw | fields, self.tensors))
        if quantization is not None:
            longer = longer.rounded(quantization)
        last = longer.config.layer_kinds[-1]
        assert last == longer.config.layer_kinds[1]  # One of experts, unlike the first.

        def normed(x: jax.Array, name: str) -> np.ndarray:
            x = np.asarray(x)
            eps = self.raw["rms_norm_eps"]
            return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * self.own[name]

        def fuse(params, config, embedded, states, positions):
            both = np.concatenate([normed(embedded, "enorm"), normed(states, "hnorm")], axis=-1)
            x = jnp.asarray(both @ self.own["eh_proj"].T)
            return x, rope.rotation(config.rope, config.max_position_embeddings, positions)

        def expected(params, config, x):
            return jnp.asarray(normed(x, "shared_head.norm"))

        moe = dataclasses.replace(longer.config.moe, sparse_layers=(True,))
        alone = dataclasses.replace(
            longer.config, num_layers=1, sliding_windows=(None,), rope_layers=(True,), moe=moe
        )
        feature_layer = FeatureLayer(longer.family, fuse, expected, model_logits)
        return Layer(drafts, alone, {"layers": longer.params["layers"][-1:]}, feature_layer)


def mtp_checkpoint(times: int = 1) -> MTPCheckpoint:
    """A DeepSeek V3, `times` as wide as the member of that name."""
    raw, tensors = wider_member("deepseek_v3", times)
    raw["num_hidden_layers"] -= 1  # The last one has the tensors of the layer for a further token.
    size, rng = raw["hidden_size"], np.random.default_rng(1)
    names = ("enorm", "hnorm", "shared_head.norm")
    own = {name: (1 + 0.3 * rng.normal(size=size)).astype(np.float32) for name in names}
    own["eh_proj"] = rng.normal(0, size**-0.5, (size, 2 * size)).astype(np.float32)
    # Copies of the model's own, which are not read.
    own["embed_tokens"] = np.full_like(tensors["model.embed_tokens.weight"], np.nan)
    own["shared_head.head"] = np.full_like(tensors["lm_head.weight"], np.nan)
    return MTPCheckpoint(raw, tensors, own)
