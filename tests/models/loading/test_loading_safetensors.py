"""Hugging Face directories: what loads, and what is refused in which words."""

from __future__ import annotations

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from quantized_checkpoints import E2M1, mxfp4, of_mxfp4
from safetensors.numpy import save_file
from tiny_checkpoints import CONFIG, fused_experts, random_tensors, write_hf

from jaxserve.core.dtypes import default_dtype
from jaxserve.core.errors import ConfigError, ModelError, UnsupportedModelError, WeightsError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import load_params
from jaxserve.models.quantization import with_formats
from jaxserve.models.registry import param_specs


def load(path, dtype="float32", **kwargs):
    checkpoint = open_checkpoint(path)
    return load_params(checkpoint, param_specs(checkpoint.config), dtype=dtype, **kwargs)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_shards_become_parameters(tmp_path, architecture):
    config = CONFIG | {"architectures": [architecture]}
    tensors = random_tensors(config, ml_dtypes.bfloat16)
    params = load(write_hf(tmp_path, config, tensors, shards=2))
    layer = params["layers"][1]
    prefix = "model.layers.1.self_attn."
    for group in range(2):
        head = np.asarray(layer["qkv"])[3, group]
        expected = tensors[prefix + "q_proj.weight"][(3 * 2 + group) * 16 :][:16]
        np.testing.assert_array_equal(head, expected.astype(np.float32))
    np.testing.assert_array_equal(
        np.asarray(layer["qkv"])[1, 3], tensors[prefix + "v_proj.weight"][16:32].astype(np.float32)
    )
    np.testing.assert_array_equal(
        np.asarray(layer["attn_out"]).reshape(64, 128),
        tensors[prefix + "o_proj.weight"].astype(np.float32),
    )
    np.testing.assert_array_equal(
        np.asarray(params["lm_head"]), tensors["lm_head.weight"].astype(np.float32)
    )
    if architecture == "Qwen2ForCausalLM":
        expected = tensors[prefix + "k_proj.bias"].astype(np.float32).reshape(4, 16)
        np.testing.assert_array_equal(np.asarray(layer["qkv_bias"])[:, 2], expected)
    if architecture == "Qwen3ForCausalLM":
        expected = tensors[prefix + "k_norm.weight"].astype(np.float32)
        np.testing.assert_array_equal(layer["k_norm"], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_and_progress(tmp_path, dtype):
    tensors = random_tensors(CONFIG)
    calls = []
    params = load(
        write_hf(tmp_path, CONFIG, tensors), dtype, progress=lambda *done: calls.append(done)
    )
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}
    np.testing.assert_array_equal(
        np.asarray(params["embed"]),
        tensors["model.embed_tokens.weight"].astype(params["embed"].dtype),
    )
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert max(calls) == (total, total)


def test_unknown_dtype(tmp_path):
    with pytest.raises(ConfigError, match="'int8' is not one of float32, bfloat16, float16"):
        load(write_hf(tmp_path, CONFIG, random_tensors(CONFIG)), "int8")


def test_default_dtype():
    assert default_dtype("cpu") == "float32"
    assert default_dtype("gpu") == default_dtype("tpu") == "bfloat16"


def test_generation_config_wins(tmp_path):
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG))
    generation = {"eos_token_id": [7, 9], "temperature": 0.6, "top_k": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = open_checkpoint(tmp_path).config
    assert config.eos_token_ids == (7, 9)
    assert config.default_sampling == (("temperature", 0.6),)
    assert open_checkpoint(tmp_path).tokenizer().encode("ab") != []


def test_tied_embeddings_may_be_stored_twice(tmp_path):
    tensors = random_tensors(CONFIG)
    write_hf(tmp_path, CONFIG | {"tie_word_embeddings": True}, tensors)
    assert "lm_head" not in load(tmp_path)


def test_fingerprint_follows_the_files(tmp_path):
    tensors = random_tensors(CONFIG)
    first = open_checkpoint(write_hf(tmp_path, CONFIG, tensors)).fingerprint
    assert open_checkpoint(tmp_path).fingerprint == first
    save_file({n: -t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).fingerprint != first


GPT_OSS = CONFIG | {
    "architectures": ["GptOssForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


def mxfp4_tensors(seed=0):
    """Tensors as gpt-oss is published, and the same with the values that they stand for, of which
    some are float32's subnormals, and its largest."""
    packed, plain = mxfp4(fused_experts(random_tensors(GPT_OSS)), (100, 140), seed)
    for name in [name for name in plain if name + "_blocks" in packed]:
        blocks, scales = packed[name + "_blocks"], packed[name + "_scales"]
        scales[0, 0, 0], scales[0, 0, 1] = 0, 254
        blocks[0, 0, 1] &= 0x33
        plain[name] = of_mxfp4(blocks, scales)
    return packed, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_is_exact(tmp_path, dtype):
    packed, plain = mxfp4_tensors()
    ours = load(write_hf(tmp_path / "packed", GPT_OSS, packed), dtype)
    theirs = load(write_hf(tmp_path / "plain", GPT_OSS, plain), "float32")
    for p, expected in zip(ours["layers"], theirs["layers"], strict=True):
        for name in ("experts_gate_up", "experts_down"):
            np.testing.assert_array_equal(np.asarray(p[name], np.float32), expected[name])
    of_first = packed["model.layers.0.mlp.experts.gate_up_proj_blocks"][0, 2, 0]
    sign, low = of_first[0] & 8, E2M1[of_first[0] & 7]
    scale = packed["model.layers.0.mlp.experts.gate_up_proj_scales"][0, 2, 0]
    # Row 2 of the tensor is row 1 of the first expert's gate.
    assert ours["layers"][0]["experts_gate_up"][0, 1, 0] == (-low if sign else low) * 2.0 ** (
        int(scale) - 127
    )


def test_mxfp4_may_stay_as_it_is(tmp_path):
    """In formats whose values are those of the file, of a byte a weight and two a group of 32."""
    packed, _ = mxfp4_tensors()
    checkpoint = open_checkpoint(write_hf(tmp_path, GPT_OSS, packed))
    specs = with_formats(
        param_specs(checkpoint.config),
        "mxfp4",
        checkpoint.stored_format,
        checkpoint.quantization,
    )
    kept, whole = load_params(checkpoint, specs, dtype="float32"), load(tmp_path)
    for p, expected in zip(kept["layers"], whole["layers"], strict=True):
        for name, array in expected.items():
            if name in ("experts_gate_up", "experts_down"):
                scales, values = np.asarray(p[name].scales, np.float32), np.asarray(p[name].values)
                found = values.astype(np.float32).reshape(*scales.shape, 32) * scales[..., None]
                np.testing.assert_array_equal(found.reshape(array.shape), array)
                assert p[name].values.nbytes == 16 * p[name].scales.nbytes == array.size
            else:
                np.testing.assert_array_equal(p[name], array)


@pytest.mark.peers
def test_mxfp4_as_transformers_reads_it():
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    packed, plain = mxfp4_tensors(seed=1)
    for name in [name for name in plain if name + "_blocks" in packed]:
        planes = (torch.from_numpy(packed[name + end]) for end in ("_blocks", "_scales"))
        theirs = mxfp4.convert_moe_packed_tensors(*planes, dtype=torch.float32)
        np.testing.assert_array_equal(plain[name], theirs.numpy())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda name, packed: packed.pop(name + "_scales"), "has no scales: .*_scales is missing"),
        (
            lambda name, packed: packed.update({name + "_scales": packed[name + "_scales"][:, :8]}),
            r"shape \[4, 64, 3, 16\] and its scales \[4, 8, 3\]",
        ),
        (
            lambda name, packed: packed.update({name + "_blocks": np.zeros((4, 64, 3, 16), "f4")}),
            "down_proj_blocks is F32; MXFP4 is stored as U8",
        ),
        (lambda name, packed: packed[name + "_scales"].fill(255), "scale is 255"),
        (
            lambda name, packed: packed.update(
                {name + end: packed[name + end][:3] for end in ("_blocks", "_scales")}
            ),
            r"down_proj.weight has shape \[3, 64, 96\]; the config implies \[64, 96\]",
        ),
        (lambda name, packed: packed.update({"extra_blocks": np.zeros(1, "u1")}), "extra_blocks"),
    ],
)
def test_mxfp4_that_does_not_fit_together(tmp_path, change, message):
    packed, _ = mxfp4_tensors()
    change("model.layers.1.mlp.experts.down_proj", packed)
    with pytest.raises(WeightsError, match=message):
        load(write_hf(tmp_path, GPT_OSS, packed))


def test_missing_shard(tmp_path):
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG), shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        WeightsError, match=r"names model-00002-of-00002\.safetensors, which is not"
    ):
        open_checkpoint(tmp_path)


def test_corrupt_index(tmp_path):
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text('{"weights": []}')
    with pytest.raises(WeightsError, match="is not an index"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_truncated_file(tmp_path, keep):
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG))
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep) if keep == 0.5 else keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated or corrupt"):
        open_checkpoint(tmp_path)


def test_config_that_does_not_match(tmp_path):
    write_hf(tmp_path, CONFIG | {"intermediate_size": 128}, random_tensors(CONFIG))
    with pytest.raises(WeightsError, match=r"mlp\.gate_proj\.weight has shape \[96, 64\]"):
        open_checkpoint(tmp_path)


def test_layers_the_config_does_not_know(tmp_path):
    write_hf(tmp_path, CONFIG | {"num_hidden_layers": 1}, random_tensors(CONFIG))
    with pytest.raises(WeightsError, match=r"model\.layers\.1\..* is not used by the model"):
        open_checkpoint(tmp_path)


def test_weights_that_are_not_floating_point(tmp_path):
    tensors = random_tensors(CONFIG)
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    write_hf(tmp_path, CONFIG, tensors)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is I8"):
        open_checkpoint(tmp_path)


def test_unknown_architecture(tmp_path):
    write_hf(tmp_path, CONFIG | {"architectures": ["GPT2LMHeadModel"]}, random_tensors(CONFIG))
    with pytest.raises(UnsupportedModelError, match=r"'GPT2LMHeadModel'.*LlamaForCausalLM"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "config.json is not valid JSON"),
        ("[]", "holds a list"),
        ("{}", "names no architecture"),
    ],
)
def test_malformed_config(tmp_path, content, message):
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG))
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)


def test_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(WeightsError, match="no safetensors files"):
        open_checkpoint(tmp_path)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    pickle = tmp_path / "pytorch_model.bin"
    pickle.write_bytes(b"\x80\x04.")
    for path in (tmp_path, pickle):
        with pytest.raises(ModelError, match=r"pickle.*never read"):
            open_checkpoint(path)


@pytest.mark.parametrize("name", ["absent.gguf", "not a model", "/nowhere/at/all"])
def test_nothing_there(name):
    with pytest.raises(
        ModelError, match=r"no file or directory .*a model is 'smollm2-135m-instruct'"
    ):
        open_checkpoint(name)


def test_a_directory_without_a_model(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelError, match=r"has no config\.json \(it holds \['notes\.txt'\]\)"):
        open_checkpoint(tmp_path)


def test_a_hub_model_without_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="'org/no-such-model' is not a local path, and it"):
        open_checkpoint("org/no-such-model")


def test_unknown_load_format(tmp_path):
    with pytest.raises(ConfigError, match="'pickle' is not one of 'auto', 'dummy'"):
        open_checkpoint(tmp_path, "pickle")
