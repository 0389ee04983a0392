"""EAGLE's draft layers on disk: what is read, what is computed, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.core.errors import ConfigError, ModelError, UnsupportedModelError, WeightsError
from jaxserve.models.drafters import eagle
from jaxserve.models.loading.directory import CONFIG
from jaxserve.models.loading.drafters.eagle import WEIGHTS, EagleCheckpoint, save_layer
from jaxserve.models.loading.params import load_params
from jaxserve.training.dense import draft_states


@pytest.fixture
def directory(tmp_path, llama):
    config, rng = eagle.layer_for(llama.config), np.random.default_rng(0)
    specs = eagle.param_specs(config, biased=True)
    params = jax.tree.map(lambda spec: rng.normal(0, 0.3, spec.shape).astype(np.float32), specs)
    save_layer(tmp_path, config, params)
    return tmp_path


def rewrite(directory, **changes):
    """Replaces tensors, `name=None` takes one away."""
    tensors = load_file(directory / WEIGHTS) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / WEIGHTS)


def test_a_layer_follows_the_embedding_and_the_hidden_state(directory, llama):
    """Of a lone token attention gives its value; nothing is normed before it, nor at the end."""
    rewrite(directory, **{"embed_tokens.weight": np.zeros((256, 64), np.float32)})  # Not used.
    checkpoint = EagleCheckpoint.open(directory)
    config = checkpoint.config
    assert dataclasses.replace(config, rope=eagle.layer_for(llama.config).rope) == (
        eagle.layer_for(llama.config)
    )
    params = load_params(checkpoint, checkpoint.specs, dtype="float32")
    embedded, hidden = np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)
    tensors = load_file(directory / WEIGHTS)
    own = {
        name.removeprefix("layers.0.").removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
    }
    x = own["fc"] @ np.concatenate([embedded, hidden]) + own["fc.bias"]
    values = (own["self_attn.v_proj"] @ x).reshape(config.num_kv_heads, config.head_dim)
    x = x + own["self_attn.o_proj"] @ values.repeat(config.queries_per_kv, axis=0).reshape(-1)
    normed = x / np.sqrt(np.mean(x**2) + config.rms_norm_eps) * own["post_attention_layernorm"]
    gate = own["mlp.gate_proj"] @ normed
    gated = gate / (1 + np.exp(-gate)) * (own["mlp.up_proj"] @ normed)
    found = draft_states(config, params, embedded[None, None], hidden[None, None])
    assert np.asarray(found)[0, 0] == pytest.approx(x + own["mlp.down_proj"] @ gated, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_hidden_layers": 2}, UnsupportedModelError, "num_hidden_layers 2; only a draft of"),
        (
            {"architectures": ["Olmo2ForCausalLM"]},
            UnsupportedModelError,
            "architecture Olmo2ForCausalLM; a draft layer must be of the Llama family",
        ),
        ({"hidden_size": 32}, WeightsError, "fc.weight has shape"),
    ],
    ids=str,
)
def test_other_layers_are_refused_by_name(directory, changes, error, message):
    config = json.loads((directory / CONFIG).read_text()) | changes
    (directory / CONFIG).write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        EagleCheckpoint.open(directory)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fc.weight", "fc.weight is missing"),
        ("layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight is missing"),
        ("layers.0.input_layernorm.weight", "input_layernorm.weight is not used by the model"),
    ],
)
def test_tensors_must_be_those_of_a_layer(directory, name, message):
    rewrite(directory, **{name: np.ones(64, np.float32) if "input" in name else None})
    with pytest.raises(WeightsError, match=message):
        EagleCheckpoint.open(directory)


def test_a_layer_of_another_model_is_refused(directory, llama):
    drafts = {"method": "eagle", "model": str(directory), "num_speculative_tokens": 2}
    raw = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(raw | {"vocab_size": 250}))
    with pytest.raises(ConfigError, match="vocab_size of 250, and the model of 256; train one"):
        llama.load(speculative_config=drafts)
    (directory / CONFIG).write_text(json.dumps(raw | {"max_position_embeddings": 100}))
    with pytest.raises(ConfigError, match=r"max_model_len is 128, but .* 100 tokens; set"):
        llama.load(speculative_config=drafts)
    other = dataclasses.replace(eagle.layer_for(llama.config), hidden_size=32)
    specs = eagle.param_specs(other, biased=False)
    zeros = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), specs)
    save_layer(directory, other, zeros)
    with pytest.raises(ConfigError, match="hidden_size of 32, and the model of 64; train one"):
        llama.load(speculative_config=drafts)
    with pytest.raises(ModelError, match="there is no EAGLE draft layer in"):
        llama.load(speculative_config=drafts | {"model": str(directory / "absent")})
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds its weights as pickle"):
        llama.load(speculative_config=drafts)
    with pytest.raises(ConfigError, match="no model; give the directory of a draft layer"):
        llama.load(speculative_config=drafts | {"model": None})
