"""GGUF: the same parameters as the model it was converted from, and every refusal."""

from __future__ import annotations

import struct

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from ggml_blocks import BLOCKS, decode, random_blocks
from gguf import GGMLQuantizationType as Kind
from tiny_checkpoints import (
    CONFIG,
    fused_experts,
    of_experts,
    random_tensors,
    write_gguf,
    write_hf,
)

from jaxserve.core.errors import UnsupportedModelError, WeightsError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.gguf.header import read_gguf
from jaxserve.models.loading.params import load_params
from jaxserve.models.quantization import with_formats
from jaxserve.models.registry import param_specs
from jaxserve.runtime.hardware.devices import DescribedDevice
from jaxserve.runtime.startup.engine_plan import plan_described
from pallas_kernels.quantized_matmul import MXFP4, dequantize

WIDE = CONFIG | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


GGUF_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Fields of a config by their keys in a GGUF."""


def load(path, dtype="float32"):
    checkpoint = open_checkpoint(path)
    return load_params(checkpoint, param_specs(checkpoint.config), dtype=dtype)


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize(
    "architecture, hf",
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("smollm3", "SmolLM3ForCausalLM"),
    ],
)
def test_the_same_model_as_the_hugging_face_directory(tmp_path, architecture, hf):
    config = CONFIG | {"architectures": [hf]}
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, architecture=architecture)
    check_same(path, write_hf(tmp_path / "hf", config, tensors))


def check_same(path, directory):
    assert_equal(load(path), load(directory))
    ours, theirs = open_checkpoint(path).config, open_checkpoint(directory).config
    different = {"name", "rms_norm_eps"}  # float32 in a GGUF, and the name of the file
    for field in vars(theirs).keys() - different:
        assert getattr(ours, field) == getattr(theirs, field), field


def test_olmo_2(tmp_path):
    """Norms of outputs, and of queries and keys over all heads."""
    config = CONFIG | {"architectures": ["Olmo2ForCausalLM"]}
    tensors = {
        name.replace("input_layernorm", "post_feedforward_layernorm"): tensor
        for name, tensor in random_tensors(config).items()
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn."
        for name in ("q", "k"):
            size = len(tensors[f"{prefix}{name}_proj.weight"])
            tensors[f"{prefix}{name}_norm.weight"] = np.linspace(0.5, 1.5, size, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, architecture="olmo2")
    check_same(path, write_hf(tmp_path / "hf", config, tensors))


def gemma(hf, **fields):
    """A config and tensors whose norms are exact with and without a one added."""
    config = CONFIG | {"architectures": [hf], "query_pre_attn_scalar": CONFIG["head_dim"]} | fields
    config["tie_word_embeddings"] = True
    tensors = {
        name: np.round(tensor * 256) / 256 if tensor.ndim == 1 else tensor
        for name, tensor in random_tensors(config).items()
    }
    return config, tensors


def test_gemma_2(tmp_path):
    caps = {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}
    config, tensors = gemma("Gemma2ForCausalLM", sliding_window=9, **caps)
    keys = {"gemma2.attention.sliding_window": 9} | {f"gemma2.{k}": v for k, v in caps.items()}
    path = write_gguf(tmp_path / "m.gguf", config, tensors, architecture="gemma2", metadata=keys)
    check_same(path, write_hf(tmp_path / "hf", config, tensors))


def test_gemma_3(tmp_path):
    rope = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config, tensors = gemma("Gemma3ForCausalLM", sliding_window=9, **rope)
    keys = {
        "gemma3.attention.sliding_window": 9,
        "gemma3.rope.freq_base_swa": 500.0,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    path = write_gguf(tmp_path / "m.gguf", config, tensors, architecture="gemma3", metadata=keys)
    check_same(path, write_hf(tmp_path / "hf", config, tensors))


def test_gemma_of_27b_scales_scores_by_its_hidden_size(tmp_path):
    """llama.cpp's files do not say so; it knows the size by the number of layers."""
    config, _ = gemma("Gemma3ForCausalLM", num_hidden_layers=62, head_dim=4)
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, architecture="gemma3")
    assert open_checkpoint(path).config.query_pre_attn_scalar == 64 // 8


def test_phi_3(tmp_path):
    """Fused tensors stay fused, and lists of factors are tensors."""
    short, long = np.arange(1, 7, dtype=np.float32), np.arange(2, 8, dtype=np.float32)
    config = CONFIG | {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": 9,
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": short.tolist(),
            "long_factor": long.tolist(),
            "attention_factor": 1.25,
        },
    }
    keys = {
        "phi3.attention.sliding_window": 9,
        "phi3.rope.dimension_count": 12,
        "phi3.rope.scaling.original_context_length": 32,
        "phi3.rope.scaling.attn_factor": 1.25,
    }
    raw = {
        "rope_factors_short.weight": (short, Kind.F32),
        "rope_factors_long.weight": (long, Kind.F32),
    }
    tensors = random_tensors(config)
    path = write_gguf(
        tmp_path / "m.gguf", config, tensors, architecture="phi3", metadata=keys, raw=raw
    )
    check_same(path, write_hf(tmp_path / "hf", config, tensors))
    del raw["rope_factors_short.weight"]
    path = write_gguf(
        tmp_path / "n.gguf", config, tensors, architecture="phi3", metadata=keys, raw=raw
    )
    with pytest.raises(WeightsError, match=r"rope_factors_short\.weight is missing"):
        open_checkpoint(path)


def test_phi_4_has_no_window(tmp_path):
    config = CONFIG | {"architectures": ["Phi3ForCausalLM"]}
    keys = {"phi3.attention.sliding_window": 0}
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, architecture="phi3", metadata=keys)
    assert open_checkpoint(path).config.sliding_windows == (None, None)


@pytest.mark.parametrize(
    "architecture, hf",
    [
        ("llama", "MixtralForCausalLM"),
        ("olmoe", "OlmoeForCausalLM"),
        ("qwen2moe", "Qwen2MoeForCausalLM"),
        ("qwen3moe", "Qwen3MoeForCausalLM"),
    ],
)
def test_experts_in_one_tensor(tmp_path, architecture, hf):
    """Those of the Hugging Face directory, and packed as they are in the file."""
    config = CONFIG | of_experts(hf) | ({"norm_topk_prob": True} if hf[:5] == "Qwen3" else {})
    tensors = random_tensors(config)
    metadata = {
        f"{architecture}.{key}": config[name] for key, name in GGUF_MOE.items() if name in config
    }
    path = write_gguf(
        tmp_path / "m.gguf", config, tensors, architecture=architecture, metadata=metadata
    )
    directory = write_hf(tmp_path / "hf", config, tensors)
    assert_equal(load(path), load(directory))
    ours, theirs = open_checkpoint(path).config, open_checkpoint(directory).config
    assert ours.architecture == hf
    assert ours.moe == theirs.moe

    packed = write_gguf(
        tmp_path / "packed.gguf",
        config,
        tensors,
        architecture=architecture,
        metadata=metadata,
        kind=Kind.Q8_0,
    )
    checkpoint = open_checkpoint(packed)
    specs = with_formats(param_specs(checkpoint.config), "gguf", checkpoint.stored_format)
    kept, unpacked = load_params(checkpoint, specs, dtype="float32")["layers"][0], load(packed)
    for name in ("experts_gate_up", "experts_down"):
        expected = unpacked["layers"][0][name]
        found = dequantize(kept[name]).reshape(expected.shape)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.MXFP4])
def test_gpt_oss(tmp_path, kind):
    """Experts in one tensor there, gate and up in turn here; in MXFP4 the values of its blocks."""
    config = CONFIG | {
        "architectures": ["GptOssForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    }
    keys = {
        "attention.sliding_window": 9,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    metadata = {f"gpt-oss.{key}": value for key, value in keys.items()}
    tensors = random_tensors(config)
    path = write_gguf(
        tmp_path / "m.gguf", config, tensors, architecture="gpt-oss", metadata=metadata, kind=kind
    )
    rounded = {
        name: gguf.dequantize(gguf.quantize(tensor, kind), kind) if tensor.ndim > 1 else tensor
        for name, tensor in tensors.items()
    }
    check_same(path, write_hf(tmp_path / "hf", config, fused_experts(rounded)))
    if kind is Kind.MXFP4:
        checkpoint, whole = open_checkpoint(path), load(path)
        specs = with_formats(param_specs(checkpoint.config), "mxfp4", checkpoint.stored_format)
        kept = load_params(checkpoint, specs, dtype="float32")
        for name in ("embed", "lm_head"):
            np.testing.assert_array_equal(dequantize(kept[name]), whole[name])
        device = DescribedDevice("tpu", "TPU v5 lite", 1 << 34)
        planned = plan_described(EngineConfig(path, quantization="mxfp4"), device)
        assert planned.shapes.specs["layers"][0]["experts_down"].format == MXFP4
        for p, expected in zip(kept["layers"], whole["layers"], strict=True):
            for name in ("experts_gate_up", "experts_down"):
                found = dequantize(p[name]).reshape(expected[name].shape)
                np.testing.assert_array_equal(found, expected[name])


def test_other_experts_than_the_config_says(tmp_path):
    config = CONFIG | of_experts("MixtralForCausalLM")
    metadata = {"llama.expert_count": 3, "llama.expert_used_count": 2}
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), metadata=metadata)
    with pytest.raises(WeightsError, match=r"shape \[4, 64, 96\]; the config implies \[64, 96\]"):
        open_checkpoint(path)


def test_experts_of_an_architecture_that_has_none(tmp_path):
    metadata = {"qwen3.expert_count": 4, "qwen3.expert_used_count": 2}
    path = write_gguf(
        tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), architecture="qwen3", metadata=metadata
    )
    with pytest.raises(UnsupportedModelError, match="expert_count 4 is not implemented"):
        open_checkpoint(path)


def test_keys_that_change_what_is_computed(tmp_path):
    neutral = {"llama.logit_scale": 1.0, "llama.attention.causal": True, "llama.swin_norm": False}
    neutral |= {"llama.expert_used_count": 0, "llama.tensor_data_layout": "Meta AI original pth"}
    tensors = random_tensors(CONFIG)
    open_checkpoint(write_gguf(tmp_path / "m.gguf", CONFIG, tensors, metadata=neutral))
    for key, value in (
        ("logit_scale", 0.5),
        ("embedding_scale", 12.0),
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
    ):
        path = tmp_path / f"{key}.gguf"
        write_gguf(path, CONFIG, tensors, metadata=neutral | {f"llama.{key}": value})
        with pytest.raises(UnsupportedModelError, match=f"llama.{key} {value} is not implemented"):
            open_checkpoint(path)


@pytest.mark.parametrize("kind, dtype", [(Kind.F16, np.float16), (Kind.BF16, ml_dtypes.bfloat16)])
def test_sixteen_bit_weights(tmp_path, kind, dtype):
    tensors = random_tensors(CONFIG)
    rounded = {n: t.astype(dtype) if t.ndim == 2 else t for n, t in tensors.items()}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, kind=kind)
    assert_equal(load(path), load(write_hf(tmp_path / "hf", CONFIG, rounded)))


@pytest.mark.parametrize("name", BLOCKS)
def test_every_quantisation_against_its_definition(tmp_path, name):
    blocks = random_blocks(name, 256, 256)
    raw = {"blk.0.ffn_up.weight": (blocks, Kind[name])}
    path = write_gguf(tmp_path / "m.gguf", WIDE, random_tensors(WIDE), raw=raw)
    rows, columns = slice(3, 11), slice(32, 250)
    got = open_checkpoint(path).read("model.layers.0.mlp.up_proj.weight", (rows, columns))
    expected = decode(name, blocks[rows])[:, columns]
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("rows", [slice(0, 128), slice(20, 21), slice(7, 90)])
def test_interleaved_rows_by_slice(tmp_path, rows):
    tensors = random_tensors(CONFIG)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", CONFIG, tensors))
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(
        checkpoint.read(name, (rows, slice(1, 9))), tensors[name][rows, 1:9]
    )


def test_split_files(tmp_path):
    tensors = random_tensors(CONFIG)
    whole = write_gguf(tmp_path / "whole.gguf", CONFIG, tensors)
    write_gguf(tmp_path / "m", CONFIG, tensors, split_tensors=9)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    assert_equal(load(parts[1]), load(whole))
    parts[2].unlink()
    with pytest.raises(WeightsError, match=r"one of 3 files; .*00003-of-00003\.gguf is missing"):
        open_checkpoint(parts[0])


def test_tied_embeddings(tmp_path):
    tensors = random_tensors(CONFIG)
    del tensors["lm_head.weight"]
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors)
    assert open_checkpoint(path).config.tie_word_embeddings
    assert "lm_head" not in load(path)


def test_rope_scalings(tmp_path):
    tensors = random_tensors(CONFIG)
    factors = np.array([1, 1, 1.5, 2, 4, 8, 8, 8], np.float32)
    raw = {"rope_freqs.weight": (factors, Kind.F32)}
    rope = open_checkpoint(write_gguf(tmp_path / "a.gguf", CONFIG, tensors, raw=raw)).config.rope
    assert rope.kind == "longrope" and rope.attention_factor == 1.0
    assert rope.short_factor == rope.long_factor == tuple(factors.tolist())
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    path = write_gguf(tmp_path / "b.gguf", CONFIG, tensors, metadata=keys)
    rope = open_checkpoint(path).config.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
    keys["llama.rope.scaling.type"] = "su"
    path = write_gguf(tmp_path / "c.gguf", CONFIG, tensors, metadata=keys)
    with pytest.raises(UnsupportedModelError, match="rope scaling 'su'"):
        open_checkpoint(path)


def test_sampling_defaults(tmp_path):
    keys = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), metadata=keys)
    assert open_checkpoint(path).config.default_sampling == (("temperature", 0.5), ("top_k", 20))


def test_metadata_equals_the_librarys(tmp_path):
    keys = {"x.float": 1.5, "x.text": "é", "x.int": 7}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), metadata=keys)
    reader = gguf.GGUFReader(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert read_gguf(path).metadata == theirs


def test_truncated_anywhere(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 23, 30, 100, 500, 3_000, 8_000, len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"cut\.gguf is (truncated|too short)"):
            open_checkpoint(cut)


def test_absurd_lengths_in_the_header(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG))
    whole = path.read_bytes()
    for at in (8, 16, 24):  # tensors, fields, length of the first key
        path.write_bytes(whole[:at] + struct.pack("<Q", 2**63 + 1) + whole[at + 8 :])
        with pytest.raises(WeightsError, match="truncated or corrupt in its header"):
            open_checkpoint(path)


def test_not_a_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK" + bytes(100))
    with pytest.raises(WeightsError, match="it is not a GGUF file"):
        open_checkpoint(path)


def test_unknown_version(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG))
    path.write_bytes(b"GGUF" + struct.pack("<I", 9) + path.read_bytes()[8:])
    with pytest.raises(UnsupportedModelError, match="GGUF version 9"):
        open_checkpoint(path)


def test_unreadable_quantisation(tmp_path):
    raw = {"blk.0.ffn_up.weight": (np.zeros((256, 66), np.uint8), Kind.IQ2_XXS)}
    path = write_gguf(tmp_path / "m.gguf", WIDE, random_tensors(WIDE), raw=raw)
    with pytest.raises(UnsupportedModelError, match=r"ffn_up\.weight is quantised as IQ2_XXS"):
        open_checkpoint(path)


def test_unknown_architecture(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError, match="'mamba' is not implemented; known are deepseek2, gemma2, "
    ):
        open_checkpoint(path)


def test_metadata_that_does_not_match(tmp_path):
    wrong = CONFIG | {"intermediate_size": 128}
    path = write_gguf(tmp_path / "m.gguf", wrong, random_tensors(CONFIG))
    with pytest.raises(WeightsError, match=r"gate_proj\.weight has shape \[96, 64\]"):
        open_checkpoint(path)


def test_a_tensor_without_a_place(tmp_path):
    raw = {"blk.0.attn_q.bias": (np.zeros(128, np.float32), Kind.F32)}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), raw=raw)
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_q\.bias is not used by the model"):
        open_checkpoint(path)
