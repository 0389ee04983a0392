"""EAGLE's draft layers in directories: `config.json` beside safetensors files, with the names of
its authors' checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxserve.core.errors import ModelError, UnsupportedModelError
from jaxserve.core.model_config import ModelConfig
from jaxserve.models.drafters import eagle
from jaxserve.models.drafters.feature_layer import FeatureLayer
from jaxserve.models.families import llama
from jaxserve.models.family import Params, ParamSpec
from jaxserve.models.loading.assemble import check_tensors
from jaxserve.models.loading.directory import CONFIG
from jaxserve.models.loading.safetensors import SafetensorsCheckpoint
from jaxserve.models.registry import get_family

WEIGHTS = "model.safetensors"
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}
"""Fields of the file, and ours."""


@dataclasses.dataclass(frozen=True)
class EagleCheckpoint(SafetensorsCheckpoint):
    """A draft layer whose config is read, and whose tensors are known to match it."""

    title: ClassVar[str] = "EAGLE draft layer"
    origin: ClassVar[str] = ", such as `jaxserve train-speculator --method eagle` writes"
    not_loaded: ClassVar[tuple[str, ...]] = (eagle.EMBEDDINGS,)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Raises ModelError when there is no draft layer in `path`, UnsupportedModelError for one
        that is not implemented, WeightsError when the files do not match the config."""
        path = Path(path).expanduser()
        if not (path / CONFIG).is_file():
            raise ModelError(
                f"there is no {cls.title} in {str(path)!r}; give a directory with {CONFIG} and "
                f"safetensors files{cls.origin}."
            )
        checkpoint = super().open(path)
        config = checkpoint.config
        if get_family(config.architecture) is not llama.FAMILY:
            raise UnsupportedModelError(
                f"{path / CONFIG} has the architecture {config.architecture}; a draft layer must "
                "be of the Llama family, such as LlamaForCausalLM or Qwen2ForCausalLM."
            )
        if config.num_layers != 1:
            raise UnsupportedModelError(
                f"{path / CONFIG} has num_hidden_layers {config.num_layers}; only a draft of one "
                "layer is implemented."
            )
        check_tensors(checkpoint, checkpoint.specs, str(path), cls.not_loaded)
        return checkpoint

    @property
    def specs(self) -> Params:
        """Specs of its parameters; the embeddings are the model's."""
        return eagle.param_specs(self.config, biased=self.shape("fc.bias") is not None)

    def feature_layer(self, target: ModelConfig) -> FeatureLayer:
        """The layer, for a model."""
        return eagle.FEATURE_LAYER


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed `config.json` is of a layer of EAGLE-3."""
    names = raw.get("architectures")
    named = isinstance(names, list) and any(
        isinstance(name, str) and "eagle3" in name.lower() for name in names
    )
    return named or raw.get("draft_vocab_size") is not None


def save_layer(path: Path, config: ModelConfig, params: Params) -> None:
    """Write a layer with plain rotations, `params` arrays as `eagle.param_specs` has them, for
    `EagleCheckpoint.open`."""
    path.mkdir(parents=True, exist_ok=True)
    specs = eagle.param_specs(config, biased="fc_bias" in params)
    tensors: dict[str, np.ndarray] = {}
    jax.tree.map(lambda spec, array: tensors.update(tensors_of(spec, array)), specs, params)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(config_of(config), indent=2) + "\n"
    (path / CONFIG).write_text(text, encoding="utf-8")


def config_of(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a layer with plain rotations."""
    return {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()} | {
        "architectures": [config.architecture],
        "model_type": "llama",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
    }


def tensors_of(spec: ParamSpec, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """A parameter's tensors by name: matrices [outputs, inputs], and vectors."""
    sizes = [part.shape[spec.concat_axis] for part in spec.parts]
    for part, own in zip(spec.parts, np.split(array, np.cumsum(sizes)[:-1], spec.concat_axis)):
        inputs = math.prod(part.shape[-spec.num_inputs :]) if spec.num_inputs else None
        shape = (-1,) if inputs is None else (-1, inputs)
        yield part.tensor, np.ascontiguousarray(own.reshape(shape))
