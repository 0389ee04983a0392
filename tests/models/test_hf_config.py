"""Reading `config.json`: old and new spellings, what may be left out, what is refused."""

from __future__ import annotations

import pytest

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.hf_config import rope_config
from jaxserve.models.registry import ARCHITECTURES, get_family

BARE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 16.0}


def read(architecture="LlamaForCausalLM", **fields):
    raw = BARE | {"architectures": [architecture]} | fields
    return get_family(architecture).config_from_hf(raw)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": YARN | {"rope_type": "yarn"}},
        {"rope_theta": 5e5, "rope_scaling": YARN | {"type": "yarn"}},
        {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 5e5}},
    ],
)
def test_rope_spellings_of_every_transformers_version_agree(fields):
    rope = read(**fields).rope
    assert (rope.kind, rope.theta, rope.factor, rope.beta_fast) == ("yarn", 5e5, 4.0, 16.0)
    assert rope.original_max_position == 256


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_factor_follows_from_the_two_contexts(kind):
    scaling = {
        "rope_type": kind,
        "original_max_position_embeddings": 256,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    assert read(rope_scaling=scaling).rope.factor == 4.0


def test_only_part_of_a_head_may_rotate():
    raw = BARE | {"partial_rotary_factor": 0.5}
    assert rope_config(raw, head_dim=8).rotary_dim == 4


def test_smollm3_defaults():
    """transformers leaves out of a saved config.json what its class has by default."""
    config = read("SmolLM3ForCausalLM", sliding_window=128)
    assert config.tie_word_embeddings
    assert config.rope.theta == 2e6
    assert config.rope_layers == (True, True, True, False)
    assert config.sliding_windows == (None,) * 4
    listed = read("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0])
    assert listed.rope_layers == (False, True, True, False)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows(architecture):
    assert read(architecture, sliding_window=128).sliding_windows == (None,) * 4
    windowed = {"use_sliding_window": True, "sliding_window": 128}
    assert read(architecture, **windowed).sliding_windows == (None,) * 4
    upper = read(architecture, **windowed, max_window_layers=3)
    assert upper.sliding_windows == (None, None, None, 128)
    kinds = ["sliding_attention", "full_attention"] * 2
    listed = read(architecture, **windowed, layer_types=kinds)
    assert listed.sliding_windows == (128, None, 128, None)


def test_mistral_windows_every_layer():
    assert read("MistralForCausalLM", sliding_window=128).sliding_windows == (128,) * 4
    assert read("MistralForCausalLM", sliding_window=None).sliding_windows == (None,) * 4


def test_head_dim_need_not_divide_hidden_size():
    assert read().head_dim == 8
    assert read(head_dim=24).head_dim == 24
    assert read("Qwen3ForCausalLM").head_dim == 128


def test_one_end_token_or_several():
    assert read().eos_token_ids == ()
    assert read(eos_token_id=7).eos_token_ids == (7,)
    assert read(eos_token_id=[7, 9]).eos_token_ids == (7, 9)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("field", sorted(BARE.keys() - {"num_key_value_heads"}))
def test_a_missing_field_is_named(architecture, field):
    raw = {key: value for key, value in BARE.items() if key != field}
    with pytest.raises(UnsupportedModelError, match=f"{field}.*{architecture}"):
        get_family(architecture).config_from_hf(raw | {"architectures": [architecture]})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*'silu'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope scaling 'spiral'"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, "needs 4"),
        ({"num_key_value_heads": 3}, "4 query heads.*3 key/value heads"),
        (
            {"sliding_window": 8, "layer_types": ["chunked_attention"] * 4},
            r"layer_types has \['chunked_attention'\]",
        ),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "lists 1 layers.* has 4"),
    ],
)
def test_what_is_not_implemented_is_refused(fields, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(**fields)


def test_unknown_architectures_are_told_the_known_ones():
    with pytest.raises(UnsupportedModelError, match=r"'GPT2LMHeadModel'.*Olmo2ForCausalLM"):
        get_family("GPT2LMHeadModel")
