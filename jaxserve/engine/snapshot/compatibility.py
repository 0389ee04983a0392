"""Which engine a snapshot is of, and whether another one may continue from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxserve.core.errors import SnapshotError
from jaxserve.core.version import __version__
from jaxserve.text import Tokenizer

if TYPE_CHECKING:
    from jaxserve.runtime.startup.engine_plan import EnginePlan

_KV_FACTS = {"dtype": None, "kv_cache_dtype": "auto", "quantization": None, "rope_context": None}
"""Facts that must match for KV to be reused, with their values in older snapshots that lack them;
rope_context is max_model_len if RoPE depends on it."""


class SnapshotFacts:
    """The facts of one engine, for its snapshots, and against those of others."""

    def __init__(self, plan: EnginePlan, tokenizer: Tokenizer) -> None:
        self._config = plan.config
        self._model = plan.checkpoint
        self._drafter = None
        if plan.drafting_layers is not None:
            method = plan.config.speculative_config.method
            self._drafter = f"{method} {plan.draft_checkpoint.fingerprint}"
        self._tokenizer = tokenizer

    @property
    def ours(self) -> dict[str, Any]:
        """What a snapshot of this engine says of it."""
        config, model = self._config, self._model.config
        ropes = (model.rope, model.window_rope or model.rope)
        stretched = any(rope.kind != "default" for rope in ropes)
        return {
            "jaxserve": __version__,
            "model": model.name or model.architecture,
            "fingerprint": self._model.fingerprint,
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_cache_dtype,
            "quantization": config.quantization,
            "vocabulary": self._tokenizer.fingerprint,
            "rope_context": config.max_model_len if stretched else None,
            "drafter": self._drafter,
        }

    def can_use_kv(self, theirs: Mapping[str, Any]) -> bool:
        """Whether this engine would have computed the same KV."""
        ours = self.ours
        return all(theirs.get(name, before) == ours[name] for name, before in _KV_FACTS.items())

    def can_use_draft_kv(self, theirs: Mapping[str, Any]) -> bool:
        """Whether there is KV of layers that draft, of those of this engine."""
        return self._drafter is not None and theirs.get("drafter") == self._drafter

    def check_kv(self, theirs: Mapping[str, Any]) -> None:
        """Raises SnapshotError for KV that this engine would not have computed."""
        ours = self.ours
        for name, before in _KV_FACTS.items():
            if (their := theirs.get(name, before)) != ours[name]:
                raise SnapshotError(
                    f"{name} is {their!r} in the engine that exported the request and "
                    f"{ours[name]!r} in this one, which would go on with other tokens; import it "
                    f"into an engine with the same {name}."
                )

    def check_model(self, theirs: Mapping[str, Any]) -> None:
        """Raises SnapshotError for the facts of another model."""
        ours = self.ours
        for name in ("fingerprint", "vocabulary"):
            # Snapshots of version 0.1 do not name the vocabulary.
            if theirs.get(name, ours[name] if name == "vocabulary" else None) != ours[name]:
                raise SnapshotError(
                    f"the snapshot is of model {theirs.get('model')!r} with {name} "
                    f"{theirs.get(name)}, but this engine runs {ours['model']!r} with "
                    f"{ours[name]}; load the model that the snapshot was written with."
                )
