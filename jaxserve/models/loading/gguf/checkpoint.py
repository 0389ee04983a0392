"""GGUF files, plain or quantised, in one file or split over several.

Weights are dequantised slice by slice as they are read. Queries and keys of llama.cpp's
`LLAMA_ROPE_TYPE_NORM` architectures rotate neighbouring dimensions, so their rows are reordered for
Hugging Face's convention, which rotates the two halves of a head.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Self

import gguf
import jax
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import UnsupportedModelError, WeightsError
from jaxserve.core.model_config import ModelConfig
from jaxserve.models.loading import mxfp4
from jaxserve.models.loading.assemble import Index, aligned_empty
from jaxserve.models.loading.directory import (
    CONFIG,
    GENERATION_CONFIG,
    config_from_files,
    fingerprint_of,
)
from jaxserve.models.loading.gguf.config import generation_config, hf_config
from jaxserve.models.loading.gguf.header import GgufFile, GgufTensor, read_gguf
from jaxserve.models.quantization import STORED, of_inputs, regrouped
from jaxserve.text.tokenizer import Tokenizer
from pallas_kernels.quantized_matmul import Format, QuantizedWeight, from_gguf

_PLAIN = {Kind.F32: np.float32, Kind.F16: np.float16, Kind.BF16: ml_dtypes.bfloat16}
# Q5_0 and Q5_1 are what llama.cpp falls back to in a K-quant file when rows are not whole blocks.
_QUANTIZED = (
    *(Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1),
    *(Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.MXFP4),
)
_INTERLEAVED = ("llama", "smollm3")
_OF_LATENTS = ".kv_b_proj.weight"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# llama.cpp adds the one to norms that multiply by one plus their weight.
_NORMS_PLUS_ONE = ("gemma2", "gemma3")
# Tables of rotary frequencies: read into the config, or computed from it.
_COMPUTED = ("rope_freqs", "rope_factors", "attn_rot_embd")
# The library dequantises sixteen rows at a time, which is mostly numpy call overhead. Blocks of
# about this many values are seven times faster: large enough to amortise a call, small enough
# for the cache.
_VALUES_AT_ONCE = 1 << 17


@dataclasses.dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF model. `tensors` has GGUF names as keys, public methods take Hugging Face names."""

    path: Path
    config: ModelConfig
    files: tuple[GgufFile, ...] = dataclasses.field(repr=False)
    tensors: dict[str, GgufTensor] = dataclasses.field(repr=False)
    names: gguf.TensorNameMap = dataclasses.field(repr=False)

    format = "gguf"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a GGUF file, and its siblings if it is split.

        Raises WeightsError for a truncated or corrupt file, UnsupportedModelError for an
        architecture, quantisation or feature that is not implemented.
        """
        files = tuple(read_gguf(part) for part in _parts(path))
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        for tensor in tensors.values():
            if tensor.kind not in _PLAIN and tensor.kind not in _QUANTIZED:
                known = ", ".join(kind.name for kind in (*_PLAIN, *_QUANTIZED))
                raise UnsupportedModelError(
                    f"{path}: tensor {tensor.name[:200]} is quantised as {tensor.kind.name}; "
                    f"readable are {known}."
                )
        config = config_from_files(_config_files(files[0], set(tensors)))
        if files[0].metadata["general.architecture"] in _INTERLEAVED and config.head_dim % 2:
            raise UnsupportedModelError(
                f"{path}: heads of {config.head_dim} dimensions cannot rotate neighbouring ones; "
                "the number must be even."
            )
        return cls(path, config, files, tensors, _name_map(files[0], config.num_layers))

    @property
    def metadata(self) -> dict[str, Any]:
        return self.files[0].metadata

    @property
    def _architecture(self) -> str:
        return self.metadata["general.architecture"]

    @property
    def fingerprint(self) -> str:
        return fingerprint_of([file.path for file in self.files], self.files[0].header)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self.metadata)

    def config_files(self) -> dict[str, dict[str, Any]]:
        """What `config.json` and `generation_config.json` would hold."""
        return _config_files(self.files[0], set(self.tensors))

    def shape(self, name: str) -> tuple[int, ...] | None:
        if (apart := self._keys_and_values(name)) is not None:
            keys, values = apart
            return keys.shape[0] * (keys.shape[2] + values.shape[1]), keys.shape[1]
        tensor = self._tensor(name)
        return None if tensor is None else tensor.shape

    def read(self, name: str, index: Index) -> np.ndarray:
        if (apart := self._keys_and_values(name)) is not None:
            return _read_side_by_side(*apart, index)
        tensor = self._tensor(name)
        if heads := self._interleaved_heads(tensor.name):
            return _read_interleaved(tensor, index, tensor.shape[0] // heads)
        rows = _read_rows(tensor, index[0])[:, *index[1:]]
        if tensor.name.endswith("norm.weight") and self._architecture in _NORMS_PLUS_ONE:
            return rows.astype(np.float32) - 1
        return rows

    @property
    def quantization(self) -> str | None:
        """None: blocks stay as they are only with `quantization="gguf"`."""

    def is_quantized(self, name: str) -> bool:
        return False

    def stored_format(self, name: str, num_inputs: int) -> Format | None:
        """The format that has the values of a tensor's blocks."""
        return STORED.get(self._tensor(name).kind.name)

    def read_quantized(
        self, name: str, rows: slice, inputs: slice, format: Format
    ) -> QuantizedWeight:
        """Rows of a tensor [out, in] of a kind of blocks that devices can keep, and of them whole
        groups of inputs in `format`."""
        tensor = self._tensor(name)
        heads = self._interleaved_heads(tensor.name)
        unit = tensor.shape[0] // heads if heads else 1
        stored = slice(rows.start // unit * unit, cdiv(rows.stop, unit) * unit)
        size, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
        first, last = inputs.start // size, cdiv(inputs.stop, size)
        raw = tensor.raw.reshape(tensor.shape[0], -1)[stored]
        raw = raw[:, first * block_bytes : last * block_bytes]
        if tensor.kind is Kind.MXFP4:
            weight = mxfp4.packed_from_gguf(raw)
        else:
            weight = from_gguf(raw, tensor.kind.name)
        if heads:
            own = slice(rows.start - stored.start, rows.stop - stored.start)
            weight = jax.tree.map(lambda plane: _halves_of_heads(plane, unit)[own], weight)
        weight = regrouped(weight, format)
        return of_inputs(weight, inputs.start - first * size, inputs.stop - first * size)

    def unclaimed(self, names: set[str]) -> list[str]:
        claimed = {self._gguf_name(name) for name in names}
        apart = (self._keys_and_values(name) for name in names)
        claimed |= {tensor.name for both in apart if both is not None for tensor in both}
        return sorted(
            name
            for name in self.tensors.keys() - claimed
            if not any(computed in name for computed in _COMPUTED)
        )

    def _tensor(self, name: str) -> GgufTensor | None:
        """The tensor of a Hugging Face name; None if there is none. GGUF has one tensor
        [experts, ...] for all experts of a layer."""
        tensor = self.tensors.get(self._gguf_name(name))
        expert = _EXPERT.search(name)
        if tensor is None or expert is None or tensor.shape[0] != self.config.moe.num_experts:
            return tensor
        raw = tensor.raw.reshape(tensor.shape[0], -1)[int(expert[1])]
        return dataclasses.replace(tensor, shape=tensor.shape[1:], raw=raw)

    def _keys_and_values(self, name: str) -> tuple[GgufTensor, GgufTensor] | None:
        """The two tensors of a latent's keys [heads, rank, dim] and values [heads, dim, rank],
        which newer files have for one; None for other names and files."""
        if not name.endswith(_OF_LATENTS) or self._gguf_name(name) in self.tensors:
            return None
        stem = name.removesuffix(_OF_LATENTS)
        names = (self._gguf_name(f"{stem}.{which}_b_proj.weight") for which in "kv")
        keys, values = map(self.tensors.get, names)
        if keys is None or values is None:
            return None
        fits = len(keys.shape) == len(values.shape) == 3
        if not fits or keys.shape[:2] != values.shape[::2]:
            raise WeightsError(
                f"{keys.name} has shape {list(keys.shape)} and {values.name} "
                f"{list(values.shape)}; they must have the same heads and latents."
            )
        return keys, values

    def _gguf_name(self, name: str) -> str:
        name = _EXPERT.sub(".experts.", name).replace("correction_bias", "correction.bias")
        name = self.names.get_name(name, (".weight", ".bias")) or name
        # A GGUF has a suffix where transformers has none: at attention sinks.
        return f"{name}.weight" if name.endswith("sinks") else name

    def _interleaved_heads(self, gguf_name: str) -> int:
        """Heads whose rows are interleaved in this tensor; 0 if rows are in order."""
        if self._architecture not in _INTERLEAVED:
            return 0
        if ".attn_q." in gguf_name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".attn_k." in gguf_name else 0


def _config_files(file: GgufFile, tensors: set[str]) -> dict[str, dict[str, Any]]:
    return {CONFIG: hf_config(file, tensors), GENERATION_CONFIG: generation_config(file.metadata)}


def _parts(path: Path) -> list[Path]:
    """`path` itself, or all files of the split model that it belongs to."""
    split = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if split is None:
        return [path]
    stem, _, count = split.groups()
    if int(count) == 0:
        raise WeightsError(f"{path.name} is one of 0 files; give the file the name it had.")
    parts = [
        path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)
    ]
    for part in parts:
        if not part.is_file():
            raise WeightsError(f"{path.name} is one of {int(count)} files; {part} is missing.")
    return parts


def _name_map(file: GgufFile, num_layers: int) -> gguf.TensorNameMap:
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    number = architectures[file.metadata["general.architecture"]]
    return gguf.get_tensor_name_map(number, num_layers)


def _read_rows(tensor: GgufTensor, rows: slice) -> np.ndarray:
    """Whole rows of a tensor: float16, bfloat16 or float32 [rows, ...]."""
    length, row_shape = tensor.shape[0], tensor.shape[1:]
    raw = tensor.raw.reshape(length, -1)[rows] if row_shape else tensor.raw
    if plain := _PLAIN.get(tensor.kind):
        values = raw.view(plain)
        return values if row_shape else values[rows]
    values_per_row = int(np.prod(row_shape))
    out = aligned_empty((raw.shape[0], *row_shape), np.float32)
    step = max(1, _VALUES_AT_ONCE // values_per_row)
    for start in range(0, raw.shape[0], step):
        block = raw[start : start + step]
        # Reshaped to one row, so that the library handles the block in one call.
        values = gguf.dequantize(block.reshape(1, -1), tensor.kind)
        out[start : start + step] = values.reshape(-1, *row_shape)
    return out


def _read_interleaved(tensor: GgufTensor, index: Index, head_dim: int) -> np.ndarray:
    """Rows in Hugging Face's order."""
    first, last = index[0].start // head_dim, cdiv(index[0].stop, head_dim)
    rows = _read_rows(tensor, slice(first * head_dim, last * head_dim))
    halves = _halves_of_heads(rows, head_dim)
    offset = first * head_dim
    return halves[index[0].start - offset : index[0].stop - offset, *index[1:]]


def _read_side_by_side(keys: GgufTensor, values: GgufTensor, index: Index) -> np.ndarray:
    """Rows of each head's keys, then of its values, float32 [rows, rank]: those of the one matrix
    that the files of a latent's keys [heads, rank, dim] and values [heads, dim, rank] are from."""
    rows = keys.shape[2] + values.shape[1]
    heads = slice(index[0].start // rows, cdiv(index[0].stop, rows))

    def of_heads(tensor: GgufTensor) -> np.ndarray:
        return _read_rows(tensor, heads).astype(np.float32).reshape(-1, *tensor.shape[1:])

    both = np.concatenate([of_heads(keys).swapaxes(1, 2), of_heads(values)], axis=1)
    both = both.reshape(-1, keys.shape[1])
    offset = heads.start * rows
    return both[index[0].start - offset : index[0].stop - offset, *index[1:]]


def _halves_of_heads(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of whole heads [heads * head_dim, ...]: of each head the even ones, then the odd."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
