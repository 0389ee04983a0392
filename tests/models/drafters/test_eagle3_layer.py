"""EAGLE-3's draft layers on disk: what is read, what is computed, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.core.errors import ConfigError, ModelError, UnsupportedModelError, WeightsError
from jaxserve.core.model_config import ModelConfig
from jaxserve.models.drafters import eagle3
from jaxserve.models.drafters.eagle3 import Eagle3Config
from jaxserve.models.loading.directory import CONFIG
from jaxserve.models.loading.drafters.eagle import WEIGHTS
from jaxserve.models.loading.drafters.eagle3 import Eagle3Checkpoint, save_layer
from jaxserve.models.loading.params import load_params
from jaxserve.training.dense import draft_states, followed_states, hidden_states

AUX_LAYERS = 0, 1
GUESSABLE = np.sort(np.random.default_rng(4).choice(256, 200, replace=False))
"""The tokens of the model that the layer can guess."""
VARIANTS = {
    "authors' names": Eagle3Config(AUX_LAYERS, len(GUESSABLE)),
    "vLLM's names": Eagle3Config(AUX_LAYERS, len(GUESSABLE), norm_first=True, prefix="layers.0."),
    "own embeddings": Eagle3Config(AUX_LAYERS, 256, mapped=False, own_embeddings=True),
}


def write(path, llama, own: Eagle3Config):
    rng = np.random.default_rng(0)
    config = eagle3.layer_for(llama.config)
    specs = eagle3.param_specs(config, own)
    params = jax.tree.map(lambda spec: rng.normal(0, 0.3, spec.shape).astype(np.float32), specs)
    if own.mapped:
        params["d2t"] = (GUESSABLE - np.arange(len(GUESSABLE))).astype(np.int32)
    save_layer(path, config, own, params)
    return path


@pytest.fixture
def directory(tmp_path, llama):
    return write(tmp_path, llama, VARIANTS["authors' names"])


def normed(x, weight, config: ModelConfig):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps) * weight


def rotated(x, theta):
    """Heads [tokens, heads, dim] at positions 0, 1, ..., of which halves are pairs."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def reference(config: ModelConfig, own: Eagle3Config, tensors, embedded, states):
    """What the layer gives for fused `states` and the next tokens' embeddings, both [tokens,
    hidden], and its logits of the model's tokens: as the authors' model, in numpy."""
    layer = {
        name.removeprefix(own.prefix).removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
    }
    of_state = normed(states, layer["hidden_norm"], config)
    x = of_state if own.norm_first else states
    both = np.concatenate([normed(embedded, layer["input_layernorm"], config), of_state], axis=-1)
    q, k, v = (
        (both @ layer[f"self_attn.{name}_proj"].T).reshape(len(x), -1, config.head_dim)
        for name in "qkv"
    )
    q, k = rotated(q, config.rope.theta), rotated(k, config.rope.theta)
    k, v = (part.repeat(config.queries_per_kv, axis=1) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(config.head_dim)
    weights = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
    x = x + attended @ layer["self_attn.o_proj"].T
    inner = normed(x, layer["post_attention_layernorm"], config)
    gate, up = inner @ layer["mlp.gate_proj"].T, inner @ layer["mlp.up_proj"].T
    x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj"].T
    logits = np.full((len(x), config.vocab_size), -np.inf)
    targets = np.arange(own.draft_vocab_size) + tensors.get("d2t", 0)
    logits[:, targets] = normed(x, layer["norm"], config) @ layer["lm_head"].T
    return x, logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_is_that_of_its_authors(tmp_path, llama, variant):
    own = VARIANTS[variant]
    checkpoint = Eagle3Checkpoint.open(write(tmp_path, llama, own))
    config, tensors = checkpoint.config, load_file(tmp_path / WEIGHTS)
    assert checkpoint.own(llama.config.num_layers) == own
    params = load_params(checkpoint, checkpoint.specs, dtype="float32")
    feature_layer = checkpoint.feature_layer(llama.config)
    token_ids = np.random.default_rng(1).integers(0, 256, 12)
    embedded = feature_layer.embed(
        params, llama.params, llama.family, llama.config, token_ids, np.arange(len(token_ids))
    )
    table = tensors["embed_tokens.weight"] if own.own_embeddings else llama.params["embed"]
    assert np.array_equal(embedded, table[token_ids])
    states = np.random.default_rng(2).normal(size=(12, len(AUX_LAYERS) * 64)).astype(np.float32)
    features = feature_layer.features(params, states)
    assert np.asarray(features) == pytest.approx(states @ tensors["fc.weight"].T, abs=1e-4)
    after, logits = reference(config, own, tensors, table[token_ids], np.asarray(features))
    found = draft_states(config, params, embedded[None], features[None], feature_layer)[0]
    assert np.asarray(found) == pytest.approx(after, rel=1e-3, abs=1e-3)
    found = feature_layer.logits(params, llama.params, llama.family, llama.config, found)
    assert np.asarray(found) == pytest.approx(logits, rel=1e-3, abs=1e-3)


def test_the_states_are_what_enters_the_layers(llama):
    """After the first layer of a model of one, which norms it."""
    token_ids = jnp.asarray(np.random.default_rng(3).integers(0, 256, (1, 16)), jnp.int32)
    family, config, params = llama.family, llama.config, llama.params
    first, second = np.split(
        followed_states(family, config, params, token_ids, AUX_LAYERS)[1][0], 2, -1
    )
    assert np.array_equal(first, params["embed"][token_ids[0]])
    shorter = dataclasses.replace(
        config, num_layers=1, sliding_windows=(None,), rope_layers=(True,)
    )
    own = params | {"layers": params["layers"][:1]}
    expected = hidden_states(family, shorter, own, token_ids)[0]
    assert normed(second, params["final_norm"], config) == pytest.approx(
        np.asarray(expected), rel=1e-3, abs=1e-5
    )


def test_a_config_says_which_layers_are_followed(directory):
    """Ours is vLLM's field; SGLang's counts from the layer before."""
    raw = json.loads((directory / CONFIG).read_text())
    assert raw.pop("eagle_aux_hidden_state_layer_ids") == [0, 1]

    def aux_layers(num_layers, **changes):
        (directory / CONFIG).write_text(json.dumps(raw | changes))
        return Eagle3Checkpoint.open(directory).own(num_layers).aux_layers

    nested = {"eagle_aux_hidden_state_layer_ids": [1, 4]}
    assert aux_layers(6, eagle_config=nested) == (2, 5)
    with pytest.raises(ConfigError, match=r"follows layers 2, 5 .* and the model has 5; use one"):
        aux_layers(5, eagle_config=nested)
    with pytest.raises(ModelError, match=r"layer_ids \[3, 1\]; it must list 1 to 8 layers"):
        aux_layers(6, eagle_aux_hidden_state_layer_ids=[3, 1])
    rows, columns = load_file(directory / WEIGHTS)["fc.weight"].shape
    rewrite(directory, **{"fc.weight": np.zeros((rows, columns // 2 * 3), np.float32)})
    assert aux_layers(32) == (2, 16, 29)
    with pytest.raises(ConfigError, match="the model has 5 layers; the method 'eagle3' needs 6"):
        aux_layers(5)


def rewrite(directory, **changes):
    """Replaces tensors, `name=None` takes one away."""
    tensors = load_file(directory / WEIGHTS) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / WEIGHTS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None},
            ModelError,
            "no draft_vocab_size, so it is not of a layer of EAGLE-3; use the method 'eagle'",
        ),
        ({"target_hidden_size": 32}, UnsupportedModelError, "target_hidden_size 32; only layers"),
        ({"num_hidden_layers": 2}, UnsupportedModelError, "num_hidden_layers 2; only a draft of"),
        ({"draft_vocab_size": 100}, WeightsError, "lm_head.weight has shape"),
        ({"draft_vocab_size": 257}, WeightsError, "lm_head.weight has shape"),
    ],
    ids=str,
)
def test_other_layers_are_refused_by_name(directory, changes, error, message):
    config = json.loads((directory / CONFIG).read_text()) | changes
    (directory / CONFIG).write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        Eagle3Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fc.weight", "fc.weight is missing"),
        ("midlayer.hidden_norm.weight", "midlayer.hidden_norm.weight is missing"),
        ("fc.bias", "fc.bias is not used by the model"),
    ],
)
def test_tensors_must_be_those_of_a_layer(directory, name, message):
    rewrite(directory, **{name: np.ones(64, np.float32) if "bias" in name else None})
    with pytest.raises(WeightsError, match=message):
        Eagle3Checkpoint.open(directory)


def test_a_layer_that_is_not_there_is_refused(llama, tmp_path):
    drafts = {"method": "eagle3", "num_speculative_tokens": 2}
    with pytest.raises(
        ModelError, match=r"there is no EAGLE-3 draft layer in .* safetensors files"
    ):
        llama.load(speculative_config=drafts | {"model": str(tmp_path / "absent")})
    with pytest.raises(ConfigError, match="no model; give the directory of a draft layer that"):
        llama.load(speculative_config=drafts)
