"""The text files of a model: config, generation defaults, tokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from jaxserve.core.errors import ModelError, RequestError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.model_files import read_json, shown
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.models.hf_config import boolean, eos_token_ids, malformed
from jaxserve.models.registry import get_family
from jaxserve.text.tokenizer import Tokenizer
from pallas_kernels.quantized_matmul import Format

CONFIG = "config.json"
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
GENERATION_CONFIG = "generation_config.json"
_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


@dataclasses.dataclass(frozen=True)
class ModelDirectory:
    """A directory with a Hugging Face `config.json` and any weights."""

    path: Path
    config: ModelConfig

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the config of directory `path`; ModelError when it is absent or malformed."""
        return cls(path, cls.read_config(path))

    @classmethod
    def read_config(cls, path: Path) -> ModelConfig:
        """The config of directory `path`; raises as `open`."""
        return config_from_files(read_config_files(path))

    def tokenizer(self) -> Tokenizer:
        """Raises ModelError when the directory has no tokenizer."""
        return Tokenizer.from_directory(self.path)

    @property
    def quantization(self) -> str | None:
        """None: the weights, if there are any, are not quantized."""

    def is_quantized(self, name: str) -> bool:
        """Whether a weight is stored by the method `quantization`."""
        return False

    def stored_format(self, name: str, num_inputs: int) -> Format | None:
        """None, as weights are not quantized."""

    def config_files(self) -> dict[str, dict[str, Any]]:
        """Contents of `config.json` and, if there is one, `generation_config.json`."""
        return read_config_files(self.path)

    @property
    def fingerprint(self) -> str:
        """Hex digest that changes with the config."""
        return self.fingerprint_with([])

    def fingerprint_with(self, files: Iterable[Path]) -> str:
        """Hex digest that changes with the config, or with one of `files` (`fingerprint_of`)."""
        return fingerprint_of(files, json.dumps(self.config_files()).encode())


def read_config_files(directory: Path) -> dict[str, dict[str, Any]]:
    """File name to content; ModelError when `config.json` is absent or either is malformed."""
    files = {CONFIG: read_json(directory / CONFIG)}
    generation = directory / GENERATION_CONFIG
    return files | ({GENERATION_CONFIG: read_json(generation)} if generation.exists() else {})


def config_from_files(files: dict[str, dict[str, Any]]) -> ModelConfig:
    """ModelConfig from the parsed `config.json` and `generation_config.json`.

    If both have end-of-sequence ids, those of the generation config are used: chat models end a
    turn with a token that the base model's config does not have. Raises ModelError for a malformed
    field, UnsupportedModelError for an unsupported feature.
    """
    raw, generation = files[CONFIG], files.get(GENERATION_CONFIG, {})
    architectures = raw.get("architectures")
    if not architectures:
        raise ModelError(
            f"the config names no architecture (it has {shown(sorted(raw))}); it needs a field "
            'like "architectures": ["LlamaForCausalLM"].'
        )
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise malformed("architectures", architectures, 'a list like ["LlamaForCausalLM"]')
    config = get_family(architectures[0]).config_from_hf(raw)
    own_eos = eos_token_ids(generation, config.vocab_size, GENERATION_CONFIG)
    return dataclasses.replace(
        config,
        eos_token_ids=own_eos or config.eos_token_ids,
        default_sampling=_default_sampling(generation),
    )


def _default_sampling(generation: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The recommended sampling fields, each validated by SamplingParams."""
    if not boolean(generation, "do_sample", True, GENERATION_CONFIG):
        generation = generation | {"temperature": 0.0}
    fields = [(name, generation.get(name)) for name in _SAMPLING_FIELDS]
    recommended = tuple((name, value) for name, value in fields if value is not None)
    for name, value in recommended:
        try:
            SamplingParams.from_defaults({name: value})
        except RequestError as error:
            raise ModelError(f"{GENERATION_CONFIG} has {name} {shown(value)}: {error}") from error
    return recommended


def fingerprint_of(files: Iterable[Path], header: bytes) -> str:
    """Hex digest of the header's bytes, and of the name, the size and samples of each file.

    A copy of a model has the fingerprint of the original, on any machine.
    """
    digest = hashlib.sha256(header)
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(_SAMPLES):
                file.seek(place * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
