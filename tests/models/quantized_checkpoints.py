"""Models as tools for quantization write them, and the floats that the formats' definitions say.

FP8: `weight * weight_scale`, of blocks as in DeepSeek-V3's README_WEIGHTS.md (`weight_scale_inv` of
each 128 x 128 weights). compressed-tensors: `compressors/naive_quantized` and `pack_quantized`,
values (q - zero_point) * scale (quantization/lifecycle/forward.py). AWQ: `dequantize_gemm` of
AutoAWQ's utils/packing_utils.py. GPTQ: AutoGPTQ's nn_modules/qlinear/qlinear_cuda_old.py, and
`g_idx` as in qlinear_cuda.py. MXFP4: OCP Microscaling Formats 1.0. Everything here is
written down from these, value by value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tiny_checkpoints import write_hf

Tensors = dict[str, np.ndarray]
FLOAT8 = ml_dtypes.float8_e4m3fn
GROUP = 32
BLOCK = [48, 64]
_LINEAR = re.compile(r"model\.layers\.\d+\.(?!eh_proj).*_proj(_with_mqa)?\.weight")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _channels(weight: np.ndarray, most: float) -> np.ndarray:
    """A scale for each output [out, 1]."""
    return np.abs(weight).max(axis=1, keepdims=True) / np.float32(most)


def fp8(weight: np.ndarray, scale: np.ndarray) -> tuple[Tensors, Any]:
    """`scale` has a value for each weight, or for each of its rows, or one."""
    values = (weight / scale).astype(FLOAT8)
    return {"weight": values, "weight_scale": scale}, values.astype(np.float32) * scale


def _fp8_tensor(weight: np.ndarray) -> tuple[Tensors, Any]:
    return fp8(weight, np.full((), np.abs(weight).max() / 448, np.float32))


def _fp8_channel(weight: np.ndarray) -> tuple[Tensors, Any]:
    scales = _channels(weight, 448).astype(ml_dtypes.bfloat16).astype(np.float32)
    tensors, plain = fp8(weight, scales)
    return tensors | {"weight_scale": scales.astype(ml_dtypes.bfloat16)}, plain


def _fp8_block(weight: np.ndarray, weight_block_size: list[int] = BLOCK) -> tuple[Tensors, Any]:
    rows, columns = weight_block_size
    scale = np.empty_like(weight)
    for row in range(0, weight.shape[0], rows):
        for column in range(0, weight.shape[1], columns):
            block = np.s_[row : row + rows, column : column + columns]
            scale[block] = np.abs(weight[block]).max() / np.float32(448)
    stored, plain = fp8(weight, scale)
    return {"weight": stored["weight"], "weight_scale_inv": scale[::rows, ::columns]}, plain


def _int8(weight: np.ndarray) -> tuple[Tensors, Any]:
    scales = _channels(weight, 127).astype(ml_dtypes.bfloat16).astype(np.float32)
    values = np.clip(np.round(weight / scales), -128, 127).astype(np.int8)
    stored = {"weight": values, "weight_scale": scales.astype(ml_dtypes.bfloat16)}
    return stored, values * scales


def grouped(
    weight: np.ndarray, bits: int, symmetric: bool, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values and zero points from 0 to 2^bits - 1, and scales of two bytes, as float32: [out, in],
    [out, groups] and [out, groups]. `groups` has the group of each input."""
    count, most = groups.max() + 1, 2**bits - 1
    scales, zeros = (np.empty((len(weight), count), np.float32) for _ in range(2))
    for group in range(count):
        part = weight[:, groups == group]
        if symmetric:
            zeros[:, group] = 2 ** (bits - 1)
            scales[:, group] = np.abs(part).max(axis=1) / (most // 2)
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scales[:, group] = (high - low) / most
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 0, most)
    scales = scales.astype(np.float16).astype(np.float32)
    values = np.clip(np.round(weight / scales[:, groups]) + zeros[:, groups], 0, most)
    return values.astype(np.int64), zeros.astype(np.int64), scales


def _groups(num_inputs: int, reordered: bool) -> np.ndarray:
    """The group of each input: one after another, or in activation order, which layers with the
    same input have alike."""
    groups = np.arange(num_inputs) // GROUP
    return np.random.default_rng(num_inputs).permutation(groups) if reordered else groups


def in_words(values: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Int32 words of values along `axis`: place p of a word has the value `order[p]` of it."""
    count = 32 // bits
    values = np.moveaxis(values, axis, 0)
    values = np.concatenate([values, np.zeros((-len(values) % count, *values.shape[1:]), int)])
    words = np.zeros((len(values) // count, *values.shape[1:]), np.uint32)
    for place, at in enumerate(order or range(count)):
        words |= values[at::count].astype(np.uint32) << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(words, 0, axis)).view(np.int32)


def _packed(
    bits: int, symmetric: bool, reordered: bool = False
) -> Callable[[np.ndarray], tuple[Tensors, Any]]:
    def stored(weight: np.ndarray) -> tuple[Tensors, Any]:
        groups = _groups(weight.shape[1], reordered)
        values, zeros, scales = grouped(weight, bits, symmetric, groups)
        tensors = {
            "weight_packed": in_words(values, bits, 1),
            "weight_scale": scales.astype(np.float16),
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = in_words(zeros, bits, 0)
        if reordered:
            tensors["weight_g_idx"] = groups.astype(np.int32)
        return tensors, (values - zeros[:, groups]) * scales[:, groups]

    return stored


def _awq(weight: np.ndarray) -> tuple[Tensors, Any]:
    groups = np.arange(weight.shape[1]) // GROUP
    values, zeros, scales = grouped(weight, 4, False, groups)
    tensors = {
        "qweight": in_words(values.T, 4, 1, _AWQ_ORDER),
        "qzeros": in_words(zeros.T, 4, 1, _AWQ_ORDER),
        "scales": np.ascontiguousarray(scales.T).astype(np.float16),
    }
    return tensors, (values - zeros[:, groups]) * scales[:, groups]


def _gptq(
    bits: int, symmetric: bool, reordered: bool = False, less: int = 1
) -> Callable[[np.ndarray], tuple[Tensors, Any]]:
    def stored(weight: np.ndarray) -> tuple[Tensors, Any]:
        groups = _groups(weight.shape[1], reordered)
        values, zeros, scales = grouped(weight, bits, symmetric, groups)
        tensors = {
            "qweight": in_words(values.T, bits, 0),
            "qzeros": in_words((zeros.T - less) % 2**bits, bits, 1),
            "scales": np.ascontiguousarray(scales.T).astype(np.float16),
            "g_idx": groups.astype(np.int32),
        }
        return tensors, (values - zeros[:, groups]) * scales[:, groups]

    return stored


def mxfp4(
    fused: Tensors, exponents: tuple[int, int] = (120, 124), seed: int = 0
) -> tuple[Tensors, Tensors]:
    """Tensors as gpt-oss is published, random ones with exponents in this range for those of
    `fused` experts, and the same with the values that they stand for."""
    rng = np.random.default_rng(seed)
    packed, plain = dict(fused), dict(fused)
    for name in [name for name in fused if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = fused[name].shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(*exponents, blocks.shape[:-1], np.uint8)
        packed |= {name + "_blocks": blocks, name + "_scales": scales}
        plain[name] = of_mxfp4(blocks, scales)
        del packed[name]
    return packed, plain


def of_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Float32 [experts, in, out] of blocks [experts, out, groups, 16] and their scales."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = np.where(codes > 7, -1.0, 1.0) * np.array(E2M1)[codes & 7]
    values *= 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    return np.float32(values).reshape(*blocks.shape[:2], -1).swapaxes(1, 2).copy()


def _of_compressed_tensors(format: str, strategy: str, **weights: Any) -> dict[str, Any]:
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    activations = None if format == "pack-quantized" else inputs
    scheme = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "symmetric": True, "strategy": strategy, **weights},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


def _gptq_config(bits: int, **fields: Any) -> dict[str, Any]:
    common = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False}
    return common | {"sym": True} | fields


_W4A16 = {"num_bits": 4, "type": "int", "group_size": GROUP}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": None}
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., tuple[Tensors, Any]]]] = {
    "fp8": (_FP8, _fp8_tensor),
    "fp8 in blocks": (_FP8 | {"weight_block_size": BLOCK, "fmt": "e4m3"}, _fp8_block),
    "compressed-tensors fp8": (
        _of_compressed_tensors("float-quantized", "tensor", type="float"),
        _fp8_tensor,
    ),
    "compressed-tensors fp8 of channels": (
        _of_compressed_tensors("float-quantized", "channel", type="float"),
        _fp8_channel,
    ),
    "compressed-tensors W8A8": (
        _of_compressed_tensors("int-quantized", "channel", type="int"),
        _int8,
    ),
    "compressed-tensors W4A16": (
        _of_compressed_tensors("pack-quantized", "group", **_W4A16),
        _packed(4, symmetric=True),
    ),
    "compressed-tensors W4A16 with zero points": (
        _of_compressed_tensors("pack-quantized", "group", **_W4A16 | {"symmetric": False}),
        _packed(4, symmetric=False),
    ),
    "compressed-tensors W4A16 in activation order": (
        _of_compressed_tensors("pack-quantized", "group", **_W4A16 | {"actorder": "group"}),
        _packed(4, symmetric=True, reordered=True),
    ),
    "awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
        _awq,
    ),
    "gptq": (_gptq_config(4), _gptq(4, symmetric=True)),
    "gptq with zero points": (_gptq_config(4, sym=False), _gptq(4, symmetric=False)),
    "gptq v2": (
        _gptq_config(4, sym=False, checkpoint_format="gptq_v2"),
        _gptq(4, symmetric=False, less=0),
    ),
    "gptq of 8 bits": (_gptq_config(8), _gptq(8, symmetric=True)),
    "gptq of 8 bits with zero points": (_gptq_config(8, sym=False), _gptq(8, symmetric=False)),
    "gptq in activation order": (
        _gptq_config(4, desc_act=True, sym=False),
        _gptq(4, symmetric=False, reordered=True),
    ),
    "gptq of 8 bits in activation order": (
        _gptq_config(8, desc_act=True),
        _gptq(8, symmetric=True, reordered=True),
    ),
}
"""The `quantization_config` of each, and what becomes of a weight [out, in]."""


def quantized(
    tensors: Tensors, name: str, linear: re.Pattern[str] = _LINEAR, **sizes: Any
) -> tuple[Tensors, Tensors]:
    """Tensors of a model as the format `name` stores them, of blocks of other `sizes`
    (`weight_block_size`), and those that they stand for."""
    stored, plain = dict(tensors), dict(tensors)
    for weight in filter(linear.fullmatch, tensors):
        parts, dequantized = FORMATS[name][1](tensors[weight].astype(np.float32), **sizes)
        del stored[weight]
        module = weight.removesuffix("weight")
        stored |= {module + last: np.ascontiguousarray(part) for last, part in parts.items()}
        plain[weight] = dequantized.astype(np.float32)
    return stored, plain


def write(
    directory: Path, config: dict[str, Any], tensors: Tensors, name: str, **fields: Any
) -> tuple[Path, Path]:
    """The model in the format `name`, and one of the floats that its tensors stand for. `fields`
    are further ones of the `quantization_config`."""
    sizes = {field: fields[field] for field in fields if field == "weight_block_size"}
    stored, plain = quantized(tensors, name, **sizes)
    own = {"quantization_config": FORMATS[name][0] | fields}
    return (
        write_hf(directory / "quantized", config | own, stored),
        write_hf(directory / "plain", config, plain),
    )
