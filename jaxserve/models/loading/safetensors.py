"""Hugging Face directories: `config.json` and one or more safetensors files."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Self

import ml_dtypes  # noqa: F401  (gives numpy the bfloat16 that safetensors asks it for)
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.core.errors import ModelError, UnsupportedModelError, WeightsError
from jaxserve.core.model_files import check_regular, read_json, shown
from jaxserve.models.loading.assemble import Index
from jaxserve.models.loading.directory import CONFIG, ModelDirectory

INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")
# Written by some exporters; a model computes or shares these.
_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias")


@dataclasses.dataclass(frozen=True)
class SafetensorsCheckpoint(ModelDirectory):
    """Memory-mapped safetensors files, read by slice."""

    files: tuple[Path, ...]
    tensors: dict[str, Any] = dataclasses.field(repr=False)

    format = "safetensors"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map every safetensors file of directory `path`.

        Raises WeightsError for a shard that is missing, truncated or not in the directory,
        ModelError for one that is no regular file, UnsupportedModelError for a dtype that is not
        floating point.
        """
        config = ModelDirectory.open(path).config
        files = _weight_files(path)
        tensors: dict[str, Any] = {}
        for file in files:
            tensors |= _slices(file)
        return cls(path, config, files, tensors)

    @property
    def fingerprint(self) -> str:
        return self.fingerprint_with(self.files)

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self.tensors.get(name)
        return None if found is None else tuple(found.get_shape())

    def read(self, name: str, index: Index) -> np.ndarray:
        return self.tensors[name][index]

    def unclaimed(self, names: set[str]) -> list[str]:
        rest = list(self.tensors.keys() - names)
        if self.config.tie_word_embeddings and "lm_head.weight" in rest:
            rest.remove("lm_head.weight")
        return sorted(name for name in rest if not name.endswith(_HARMLESS_SUFFIXES))


def _weight_files(directory: Path) -> tuple[Path, ...]:
    """The shards that the index names, or every safetensors file if there is no index."""
    index = directory / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise WeightsError(
                f"{index} is not an index of safetensors files: its weight_map is "
                f"{shown(weight_map)}; it must be an object of tensor names to file names."
            )
        for name in weight_map.values():
            if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
                raise WeightsError(
                    f"{INDEX} names the file {shown(name)}; it must be a .safetensors file of "
                    "the same directory, named without a path."
                )
        files = sorted(directory / name for name in set(weight_map.values()))
    else:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise _no_weights(directory)
    for file in files:
        try:
            check_regular(file)
        except FileNotFoundError:
            raise WeightsError(f"{INDEX} names {file.name}, which is not in {directory}.") from None
    return tuple(files)


def _no_weights(directory: Path) -> ModelError:
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return ModelError(
            f"{directory} holds its weights as pickle ({pickles[0]}), which can run any code when "
            "loaded and is never read; save the model with safe_serialization=True."
        )
    return WeightsError(
        f"{directory} has a {CONFIG} but no safetensors files; "
        "load_format='dummy' makes random weights."
    )


def _slices(file: Path) -> dict[str, Any]:
    try:
        opened = safe_open(file, framework="numpy")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is truncated or corrupt ({error}); fetch it again.") from error
    for name, part in slices.items():
        if part.get_dtype() not in _DTYPES:
            raise UnsupportedModelError(
                f"{file}: tensor {name[:200]} is {part.get_dtype()}; weights may be "
                f"{', '.join(_DTYPES)}."
            )
    return slices
