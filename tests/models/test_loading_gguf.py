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
from tiny_checkpoints import CONFIG, random_tensors, write_gguf, write_hf

from jaxserve.core.errors import UnsupportedModelError, WeightsError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.gguf_header import read_gguf
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import param_specs

WIDE = CONFIG | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


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
    directory = write_hf(tmp_path / "hf", config, tensors)
    assert_equal(load(path), load(directory))
    ours, theirs = open_checkpoint(path).config, open_checkpoint(directory).config
    different = {"name", "rms_norm_eps"}  # float32 in a GGUF, and the name of the file
    for field in vars(theirs).keys() - different:
        assert getattr(ours, field) == getattr(theirs, field), field


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
    with pytest.raises(UnsupportedModelError, match="'mamba' is not implemented; known are llama"):
        open_checkpoint(path)


def test_mixture_of_experts(tmp_path):
    keys = {"llama.expert_count": 8}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), metadata=keys)
    with pytest.raises(UnsupportedModelError, match="mixtures of experts"):
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
