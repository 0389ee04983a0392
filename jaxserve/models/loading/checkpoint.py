"""Finds and opens a model in any supported format."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from jaxserve.core.errors import ConfigError, ModelError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.choices import LoadFormat
from jaxserve.models.family import Params
from jaxserve.models.loading.assemble import check_tensors
from jaxserve.models.loading.directory import CONFIG, ModelDirectory
from jaxserve.models.loading.dummy import DummyCheckpoint
from jaxserve.models.loading.fetch import DEFAULT_MODEL, default_model_path
from jaxserve.models.loading.gguf.checkpoint import GgufCheckpoint
from jaxserve.models.loading.safetensors import SafetensorsCheckpoint
from jaxserve.models.registry import get_family, param_specs
from jaxserve.text.tokenizer import Tokenizer
from pallas_kernels.quantized_matmul import Format

_TEXT_PATTERNS = ["*.json", "*.jinja", "merges.txt"]
_log = logging.getLogger(__name__)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WAYS = (
    f"a model is {DEFAULT_MODEL!r} (fetched once), a .gguf file, a directory with config.json and "
    "safetensors files, a directory that `jaxserve convert` wrote, or a Hugging Face id like "
    "'org/name'"
)


class Checkpoint(Protocol):
    """An opened model: its config is read, and its tensors are known to match it.

    `fingerprint` is a hex digest that changes when the files do, without reading all weights.
    `quantization` is the method of its `quantization_config` (models/quantization_config.py), in
    whose formats weights stay by default; None for others.
    """

    path: Path
    config: ModelConfig
    format: Literal["safetensors", "gguf", "orbax", "dummy"]

    @property
    def fingerprint(self) -> str: ...

    @property
    def quantization(self) -> str | None: ...

    def tokenizer(self) -> Tokenizer: ...

    def config_files(self) -> dict[str, dict[str, Any]]: ...

    def is_quantized(self, name: str) -> bool:
        """Whether a weight is stored by the method `quantization`."""

    def stored_format(self, name: str, num_inputs: int) -> Format | None:
        """The format in which devices can keep a weight just as it is stored; None without."""


@runtime_checkable
class Restorable(Protocol):
    """A checkpoint that gives whole parameters; others are a TensorSource to slice them from."""

    def check(self, specs: Params) -> None: ...

    def restore(self, specs: Params, dtype: np.dtype, shardings: Params) -> Params: ...


def open_checkpoint(
    model: str | Path | None = None, load_format: LoadFormat = "auto", *, seed: int = 0
) -> Checkpoint:
    """Find and open a model: a path, a Hugging Face id, or (None) the embedded default.

    With `load_format="dummy"` only the config is needed, from a model or a `config.json` alone,
    and the weights are random, drawn from `seed`. Raises ModelError when nothing is found,
    UnsupportedModelError for an architecture or feature that is not implemented, WeightsError when
    the weights are damaged or do not match the config.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format {load_format!r} is not one of 'auto', 'dummy'.")
    path = _locate(model, weights=load_format == "auto")
    checkpoint: Checkpoint
    if load_format == "dummy":
        checkpoint = DummyCheckpoint(_open_config(path), seed)
    else:
        checkpoint = _open_weights(path)
    specs = param_specs(checkpoint.config)
    if isinstance(checkpoint, Restorable):
        checkpoint.check(specs)
    else:
        others = _other_tensors(checkpoint.config)
        if count := check_tensors(checkpoint, specs, str(path), others):
            _log.info("%s: tensors beside the model's: %d (%s*)", path, count, "*, ".join(others))
    return checkpoint


def _other_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Prefixes of tensors that the model does without. Those of layers for further tokens are among
    them, of which the method 'mtp' loads the first."""
    first, family = config.num_layers, get_family(config.architecture)
    further = range(first, first + config.num_mtp_layers)
    return (*family.other_tensors, *(f"model.layers.{layer}." for layer in further))


def _locate(model: str | Path | None, weights: bool) -> Path:
    """The local path of a model, which is fetched first if it is not local."""
    if model is None or str(model) == DEFAULT_MODEL:
        return default_model_path()
    path = Path(model).expanduser()
    if path.exists():
        return path
    if isinstance(model, str) and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
        return _snapshot(model, weights)
    raise ModelError(f"there is no file or directory {str(model)!r}; {_WAYS}.")


def _snapshot(model_id: str, weights: bool) -> Path:
    """Directory of a Hugging Face model, without anything that could run code when loaded."""
    # Imported here because most models are local, and the import takes a third of a second.
    from huggingface_hub import snapshot_download

    patterns = [*_TEXT_PATTERNS, "*.safetensors"] if weights else _TEXT_PATTERNS
    try:
        # Subfolders hold other exports of the same weights.
        return Path(snapshot_download(model_id, allow_patterns=patterns, ignore_patterns="*/*"))
    except Exception as error:
        raise ModelError(
            f"{model_id!r} is not a local path, and it could not be fetched from the Hugging Face "
            f"hub ({str(error).partition(chr(10))[0]}); {_WAYS}."
        ) from error


def _open_weights(path: Path) -> Checkpoint:
    if not path.is_dir():
        return _open_file(path)
    if not (path / CONFIG).exists():
        raise _not_a_model(path)
    if (path / "params").is_dir():
        # Orbax takes a second to import; only its own checkpoints pay for it.
        from jaxserve.models.loading.orbax import OrbaxCheckpoint

        return OrbaxCheckpoint.open(path)
    return SafetensorsCheckpoint.open(path)


def _open_config(path: Path) -> ModelDirectory | GgufCheckpoint:
    if path.name == CONFIG:
        return ModelDirectory.open(path.parent)
    if not path.is_dir():
        return _open_file(path)
    if not (path / CONFIG).exists():
        raise _not_a_model(path)
    return ModelDirectory.open(path)


def _open_file(path: Path) -> GgufCheckpoint:
    if path.suffix in _PICKLES:
        raise ModelError(
            f"{path} is a pickle, which can run any code when loaded and is never read; {_WAYS}."
        )
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is not a .gguf file; {_WAYS}.")
    return GgufCheckpoint.open(path)


def _not_a_model(path: Path) -> ModelError:
    try:
        found = sorted(p.name for p in path.iterdir())[:8]
    except OSError as error:
        return ModelError(f"{path} cannot be read: {error}; {_WAYS}.")
    return ModelError(f"{path} has no {CONFIG} (it holds {found}); {_WAYS}.")
