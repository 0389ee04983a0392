"""Any slice of a packed parameter is that slice of the whole, from every kind of file."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from ggml_blocks import random_blocks
from gguf import GGMLQuantizationType as Kind
from quantized_checkpoints import FORMATS, mxfp4, write
from tiny_checkpoints import CONFIG, fused_experts, gguf_name, random_tensors, write_gguf, write_hf

from jaxserve.models.loading import packed
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.packed import assemble_packed
from jaxserve.models.quantization import with_formats
from jaxserve.models.registry import param_specs
from pallas_kernels.quantized_matmul import dequantize

WIDE = CONFIG | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_hidden_layers": 1,
}
GPT_OSS = CONFIG | {
    "architectures": ["GptOssForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "quantization_config": {"quant_method": "mxfp4"},
}


def written(directory, name):
    if name in FORMATS:
        return write(directory, CONFIG, random_tensors(CONFIG), name)[0]
    if name == "mxfp4":
        return write_hf(directory, GPT_OSS, mxfp4(fused_experts(random_tensors(GPT_OSS)))[0])
    tensors, kind = random_tensors(WIDE), Kind[name]
    raw = {
        gguf_name(key): (random_blocks(name, *tensor.shape), kind)
        for key, tensor in tensors.items()
        if tensor.ndim == 2
    }
    return write_gguf(directory / "m.gguf", WIDE, tensors, raw=raw)


@pytest.mark.parametrize("name", [*FORMATS, "mxfp4", "Q4_1", "Q4_K", "Q6_K"])
def test_any_slice(tmp_path, monkeypatch, name):
    """Of a few rows at a time, and of groups smaller than the stored ones."""
    checkpoint = open_checkpoint(written(tmp_path, name))
    method = checkpoint.quantization
    specs = with_formats(
        param_specs(checkpoint.config), method or "gguf", checkpoint.stored_format, method
    )
    packed_specs = [spec for spec in jax.tree.leaves(specs["layers"][0]) if spec.format]
    assert packed_specs
    rng = np.random.default_rng(0)
    for spec in packed_specs:
        sizes, num_inputs = spec.shape[: -spec.num_inputs], spec.matrix[1]
        everything = tuple(slice(0, size) for size in sizes)
        whole = assemble_packed(checkpoint, spec, everything, slice(0, num_inputs))
        group = spec.format.group_size
        if group and spec.format.values != "int4" and not spec.format.ordered:
            group //= 2
            spec = dataclasses.replace(
                spec, format=dataclasses.replace(spec.format, group_size=group)
            )
        unit = group or (num_inputs if spec.format.minimum else 32)
        monkeypatch.setattr(packed, "_VALUES_AT_ONCE", 8 * num_inputs)
        for _ in range(4):
            rows = tuple(some(rng, size) for size in sizes)
            inputs = some(rng, num_inputs // unit)
            inputs = slice(inputs.start * unit, inputs.stop * unit)
            part = assemble_packed(checkpoint, spec, rows, inputs)
            if spec.format.ordered:
                assert_same_columns(part, whole, rows, inputs)
                continue
            found = np.asarray(dequantize(flat(part))).reshape(*part.values.shape[:-1], -1)
            expected = np.asarray(dequantize(flat(whole))).reshape(*sizes, -1)[(*rows, inputs)]
            np.testing.assert_array_equal(found, expected)


def some(rng, size):
    start = int(rng.integers(size))
    return slice(start, int(rng.integers(start, size)) + 1)


def flat(weight):
    return jax.tree.map(lambda plane: plane.reshape(-1, plane.shape[-1]), weight)


def assert_same_columns(part, whole, rows, inputs):
    """Of an order, which goes with its columns."""
    num_inputs = whole.order.shape[-1]
    for plane, of_whole in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
        columns = of_whole.shape[-1]
        own = slice(inputs.start * columns // num_inputs, inputs.stop * columns // num_inputs)
        shown = tuple(
            bounds if size > 1 else slice(None) for bounds, size in zip(rows, of_whole.shape)
        )
        np.testing.assert_array_equal(plane, of_whole[(*shown, own)])
