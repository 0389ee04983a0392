"""Hugging Face directories: `config.json` and one or more safetensors files."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import ml_dtypes  # also gives numpy the bfloat16 that safetensors asks it for
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.core.errors import ModelError, UnsupportedModelError, WeightsError
from jaxserve.core.model_files import check_regular, read_json, shown
from jaxserve.models import quantization_config
from jaxserve.models.loading.assemble import Index
from jaxserve.models.loading.directory import CONFIG, ModelDirectory, read_config_files
from jaxserve.models.loading.fused_experts import PACKED, FusedExperts
from jaxserve.models.loading.quantized import tensors as quantized_tensors
from jaxserve.models.loading.quantized.tensors import QuantizedTensors
from pallas_kernels.quantized_matmul import MXFP4, Format, QuantizedWeight

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
    other_dtypes: ClassVar[Mapping[str, Collection[str]]] = {}
    """As `slices_of`, for all models of a class."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map every safetensors file of directory `path`.

        Raises WeightsError for a shard that is missing, truncated or not in the directory,
        ModelError for one that is no regular file, UnsupportedModelError for a dtype that is not
        floating point.
        """
        config = cls.read_config(path)
        quantized = quantization_config.parse(read_config_files(path)[CONFIG]) is not None
        others = cls.other_dtypes | (quantized_tensors.DTYPES if quantized else {})
        files = _weight_files(path)
        tensors: dict[str, Any] = {}
        for file in files:
            tensors |= slices_of(file, others)
        return cls(path, config, files, tensors)

    @property
    def fingerprint(self) -> str:
        return self.fingerprint_with(self.files)

    @property
    def quantization(self) -> str | None:
        return quantization_config.method_of(self.config_files()[CONFIG])

    def is_quantized(self, name: str) -> bool:
        if self._quantized is None:
            return self._experts.is_packed(name)
        return self._quantized.shape(name) is not None

    def shape(self, name: str) -> tuple[int, ...] | None:
        if self._quantized and (shape := self._quantized.shape(name)):
            return shape
        found = self.tensors.get(name)
        return self._experts.shape(name) if found is None else tuple(found.get_shape())

    def read(self, name: str, index: Index) -> np.ndarray:
        if self._quantized and self._quantized.shape(name):
            return self._quantized.read(name, index)
        found = self.tensors.get(name)
        return self._experts.read(name, index) if found is None else found[index]

    def unclaimed(self, names: set[str]) -> list[str]:
        tied = ("lm_head.weight",) if self.config.tie_word_embeddings else ()
        harmless = (*_HARMLESS_SUFFIXES, *tied)
        claimed = names.union(*map(self._experts.stored, names - self.tensors.keys()))
        others = (name for name in self.tensors.keys() - claimed if not name.endswith(harmless))
        if (quantized := self._quantized) is not None:
            parts = set().union(*map(quantized.stored, names))
            others = (each for each in others if each not in parts)
            others = (each for each in others if not quantized.is_unneeded(each))
        return sorted(others)

    def stored_format(self, name: str, num_inputs: int) -> Format | None:
        if self._quantized is not None:
            return self._quantized.format(name)
        return MXFP4 if self._experts.is_packed(name) else None

    def read_quantized(
        self, name: str, rows: slice, inputs: slice, format: Format
    ) -> QuantizedWeight:
        if self._quantized is not None:
            return self._quantized.read_packed(name, rows, inputs, format)
        return self._experts.read_packed(name, rows, inputs, format)

    @functools.cached_property
    def _experts(self) -> FusedExperts:
        return FusedExperts(self.tensors, self.config.moe.num_experts if self.config.moe else 0)

    @functools.cached_property
    def _quantized(self) -> QuantizedTensors | None:
        """The quantized weights; None without a `quantization_config` of these."""
        stored = quantization_config.parse(self.config_files()[CONFIG])
        return QuantizedTensors(self.tensors, stored) if stored else None


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


def slices_of(file: Path, others: Mapping[str, Collection[str]] = {}) -> dict[str, Any]:
    """The tensors of a file, memory-mapped, by name. `others` has dtypes that are not floating
    point, by the last part of the names that may have them.

    Raises WeightsError when it is damaged, and UnsupportedModelError for any other dtype.
    """
    try:
        opened = safe_open(file, framework="numpy")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is truncated or corrupt ({error}); fetch it again.") from error
    for name, part in slices.items():
        if part.get_dtype() == "U8" and name.endswith(PACKED):
            continue
        if part.get_dtype() in others.get(f".{name.rpartition('.')[2]}", ()):
            continue
        if part.get_dtype() not in _DTYPES:
            raise UnsupportedModelError(
                f"{file}: tensor {name[:200]} is {part.get_dtype()}; weights may be "
                f"{', '.join(_DTYPES)}."
            )
    return slices | _float8(file, slices)


def _float8(file: Path, slices: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of `slices` that have a dtype for which numpy has no name of its own."""
    names = [name for name, part in slices.items() if part.get_dtype() == "F8_E4M3"]
    if not names:
        return {}
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    octets = np.memmap(file, np.uint8, mode="r")
    found = {}
    for name in names:
        start, stop = (8 + length + end for end in header[name]["data_offsets"])
        values = octets[start:stop].view(ml_dtypes.float8_e4m3fn)
        found[name] = _Array(values.reshape(header[name]["shape"]))
    return found


class _Array:
    """An array as a slice of a safetensors file."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def get_dtype(self) -> str:
        return "F8_E4M3"

    def get_shape(self) -> list[int]:
        return list(self._array.shape)

    def __getitem__(self, index: Index) -> np.ndarray:
        return np.array(self._array[index])
