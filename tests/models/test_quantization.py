"""Weights that stay packed: what they mean, and what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ggml_blocks import random_blocks
from gguf import GGMLQuantizationType as Kind
from tiny_checkpoints import CONFIG, gguf_name, random_tensors, write_gguf, write_hf

from jaxserve.core.errors import ConfigError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.convert import convert
from jaxserve.models.loading.gguf.config import ARCHITECTURES
from jaxserve.models.loading.params import load_params, params_bytes
from jaxserve.models.quantization import FORMATS, with_formats
from jaxserve.models.registry import param_specs
from pallas_kernels.quantized_matmul import QuantizedWeight, dequantize, quantize

LINEAR = ("qkv", "attn_out", "gate_up", "down")


def load(path, quantization=None):
    checkpoint = open_checkpoint(path)
    specs = param_specs(checkpoint.config)
    specs = with_formats(specs, quantization, checkpoint.stored_format)
    params = load_params(checkpoint, specs, dtype="float32")
    size = sum(array.nbytes for array in jax.tree.leaves(params))
    assert size == params_bytes(specs, np.dtype(np.float32))
    abstract = jax.tree.map(lambda spec: spec.abstract(np.dtype(np.float32)), specs)
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    jax.tree.map(
        lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) or pytest.fail(f"{a} {b}"),
        abstract,
        params,
    )
    return params


def is_packed(param):
    return isinstance(param, QuantizedWeight)


def unpacked(params, shapes):
    """Every packed weight as the array of float32 that it means."""

    def unpack(param, shape):
        return dequantize(param).reshape(shape.shape) if is_packed(param) else param

    return jax.tree.map(unpack, params, shapes, is_leaf=is_packed)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3"])
def test_blocks_of_a_gguf_file_stay_as_they_are(tmp_path, kind, architecture):
    """To the last bit, with the rows of rotary heads put in order, those of fused tensors taken
    apart, embeddings and head too."""
    config = CONFIG | {"architectures": [ARCHITECTURES[architecture]]}
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, kind=kind, architecture=architecture)
    whole, packed = load(path), load(path, "gguf")
    assert all(is_packed(packed["layers"][0][name]) for name in LINEAR)
    assert is_packed(packed["embed"]) and is_packed(packed["lm_head"])
    jax.tree.map(np.testing.assert_array_equal, unpacked(packed, whole), whole)


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_blocks_that_llama_cpp_alone_writes(tmp_path, kind):
    config = CONFIG | {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 16,
        "num_hidden_layers": 1,
    }
    tensors = random_tensors(config)
    raw = {
        gguf_name(name): (random_blocks(kind.name, *tensor.shape), kind)
        for name, tensor in tensors.items()
        if tensor.ndim == 2
    }
    path = write_gguf(tmp_path / "m.gguf", config, tensors, raw=raw)
    whole, packed = load(path), load(path, "gguf")
    assert all(is_packed(packed["layers"][0][name]) for name in LINEAR)
    jax.tree.map(np.testing.assert_array_equal, unpacked(packed, whole), whole)


def test_parameters_of_several_kinds_are_unpacked(tmp_path):
    """Here keys are in other blocks than queries and values; norms are in none."""
    raw = {"blk.0.attn_k.weight": (random_blocks("Q8_0", 64, 64), Kind.Q8_0)}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), kind=Kind.Q4_1, raw=raw)
    packed = load(path, "gguf")
    assert not is_packed(packed["layers"][0]["qkv"])
    assert is_packed(packed["layers"][1]["qkv"])


@pytest.mark.parametrize("source", ["safetensors", "orbax", "dummy"])
@pytest.mark.parametrize("quantization", FORMATS)
def test_weights_are_rounded_as_they_load(tmp_path, quantization, source):
    """Those of layers; embeddings and head are what rounding harms most."""
    path = write_hf(tmp_path / "hf", CONFIG, random_tensors(CONFIG))
    if source == "orbax":
        path = convert(path, tmp_path / "orbax")
    checkpoint = open_checkpoint(path, "dummy" if source == "dummy" else "auto")
    specs = param_specs(checkpoint.config)
    whole = load_params(checkpoint, specs, dtype="float32")
    specs = with_formats(specs, quantization, checkpoint.stored_format)
    packed = load_params(checkpoint, specs, dtype="float32")
    assert not is_packed(packed["embed"]) and not is_packed(packed["lm_head"])
    for layer, before in zip(packed["layers"], whole["layers"]):
        assert {name for name, param in layer.items() if is_packed(param)} == set(LINEAR)
        for name in LINEAR:
            matrix = before[name].reshape(layer[name].shape)
            expected = jax.jit(quantize, static_argnums=1)(matrix, FORMATS[quantization])
            jax.tree.map(np.testing.assert_array_equal, layer[name], expected)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_the_file_may_be_packed_in_another_way(tmp_path, kind):
    """In the very format asked for, it stays as it is."""
    path = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), kind=kind)
    whole, packed = load(path), load(path, "int4")
    for layer, before in zip(packed["layers"], whole["layers"]):
        for name in LINEAR:
            expected = quantize(before[name].reshape(layer[name].shape), FORMATS["int4"])
            right = before[name] if kind == Kind.Q4_1 else dequantize(expected)
            found = dequantize(layer[name])
            np.testing.assert_allclose(found, right.reshape(found.shape), rtol=1e-6, atol=1e-6)


def test_what_cannot_be_packed_is_refused(tmp_path):
    config = CONFIG | {"hidden_size": 80}
    narrow = write_hf(tmp_path / "hf", config, random_tensors(config))
    with pytest.raises(ConfigError, match=r"gate_proj.weight cannot be quantized: 80 inputs"):
        load(narrow, "int4")
    with pytest.raises(ConfigError, match="no weights in blocks of Q8_0, Q4_0, Q4_1"):
        load(narrow, "gguf")
    plain = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), kind=Kind.F16)
    with pytest.raises(ConfigError, match="no weights in blocks"):
        load(plain, "gguf")


def test_several_devices_are_refused(tmp_path):
    checkpoint = open_checkpoint(write_hf(tmp_path / "hf", CONFIG, random_tensors(CONFIG)))
    specs = with_formats(param_specs(checkpoint.config), "int8", checkpoint.stored_format)

    class TwoDevices(jax.sharding.Sharding):
        device_set = frozenset({0, 1})

    shardings = jax.tree.map(lambda spec: TwoDevices(), specs)
    with pytest.raises(ConfigError, match="would be quantized on 2 devices"):
        load_params(checkpoint, specs, dtype="float32", shardings=shardings)
