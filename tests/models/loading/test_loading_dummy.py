"""Random weights of a model that one only has the config of."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from tiny_checkpoints import CONFIG, random_tensors, write_gguf, write_tokenizer

from jaxserve.core.errors import ModelError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import param_specs


@pytest.fixture
def config_only(tmp_path):
    config = CONFIG | {"architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def draw(path, seed=0):
    checkpoint = open_checkpoint(path, "dummy", seed=seed)
    return load_params(checkpoint, param_specs(checkpoint.config), dtype="float32")


def test_distribution(config_only):
    params = draw(config_only)
    embed, layers = np.asarray(params["embed"]), params["layers"]
    assert embed.std() == pytest.approx(0.02, rel=0.05) and abs(embed.mean()) < 1e-3
    assert (np.asarray(params["final_norm"]) == 1).all()
    assert (np.asarray(layers[0]["qkv_bias"]) == 0).all()
    assert not np.array_equal(layers[0]["down"], layers[1]["down"])


def test_the_seed_decides(config_only):
    first, again = draw(config_only, 3), draw(config_only / "config.json", 3)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embed"], draw(config_only, 4)["embed"])


def test_config_of_a_gguf(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG))
    assert draw(path)["layers"][0]["down"].shape == (64, 96)


def test_fingerprint_follows_the_seed(config_only):
    prints = {open_checkpoint(config_only, "dummy", seed=seed).fingerprint for seed in (0, 0, 1)}
    assert len(prints) == 2


def test_the_tokenizer_is_optional(config_only):
    checkpoint = open_checkpoint(config_only, "dummy")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        checkpoint.tokenizer()
    write_tokenizer(config_only)
    assert len(checkpoint.tokenizer().encode("abc")) == 3
