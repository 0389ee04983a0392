"""Medusa heads on disk: what is read, and what is refused."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.core.errors import ConfigError, ModelError, UnsupportedModelError, WeightsError
from jaxserve.models.drafters import medusa
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.loading.drafters.medusa import CONFIG, WEIGHTS, MedusaCheckpoint, save_heads
from jaxserve.models.loading.params import load_params

HEADS = MedusaConfig(num_heads=2, num_layers=2, hidden_size=8, vocab_size=16)


@pytest.fixture
def directory(tmp_path):
    rng = np.random.default_rng(0)
    save_heads(tmp_path, HEADS, rng.normal(0, 0.5, (4, 8, 8)).astype(np.float32))
    return tmp_path


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_a_head_adds_its_blocks_one_after_another(directory, prefix):
    tensors = load_file(directory / WEIGHTS)
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    save_file(named, directory / WEIGHTS)
    checkpoint = MedusaCheckpoint.open(directory)
    assert checkpoint.config == HEADS
    params = load_params(checkpoint, medusa.param_specs(HEADS), dtype="float32")
    hidden = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)
    for head in range(2):
        expected = hidden
        for layer in range(2):
            expected = expected + silu(expected @ tensors[f"blocks.{head}.layers.{layer}.weight"].T)
        found = medusa.head(params, HEADS, jnp.int32(head), jnp.asarray(hidden))
        assert np.asarray(found) == pytest.approx(expected, abs=1e-5)


def test_other_weights_have_another_fingerprint(directory):
    before = MedusaCheckpoint.open(directory).fingerprint
    save_heads(directory, HEADS, np.zeros((4, 8, 8), np.float32))
    assert MedusaCheckpoint.open(directory).fingerprint != before


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "llama"}, ModelError, "model_type 'llama'; it must be 'medusa'"),
        ({"original_lm_head": False}, UnsupportedModelError, "original_lm_head False; only heads"),
        (
            {"truncated_vocab_size": 4},
            UnsupportedModelError,
            "truncated_vocab_size 4, which is not",
        ),
        ({"medusa_fc_bias": True}, UnsupportedModelError, "medusa_fc_bias True, which is not"),
        ({"num_heads": 0}, ModelError, "num_heads 0; it must be an integer of at least 1"),
        ({"num_heads": 3}, WeightsError, "blocks.2.layers.0.weight"),
        ({"hidden_size": 4}, WeightsError, "blocks.0.layers.0.weight"),
    ],
    ids=str,
)
def test_other_heads_are_refused_by_name(directory, changes, error, message):
    config = json.loads((directory / CONFIG).read_text()) | changes
    (directory / CONFIG).write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        MedusaCheckpoint.open(directory)


def test_heads_of_another_model_are_refused(directory, llama):
    drafts = {"method": "medusa", "model": str(directory), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="hidden_size of 8, and the model of 64"):
        llama.load(speculative_config=drafts)
    with pytest.raises(ModelError, match="there are no Medusa heads in"):
        llama.load(speculative_config=drafts | {"model": str(directory / "absent")})
    (directory / WEIGHTS).unlink()
    with pytest.raises(WeightsError, match=r"has a config\.json but no model\.safetensors"):
        llama.load(speculative_config=drafts)


def test_more_drafts_than_heads_are_refused(tmp_path, llama):
    fitting = MedusaConfig(1, 1, llama.config.hidden_size, llama.config.vocab_size)
    save_heads(tmp_path, fitting, np.zeros((1, 64, 64), np.float32))
    drafts = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="is 2, but there are 1 heads"):
        llama.load(speculative_config=drafts)
