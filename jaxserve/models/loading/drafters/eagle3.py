"""EAGLE-3's draft layers in directories: `config.json` beside safetensors files, with the names of
its authors' checkpoints (`midlayer.*`) or vLLM's (`layers.0.*`)."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxserve.core.errors import ConfigError, ModelError, UnsupportedModelError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.model_files import read_json, shown
from jaxserve.models.drafters import eagle3
from jaxserve.models.drafters.eagle3 import Eagle3Config
from jaxserve.models.drafters.feature_layer import FeatureLayer
from jaxserve.models.family import Params
from jaxserve.models.hf_config import boolean, integer
from jaxserve.models.loading.directory import CONFIG, config_from_files, read_config_files
from jaxserve.models.loading.drafters.eagle import (
    WEIGHTS,
    EagleCheckpoint,
    config_of,
    is_eagle3,
    tensors_of,
)

_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_OWN_FIELDS = {
    *("draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_config"),
    _AUX_LAYERS,
}
_MAX_AUX_LAYERS = 8
_PREFIXES = ("midlayer.", "layers.0.")


@dataclasses.dataclass(frozen=True)
class Eagle3Checkpoint(EagleCheckpoint):
    """A draft layer whose config is read, and whose tensors are known to match it."""

    other_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        ".d2t": ("I64", "I32"),
        ".t2d": ("BOOL",),
    }
    title: ClassVar[str] = "EAGLE-3 draft layer"
    origin: ClassVar[str] = ", such as `jaxserve train-speculator --method eagle3` writes"
    not_loaded: ClassVar[tuple[str, ...]] = ("t2d",)
    """It follows from `d2t`."""

    @classmethod
    def read_config(cls, path: Path) -> ModelConfig:
        files = read_config_files(path)
        raw = files[CONFIG]
        if not is_eagle3(raw):
            raise ModelError(
                f"{path / CONFIG} has no draft_vocab_size, so it is not of a layer of EAGLE-3; "
                "use the method 'eagle' for one of EAGLE 1."
            )
        if raw.get("target_hidden_size") not in (None, raw.get("hidden_size")):
            raise UnsupportedModelError(
                f"{path / CONFIG} has target_hidden_size {shown(raw['target_hidden_size'])}; only "
                "layers as wide as the model are implemented."
            )
        of_llama = {name: value for name, value in raw.items() if name not in _OWN_FIELDS}
        files[CONFIG] = of_llama | {"architectures": ["LlamaForCausalLM"]}
        return config_from_files(files)

    def own(self, num_layers: int) -> Eagle3Config:
        """What the layer has beyond its config, for a model of so many layers.

        Raises ConfigError when it follows layers that the model does not have.
        """
        named = self._named_layers
        aux = eagle3.default_aux_layers(num_layers) if named is None else named
        if aux[-1] >= num_layers:
            raise ConfigError(
                f"the draft layer of speculative_config follows layers {', '.join(map(str, aux))} "
                f"of its model ({_AUX_LAYERS}), and the model has {num_layers}; use one that was "
                "trained for this model."
            )
        return dataclasses.replace(self._own, aux_layers=aux)

    def feature_layer(self, target: ModelConfig) -> FeatureLayer:
        """Raises as `own`."""
        return eagle3.feature_layer(self.config, self.own(target.num_layers))

    @property
    def specs(self) -> Params:
        return eagle3.param_specs(self.config, self._own)

    @functools.cached_property
    def _raw(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG)

    @functools.cached_property
    def _own(self) -> Eagle3Config:
        """As `own`, for any model: of the layers only their number is known."""
        vocab = self.config.vocab_size
        name = "self_attn.q_proj.weight"
        prefix = next((each for each in _PREFIXES if self.shape(each + name)), _PREFIXES[0])
        return Eagle3Config(
            tuple(range(len(self._named_layers or range(3)))),
            integer(self._raw | {"vocab_size": vocab}, "draft_vocab_size", vocab),
            self.shape("d2t") is not None,
            boolean(self._raw, "norm_before_residual", False),
            self.shape("embed_tokens.weight") is not None,
            prefix,
        )

    @functools.cached_property
    def _named_layers(self) -> tuple[int, ...] | None:
        """The layers whose inputs it follows, if the config says so: vLLM's field has them, and
        that of SGLang, within `eagle_config`, the ones before, whose outputs they are."""
        nested = self._raw.get("eagle_config")
        nested = nested if isinstance(nested, dict) else {}
        found, later = self._raw.get(_AUX_LAYERS), 0
        if found is None:
            found, later = nested.get(_AUX_LAYERS), 1
        if found is None:
            return None
        fine = isinstance(found, list) and 1 <= len(found) <= _MAX_AUX_LAYERS
        fine = fine and all(type(layer) is int and layer + later >= 0 for layer in found)
        if not fine or sorted(set(found)) != found:
            raise ModelError(
                f"{self.path / CONFIG} has {_AUX_LAYERS} {shown(found)}; it must list 1 to "
                f"{_MAX_AUX_LAYERS} layers, ascending."
            )
        return tuple(layer + later for layer in found)


def save_layer(path: Path, config: ModelConfig, own: Eagle3Config, params: Params) -> None:
    """Write a layer with plain rotations, `params` arrays as `eagle3.param_specs` has them, for
    `Eagle3Checkpoint.open`."""
    path.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    specs = eagle3.param_specs(config, own)
    jax.tree.map(lambda spec, array: tensors.update(tensors_of(spec, array)), specs, params)
    if own.mapped:
        d2t = tensors["d2t"] = tensors["d2t"].astype(np.int64)
        t2d = tensors["t2d"] = np.zeros(config.vocab_size, bool)
        t2d[np.arange(len(d2t)) + d2t] = True
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    written = config_of(config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": own.draft_vocab_size,
        "norm_before_residual": own.norm_first,
        _AUX_LAYERS: list(own.aux_layers),
    }
    (path / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
