"""Reading `config.json`: old and new spellings, what may be left out, what is refused."""

from __future__ import annotations

import pytest
from published_families import PUBLISHED

from jaxserve.core.errors import ModelError, UnsupportedModelError
from jaxserve.models.hf_config import rope_config
from jaxserve.models.loading.directory import (
    CONFIG,
    GENERATION_CONFIG,
    ModelDirectory,
    config_from_files,
)
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
GEMMA_2 = {"architectures": ["Gemma2ForCausalLM"]}
GEMMA_3 = {"architectures": ["Gemma3ForCausalLM"]}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
PHI_3 = {"architectures": ["Phi3ForCausalLM"]}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 256}
WINDOWS = [
    {"sliding_window": 4},
    {"layer_types": ["sliding_attention", "full_attention"] * 2},
    {"layer_types": ["chunked_attention"] * 4},
]
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
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = {"rope_type": kind, "original_max_position_embeddings": 256}
    scaling |= factors if kind == "longrope" else {}
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


def test_windows_that_are_none_are_no_reason_to_refuse():
    full = ["full_attention"] * 4
    off = {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 2}
    for fields in ({"sliding_window": None, "layer_types": full}, off):
        assert read(**fields).sliding_windows == (None,) * 4
    every = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 4}
    assert read("MistralForCausalLM", **every).sliding_windows == (8,) * 4


def test_gemma_windows():
    """Every other layer of Gemma 2 has one, and five in six of Gemma 3."""
    assert read("Gemma2ForCausalLM").sliding_windows == (4096, None) * 2
    assert read("Gemma3ForCausalLM", num_hidden_layers=7).sliding_windows == (
        *(4096,) * 5,
        None,
        4096,
    )
    older = {"sliding_window": 8, "sliding_window_pattern": 2}
    assert read("Gemma3ForCausalLM", **older).sliding_windows == (8, None) * 2
    listed = read("Gemma3ForCausalLM", layer_types=["full_attention"] * 4, sliding_window=None)
    assert listed.sliding_windows == (None,) * 4


def test_gpt_oss_defaults():
    config = read("GptOssForCausalLM")
    assert config.sliding_windows == (128, None) * 2
    assert (config.rope.kind, config.rope.factor, config.rope.truncate) == ("yarn", 32.0, False)
    assert (config.rope.theta, config.rope.original_max_position) == (150_000.0, 4096)
    assert (config.moe.num_experts, config.moe.clamped) == (128, (1.702, 7.0))
    assert config.qkv_bias and config.output_bias and config.attention_sinks
    plain = read("GptOssForCausalLM", rope_parameters={"rope_type": "default"}, swiglu_limit=5)
    assert (plain.rope.kind, plain.moe.clamped.limit) == ("default", 5.0)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ],
)
def test_gemma_3_rotates_layers_with_a_window_by_another_base(fields):
    config = read("Gemma3ForCausalLM", **fields)
    full, windowed = config.rope, config.window_rope
    assert (full.theta, full.kind, full.factor) == (5e5, "linear", 8.0)
    assert (windowed.theta, windowed.kind, windowed.factor) == (500.0, "default", 1.0)


def test_gemma_3_rotates_as_its_class_does_by_default():
    config = read("Gemma3ForCausalLM")
    assert (config.rope.theta, config.window_rope.theta) == (1e6, 1e4)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", [{"type": "su"}, {"rope_type": "yarn"}, {"type": "longrope"}])
def test_phi_3_names_longrope_in_three_ways(place, kind):
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = read("Phi3ForCausalLM", **{place: lists | kind, "max_position_embeddings": 8192})
    assert (config.rope.kind, config.rope.factor) == ("longrope", 2.0)
    assert config.rope.original_max_position == 4096


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
        ({"rope_scaling": {"factor": 8.0}}, "a rotation with factor 8.0, which .* 'default' does"),
        ({"rope_scaling": YARN | {"type": "yarn", "rope_type": "linear"}}, "type 'yarn'; remove"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 2.0}},
            "attention_factor 2.0, which the rope_type 'linear'",
        ),
        (
            {"rope_scaling": LONGROPE | {"short_factor": [1.0], "long_factor": [2.0] * 4}},
            "longrope needs 4",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq'.*quant_method may be awq.*GGUF"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'.*quant_method may be awq"),
        ({"swiglu_limit": 7.0}, r"swiglu_limit 7\.0 is not implemented for LlamaForCausalLM"),
    ],
)
def test_what_is_not_implemented_is_refused(fields, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(**fields)


@pytest.mark.parametrize(
    "architecture, fields, message",
    [
        ("LlamaForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("LlamaForCausalLM", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("LlamaForCausalLM", {"attention_chunk_size": 8192}, "attention_chunk_size 8192"),
        ("LlamaForCausalLM", {"scale_emb": 12}, "scale_emb 12"),
        ("LlamaForCausalLM", {"use_parallel_residual": True}, "use_parallel_residual True"),
        ("MistralForCausalLM", {"logits_scaling": 8}, "logits_scaling 8"),
        ("Olmo2ForCausalLM", {"mlp_bias": True}, "mlp_bias True"),
        ("Qwen2ForCausalLM", {"use_mrope": True}, "use_mrope True"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("Gemma2ForCausalLM", {"hidden_act": "silu"}, "hidden_act 'silu'"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "bidirectional_attention"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("Gemma3ForCausalLM", {"mlp_bias": True}, "mlp_bias True"),
        ("Gemma3ForCausalLM", {"num_kv_shared_layers": 10}, "num_kv_shared_layers 10"),
        ("GptOssForCausalLM", {"mlp_bias": True}, "mlp_bias True"),
        ("GptOssForCausalLM", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5"),
        ("Qwen3ForCausalLM", {"attn_output_gate": True}, "attn_output_gate True"),
        ("Phi3ForCausalLM", {"attention_bias": True}, "attention_bias True"),
        ("Phi3ForCausalLM", {"lm_head_bias": True}, "lm_head_bias True"),
        ("Gemma2ForCausalLM", {"sliding_window_size": 9}, "sliding_window_size 9"),
        ("GptOssForCausalLM", {"experts_per_token": 9}, "experts_per_token 9"),
        ("DeepseekV3ForCausalLM", {"qk_head_dim": 9}, "qk_head_dim 9"),
        ("DeepseekV3ForCausalLM", {"head_dim": 77}, "head_dim 77"),
        ("DeepseekV2ForCausalLM", {"num_experts": 17}, "num_experts 17"),
        ("MixtralForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            "Qwen2ForCausalLM",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5",
        ),
        *(
            (f"{family}ForCausalLM", fields, next(iter(fields)))
            for family in ("Llama", "Olmo2", "Olmoe", "DeepseekV3")
            for fields in WINDOWS
        ),
        *(
            (f"{family}ForCausalLM", {"sliding_window": 4} | fields, next(iter(fields)))
            for family in ("Mistral", "Mixtral", "Phi3")
            for fields in (*WINDOWS[1:], {"max_window_layers": 2}, {"use_sliding_window": False})
        ),
        ("Gemma2ForCausalLM", {"use_sliding_window": False}, "use_sliding_window False"),
        *(
            ("LlamaForCausalLM", {name: value}, f"{name} {value}")
            for name, value in (
                ("decoder_sparse_step", 1),
                ("index_topk", 2048),
                ("kv_lora_rank", 512),
                ("moe_intermediate_size", 768),
                ("num_nextn_predict_layers", 1),
                ("query_pre_attn_scalar", 168),
                ("rope_interleaved", True),
                ("rope_local_base_freq", 1e4),
                ("shared_expert_intermediate_size", 768),
            )
        ),
    ],
)
def test_what_a_family_does_not_implement_is_refused(architecture, fields, message):
    with pytest.raises(
        UnsupportedModelError, match=f"{message}.* not implemented .*{architecture}"
    ):
        read(architecture, **fields)


def test_fields_beside_mxfp4_are_known():
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    read("GptOssForCausalLM", quantization_config=stored)
    with pytest.raises(UnsupportedModelError, match=r"quantization_config\.group 16, which is not"):
        read("GptOssForCausalLM", quantization_config=stored | {"group": 16})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_field_that_nobody_knows_is_refused_unless_it_is_null(architecture):
    read(architecture, headwise_gate=None, num_key_value_heads=None)
    for value in (True, False, 0, [], "on"):
        message = f"headwise_gate .* not implemented for {architecture}. If it .* delete it from"
        with pytest.raises(UnsupportedModelError, match=message):
            read(architecture, headwise_gate=value, num_key_value_heads=None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_fields_of_published_configs_are_known(name):
    raw = PUBLISHED[name]
    config = config_from_files({CONFIG: raw})
    sizes = raw | raw.get("text_config", {})
    assert (config.hidden_size, config.num_layers) == (
        sizes["hidden_size"],
        sizes["num_hidden_layers"],
    )


def test_every_architecture_has_a_published_config():
    assert {raw["architectures"][0] for raw in PUBLISHED.values()} == set(ARCHITECTURES)


def test_rotation_that_is_not_implemented_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"rope_scaling has short_mscale 1\.2"):
        read(rope_scaling={"type": "linear", "factor": 2.0, "short_mscale": 1.2})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"architectures": "LlamaForCausalLM"}, "architectures 'LlamaForCausalLM'; .* a list"),
        ({"num_attention_heads": 0}, "num_attention_heads 0; .* integer of at least 1"),
        ({"num_attention_heads": "4"}, "num_attention_heads '4'; .* integer"),
        ({"num_attention_heads": 5}, "hidden_size 32; .* multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0; .* at least 1"),
        ({"num_hidden_layers": 1.0}, "num_hidden_layers 1.0; .* integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers True; .* integer"),
        ({"vocab_size": 0}, "vocab_size 0; .* at least 1"),
        ({"hidden_size": None}, "hidden_size None; .* integer"),
        ({"head_dim": 0}, "head_dim 0; .* at least 1"),
        ({"max_position_embeddings": -1}, "max_position_embeddings -1; .* at least 1"),
        ({"rms_norm_eps": None}, "rms_norm_eps None; .* a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan; .* a number above 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no'; .* true or false"),
        ({"bos_token_id": "<s>"}, "bos_token_id '<s>'; .* integer"),
        ({"eos_token_id": "</s>"}, r"eos_token_id '</s>'; .* in 0\.\.63"),
        ({"eos_token_id": [2, 64]}, r"eos_token_id \[2, 64\]; .* in 0\.\.63"),
        ({"eos_token_id": True}, "eos_token_id True; .* an id"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window 0; .* at least 1"),
        (MISTRAL | {"sliding_window": 8.0}, "sliding_window 8.0; .* integer"),
        ({"layer_types": []}, r"layer_types \[\]; .* a list of 4"),
        ({"layer_types": ["full_attention"]}, "layer_types .*; .* a list of 4"),
        (PHI_3 | {"partial_rotary_factor": 1.5}, r"partial_rotary_factor 1.5; .* in \(0, 1\]"),
        (PHI_3 | {"partial_rotary_factor": 1e308}, r"partial_rotary_factor 1e\+308; .* \(0, 1\]"),
        ({"rope_theta": "a"}, "rope_theta 'a'; .* a number above 1"),
        ({"rope_scaling": "linear"}, "rope_scaling 'linear'; .* an object"),
        ({"rope_parameters": []}, r"rope_parameters \[\]; .* an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor None; .* above 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0}}, "factor 0; .* above 0"),
        ({"rope_scaling": {"type": "llama3", "factor": -2.0}}, "factor -2.0; .* above 0"),
        ({"rope_scaling": {"type": "yarn"}}, "factor None; .* above 0"),
        ({"rope_scaling": YARN | {"type": "yarn", "factor": 0}}, "factor 0; .* above 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "'dynamic'.*undefined"),
        ({"rope_scaling": {"type": "longrope", "factor": 0}}, "factor 0; .* above 0"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [0]}}, r"short_factor \[0\]; "),
        (GEMMA_2 | {"final_logit_softcapping": 0}, "final_logit_softcapping 0; .* above 0"),
        (GEMMA_2 | {"query_pre_attn_scalar": None}, "query_pre_attn_scalar None; .* above 0"),
        (GEMMA_2 | {"sliding_window": None}, "sliding_window None; .* an integer"),
        (GEMMA_2 | {"layer_types": 3}, "layer_types 3; .* a list of 4"),
        (GEMMA_3 | {"sliding_window_pattern": 0}, "sliding_window_pattern 0; .* at least 1"),
        (GEMMA_3 | {"rope_parameters": {"rope_theta": 1e4}}, "full_attention and sliding_att"),
        (GEMMA_3 | {"rope_local_base_freq": 0}, "rope_theta 0; .* above 1"),
        (GEMMA_3 | {"text_config": []}, r"text_config \[\]; .* an object"),
    ],
)
def test_a_malformed_field_is_named(fields, message):
    raw = BARE | {"architectures": ["LlamaForCausalLM"]} | fields
    with pytest.raises(ModelError, match=message):
        config_from_files({CONFIG: raw})


def recommended(**generation):
    raw = BARE | {"architectures": ["LlamaForCausalLM"]}
    return config_from_files({CONFIG: raw, GENERATION_CONFIG: generation})


def test_recommended_sampling():
    assert dict(recommended(do_sample=False, temperature=0.7).default_sampling) == {
        "temperature": 0.0
    }
    assert dict(recommended(max_new_tokens=9, top_k=None).default_sampling) == {"max_new_tokens": 9}


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", 5),
        ("temperature", "hot"),
        ("top_p", 0),
        ("max_new_tokens", 0),
        ("do_sample", "no"),
        ("eos_token_id", 64),
    ],
)
def test_a_malformed_recommendation_is_named(field, value):
    with pytest.raises(ModelError, match=f"generation_config.json has {field} {value!r}"):
        recommended(**{field: value})


def test_a_config_that_cannot_be_read(tmp_path):
    (tmp_path / CONFIG).mkdir()
    with pytest.raises(ModelError, match=r"config\.json cannot be read: .*directory"):
        ModelDirectory.open(tmp_path)


def test_unknown_architectures_are_told_the_known_ones():
    with pytest.raises(UnsupportedModelError, match=r"'GPT2LMHeadModel'.*Olmo2ForCausalLM"):
        get_family("GPT2LMHeadModel")
