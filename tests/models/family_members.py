"""Tiny models of every family member, the same here and in transformers.

A member is a transformers config class with a few fields. Its weights follow from the names of its
tensors, so that a golden file needs to hold only names and shapes.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

TOKENS = 40
VOCAB = 64
_HALF_DIM = 8
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 0.01,  # large, so that leaving it out shows
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SHARP = ("q_proj", "k_proj", "qkv_proj", "q_b_proj")
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(_HALF_DIM)],
    "long_factor": [1.5 + 0.8 * i for i in range(_HALF_DIM)],
}


@dataclasses.dataclass(frozen=True)
class Member:
    """`family` names the transformers classes, `fields` goes to the config.

    `context` is the longest sequence to serve where that is not `max_position_embeddings`.
    transformers goes by the sequence at hand, of TOKENS tokens, in the two scalings that depend on
    length; the comparison holds where both come to the same frequencies. `config` is the name of
    the config class, where that is not the family's.
    """

    family: str
    fields: dict[str, Any]
    context: int | None = None
    config: str | None = None


def _llama(context: int | None = None, **fields: Any) -> Member:
    return Member("Llama", fields, context)


def _qwen2_moe(**fields: Any) -> Member:
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }
    return Member("Qwen2Moe", experts | fields)


def _phi(original: int, context: int | None = None, **fields: Any) -> Member:
    """Three quarters of a head rotate, by other factors in contexts of more than `original`."""
    rope = _LONGROPE | {
        "short_factor": _LONGROPE["short_factor"][:6],
        "long_factor": _LONGROPE["long_factor"][:6],
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": original,
    }
    own = {"original_max_position_embeddings": original, "rope_parameters": rope}
    return Member("Phi3", own | fields, context)


def _gpt_oss(**fields: Any) -> Member:
    """Clamps that show, three layers of which the middle one has no window."""
    own = {
        "num_hidden_layers": 3,
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 9,
        "swiglu_alpha": 1.3,
        "swiglu_limit": 0.8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    }
    return Member("GptOss", own | fields)


def _deepseek(family: str, **fields: Any) -> Member:
    """Latents and heads of four sizes, groups of two experts, YaRN that stretches all of a head."""
    own = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    }
    return Member(family, own | fields)


_GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 9,
    "final_logit_softcapping": 5.0,
    "attention_bias": True,
}

MEMBERS = {
    "llama2_mha": _llama(num_key_value_heads=4),
    "llama_mqa": _llama(num_key_value_heads=1),
    "llama_biases": _llama(attention_bias=True, mlp_bias=True),
    "llama3": _llama(
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "rope_linear": _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    ),
    "rope_dynamic": _llama(
        context=TOKENS,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    ),
    "rope_yarn": _llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "rope_yarn_mscale": _llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 0.5,
            "mscale": 1.5,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    ),
    "rope_longrope_short": _llama(
        context=128, rope_parameters=_LONGROPE | {"original_max_position_embeddings": 128}
    ),
    "rope_longrope_long": _llama(
        rope_parameters=_LONGROPE | {"original_max_position_embeddings": 32}
    ),
    "smollm2": _llama(
        tie_word_embeddings=True,
        hidden_size=48,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    ),
    "smollm3": Member("SmolLM3", {"num_hidden_layers": 4}),
    "mistral": Member("Mistral", {"sliding_window": 9}),
    "mistral_head_dim": Member("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": Member(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2_tied": Member("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": Member("Qwen3", {"head_dim": 32}),
    "olmo2": Member("Olmo2", {}),
    "gemma2": Member("Gemma2", _GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma2_uncapped": Member(
        "Gemma2",
        {
            "sliding_window": 9,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": Member(
        "Gemma3",
        _GEMMA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        config="Gemma3TextConfig",
    ),
    "phi3": _phi(32, sliding_window=9),
    "phi3_short": _phi(128, context=128, tie_word_embeddings=True),
    "mixtral": Member(
        "Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}
    ),
    "qwen2_moe": _qwen2_moe(norm_topk_prob=True, mlp_only_layers=[0]),
    "qwen2_moe_step": _qwen2_moe(
        decoder_sparse_step=2,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
    ),
    "qwen3_moe": Member(
        "Qwen3Moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "attention_bias": True,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v2": _deepseek(
        "DeepseekV2",
        q_lora_rank=None,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        attention_bias=False,
        rope_parameters=_DEFAULT_ROPE,
    ),
    "deepseek_v2_groups": _deepseek("DeepseekV2", topk_method="group_limited_greedy"),
    "deepseek_v3": _deepseek("DeepseekV3"),
    "deepseek_v3_halves": _deepseek(
        "DeepseekV3",
        q_lora_rank=None,
        rope_interleave=False,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        first_k_dense_replace=2,
        tie_word_embeddings=True,
    ),
    "gpt_oss": _gpt_oss(num_attention_heads=6),
    "gpt_oss_unbiased": _gpt_oss(
        num_hidden_layers=2,
        attention_bias=False,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters=_DEFAULT_ROPE,
        tie_word_embeddings=True,
    ),
    "olmoe": Member(
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 1.5, "attention_bias": True},
    ),
    "olmoe_normed": Member(
        "Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
    ),
}


def token_ids() -> np.ndarray:
    """The sequence that every member is given, int64 [TOKENS]."""
    return np.random.RandomState(1).randint(0, VOCAB, TOKENS)


def tensors(shapes: dict[str, list[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 values for tensors of the given Hugging Face names and shapes."""
    return {name: _draw(name, shape, seed) for name, shape in shapes.items()}


def _draw(name: str, shape: list[int], seed: int) -> np.ndarray:
    # RandomState, because numpy promises its stream for all time, unlike a Generator's.
    rng = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    values = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        return (1 + 0.3 * values).astype(np.float32)
    if name.endswith("bias"):
        return (0.5 * values).astype(np.float32)
    # Queries and keys are larger, so that attention is sharp and where it looks matters.
    sharp = 2.0 if any(one in name for one in _SHARP) else 1.0
    return (sharp * values / np.sqrt(shape[-1])).astype(np.float32)


def hf_model(member: Member, seed: int = 0) -> Any:
    """The member as a transformers model on the CPU. Needs torch and transformers."""
    import torch
    import transformers

    config_class = getattr(transformers, member.config or f"{member.family}Config")
    model_class = getattr(transformers, f"{member.family}ForCausalLM")
    blank = model_class._from_config(config_class(**_SIZES | member.fields))
    values = tensors(hf_shapes(blank), seed)
    with tempfile.TemporaryDirectory() as directory:
        blank.config.save_pretrained(directory)
        save_file(values, Path(directory) / "model.safetensors", {"format": "pt"})
        model = model_class.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32
        )
    return model.eval()


def hf_shapes(model: Any) -> dict[str, list[int]]:
    """Names and shapes of a transformers model's tensors in a file; tied ones count once."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with safe_open(Path(directory) / "model.safetensors", framework="numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def hf_config(model: Any, directory: Path) -> dict[str, Any]:
    """The `config.json` that transformers writes for a model, left in `directory`."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    return json.loads((directory / "config.json").read_text())


def hf_logits(model: Any) -> np.ndarray:
    """Logits float32 [TOKENS, VOCAB] of a transformers model on `token_ids`."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(token_ids())[None]).logits[0].numpy()
