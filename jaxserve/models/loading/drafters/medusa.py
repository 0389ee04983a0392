"""Medusa heads in directories: `config.json` beside `model.safetensors`, with vLLM's names."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.numpy import save_file

from jaxserve.core.errors import ModelError, UnsupportedModelError, WeightsError
from jaxserve.core.model_files import check_regular, read_json, shown
from jaxserve.models.drafters.medusa import MedusaConfig, param_specs, tensor_name
from jaxserve.models.loading.assemble import Index, check_tensors
from jaxserve.models.loading.safetensors import slices_of

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MODEL_TYPE = "medusa"
"""That of `config.json`."""
_SIZES = {
    "num_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
}
"""Fields of the file, and ours."""
_MOST = {"num_heads": 128, "num_layers": 128, "hidden_size": 1 << 18, "vocab_size": 1 << 24}


@dataclasses.dataclass(frozen=True)
class MedusaCheckpoint:
    """Heads whose config is read, and whose tensors are known to match it."""

    path: Path
    config: MedusaConfig
    tensors: Mapping[str, Any] = dataclasses.field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Raises ModelError when there are no heads in `path`, UnsupportedModelError for a field
        that is not implemented, WeightsError when the file does not match the config."""
        path = Path(path).expanduser()
        if not (path / CONFIG).is_file():
            raise ModelError(
                f"there are no Medusa heads in {str(path)!r}; give a directory with {CONFIG} and "
                f"{WEIGHTS}, such as `jaxserve train-speculator` writes."
            )
        config = _config(path, read_json(path / CONFIG))
        try:
            check_regular(path / WEIGHTS)
        except FileNotFoundError:
            raise WeightsError(f"{path} has a {CONFIG} but no {WEIGHTS}.") from None
        prefix = "medusa_heads."
        tensors = {
            name.removeprefix(prefix): part for name, part in slices_of(path / WEIGHTS).items()
        }
        checkpoint = cls(path, config, tensors)
        check_tensors(checkpoint, param_specs(config), str(path), ())
        return checkpoint

    @property
    def fingerprint(self) -> str:
        """A digest of the config and of all weights."""
        digest = hashlib.sha256()
        for name in (CONFIG, WEIGHTS):
            digest.update((self.path / name).read_bytes())
        return digest.hexdigest()

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].get_shape()) if name in self.tensors else None

    def read(self, name: str, index: Index) -> np.ndarray:
        return self.tensors[name][index]

    def unclaimed(self, names: set[str]) -> list[str]:
        return sorted(self.tensors.keys() - names)


def _config(path: Path, raw: Mapping[str, Any]) -> MedusaConfig:
    if raw.get("model_type") != MODEL_TYPE:
        raise ModelError(
            f"{path / CONFIG} has model_type {shown(raw.get('model_type'))}; it must be "
            f"{MODEL_TYPE!r} for the method 'medusa'."
        )
    for field in ("medusa_fc_bias", "truncated_vocab_size"):
        value = raw.get(field)
        if value not in (None, False, raw.get("vocab_size")):
            raise UnsupportedModelError(
                f"{path / CONFIG} has {field} {shown(value)}, which is not implemented."
            )
    if raw.get("original_lm_head") is not True:
        raise UnsupportedModelError(
            f"{path / CONFIG} has original_lm_head {shown(raw.get('original_lm_head'))}; only "
            "heads that use the model's own output layer are implemented (true)."
        )
    sizes = {}
    for theirs, ours in _SIZES.items():
        value = raw.get(theirs)
        if type(value) is not int or not 1 <= value <= _MOST[ours]:
            raise ModelError(
                f"{path / CONFIG} has {theirs} {shown(value)}; it must be an integer of at least 1 "
                f"and at most {_MOST[ours]}."
            )
        sizes[ours] = value
    return MedusaConfig(**sizes)


def save_heads(path: Path, config: MedusaConfig, blocks: np.ndarray) -> None:
    """Write heads, `blocks` as `param_specs` has them, for `MedusaCheckpoint.open`."""
    path.mkdir(parents=True, exist_ok=True)
    places = (
        (head, layer) for head in range(config.num_heads) for layer in range(config.num_layers)
    )
    tensors = {tensor_name(*place): np.ascontiguousarray(w) for place, w in zip(places, blocks)}
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    written = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    written |= {
        "architectures": ["MedusaModel"],
        "model_type": MODEL_TYPE,
        "original_lm_head": True,
    }
    (path / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
