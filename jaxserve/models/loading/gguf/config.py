"""GGUF metadata as a Hugging Face `config.json`, so that families read one format."""

from __future__ import annotations

from typing import Any

from gguf import GGMLQuantizationType

from jaxserve.core.errors import UnsupportedModelError, WeightsError
from jaxserve.core.model_files import shown
from jaxserve.models.loading.gguf.header import GgufFile
from jaxserve.text.gguf_vocab import check_vocabulary, eos_token_ids

ARCHITECTURES = {
    "deepseek2": "DeepseekV2ForCausalLM",  # that of V3, R1 and Kimi K2 too
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",  # GGUFs of Mistral and Mixtral have this architecture too
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Keys that change what some models compute, with the values that change nothing.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "altup.num_inputs": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.relative_buckets_count": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1),
    "expert_group_scale": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "full_attention_interval": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "moe_latent_size": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": ([], [0, 0, 0, 0]),
    "router_logit_softcapping": (0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
_ROPE_FACTORS = "rope_freqs.weight"
_LONGROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
_SIGMOID = 2
_GATING = (1, _SIGMOID)  # softmax and sigmoid
_EXPERT_GROUPS = {160: (8, 3), 256: (8, 4)}
"""Groups and those of a token, by the number of experts."""
# Gemma of 27B, by its number of layers: its scores are scaled as if heads divided the hidden size.
_GEMMA_27B = (("gemma2", 46), ("gemma3", 62))


def hf_config(file: GgufFile, tensors: set[str]) -> dict[str, Any]:
    """The `config.json` that the model was converted from, with the fields used here.

    `tensors` are the GGUF names of all tensors, over all files of a split model. Raises
    UnsupportedModelError for an architecture or feature that is not implemented, WeightsError
    when a key is missing.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {shown(architecture)} is not implemented; known are "
            f"{', '.join(ARCHITECTURES)}."
        )
    keys = _Keys(file, architecture)
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", hidden // heads)
    latent = architecture == "deepseek2"
    if not latent and keys.size("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: keys of {head_dim} and values of "
            f"{keys['attention.value_length']} dimensions; their sizes must be equal."
        )
    check_vocabulary(file.metadata)
    vocabulary = file.metadata.get("tokenizer.ggml.tokens", ())
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "_name_or_path": file.metadata.get("general.name", file.path.stem),
        "vocab_size": keys.get("vocab_size", len(vocabulary)),
        "hidden_size": hidden,
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys["context_length"],
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_theta": keys.get("rope.freq_base", 10_000.0),
        "partial_rotary_factor": keys.size("rope.dimension_count", head_dim) / head_dim,
        "rope_scaling": _rope_scaling(file, keys, architecture),
        "sliding_window": keys.get("attention.sliding_window") or None,  # 0 is for none
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(eos_token_ids(file.metadata)),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if architecture in ("gemma2", "gemma3"):
        of_27b = (architecture, keys["block_count"]) in _GEMMA_27B
        config |= {
            "query_pre_attn_scalar": hidden // heads if of_27b else head_dim,
            "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
            "final_logit_softcapping": keys.get("final_logit_softcapping"),
            "rope_local_base_freq": keys.get("rope.freq_base_swa"),
        }
    if latent:
        config |= _deepseek(file, keys)
    elif keys.get("expert_count", 0):
        config |= _mixture(file, keys, architecture)
    keys.refuse_unread()
    # Without this rank queries are computed from hidden states.
    kept = ("q_lora_rank",)
    return {name: value for name, value in config.items() if value is not None or name in kept}


def _deepseek(file: GgufFile, keys: _Keys) -> dict[str, Any]:
    """Fields of a DeepSeek. A file has one head of keys, or all, by llama.cpp's version."""
    experts, rotated = keys.size("expert_count"), keys.size("rope.dimension_count")
    of_key = keys.size("attention.key_length_mla", keys.size("attention.key_length"))
    gating = keys.get("expert_gating_func", 1)
    if gating not in _GATING:
        raise UnsupportedModelError(
            f"{file.path}: expert_gating_func {shown(gating)} is not implemented; known are "
            f"{' and '.join(map(str, _GATING))}."
        )
    fields = {
        "head_dim": None,
        "num_key_value_heads": None,
        "partial_rotary_factor": None,
        "attention_bias": None,
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": of_key - rotated,
        "v_head_dim": keys.size("attention.value_length_mla", keys.size("attention.value_length")),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "n_routed_experts": experts,
        "num_experts_per_tok": keys.size("expert_used_count"),
        "n_shared_experts": keys.get("expert_shared_count", 0),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm", False),
        "num_nextn_predict_layers": 0,  # not in such files
    }
    # Older files do not say what groups of experts there are: those of V2 and V3, by their number.
    count, chosen = _EXPERT_GROUPS.get(experts, (1, 1))
    fields["n_group"] = keys.get("expert_group_count", count)
    fields["topk_group"] = keys.get("expert_group_used_count", chosen)
    if gating == _SIGMOID:
        fields["architectures"] = ["DeepseekV3ForCausalLM"]
    elif fields["n_group"] > 1:
        fields["topk_method"] = "group_limited_greedy"
    return fields


def _mixture(file: GgufFile, keys: _Keys, architecture: str) -> dict[str, Any]:
    """Fields of a mixture of experts. Whether weights are normed is a part of the architecture."""
    experts, chosen = keys.size("expert_count"), keys.size("expert_used_count")
    fields = {"num_experts": experts, "num_experts_per_tok": chosen}
    match architecture:
        case "llama":
            return fields | {"architectures": ["MixtralForCausalLM"]}
        case "gpt-oss":
            return fields | {"intermediate_size": keys.size("expert_feed_forward_length")}
        case "olmoe":
            return fields | {"clip_qkv": keys.get("attention.clamp_kqv")}
        case "qwen2moe":
            shared = keys.size("expert_shared_feed_forward_length")
            fields["shared_expert_intermediate_size"] = shared
        case "qwen3moe":
            fields["norm_topk_prob"] = True
        case _:
            raise UnsupportedModelError(
                f"{file.path}: expert_count {experts} is not implemented for GGUF architecture "
                f"{architecture}."
            )
    return fields | {"moe_intermediate_size": keys.size("expert_feed_forward_length")}


def generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The sampling defaults a GGUF recommends, as in a `generation_config.json`."""
    return {
        name: metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in metadata
    }


class _Keys:
    """The metadata keys of one architecture, without their prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture + "."
        self._read: set[str] = set()

    def refuse_unread(self) -> None:
        """Raises UnsupportedModelError for one of _OPTIONS that was not read, and that changes what
        is computed."""
        for key in sorted(_OPTIONS.keys() - self._read):
            value = self._file.metadata.get(self._prefix + key)
            if value is not None and value not in _OPTIONS[key]:
                raise UnsupportedModelError(
                    f"{self._file.path}: {self._prefix}{key} {shown(value)} is not implemented."
                )

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._file.metadata.get(self._prefix + key, default)
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"{self._file.path}: {self._prefix}{key} differs from layer to layer "
                f"({value[:4]}...), which is not implemented."
            )
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A count: `default` where it is absent, if that is not None."""
        value = self[key] if default is None else self.get(key, default)
        if type(value) is not int or value < 1:
            raise WeightsError(
                f"{self._file.path}: {self._prefix}{key} is {shown(value)}; it must be an "
                "integer of at least 1."
            )
        return value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise WeightsError(f"{self._file.path} has no metadata key {self._prefix}{key}.")
        return value


def _rope_scaling(file: GgufFile, keys: _Keys, architecture: str) -> dict[str, Any] | None:
    if _ROPE_FACTORS in file.tensors:
        # Llama 3's scaling, precomputed: each frequency is divided by a factor, which equals
        # LongRoPE with the same factors for short and long contexts.
        divisors = _factors(file, _ROPE_FACTORS)
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
        }
    if _LONGROPE_FACTORS["long_factor"] in file.tensors:
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": keys["rope.scaling.original_context_length"],
            "attention_factor": keys.get("rope.scaling.attn_factor"),
        } | {field: _factors(file, name) for field, name in _LONGROPE_FACTORS.items()}
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rope scaling {shown(kind)} is not implemented for GGUF; known are "
            "linear, yarn and Llama 3's."
        )
    scaling = {"rope_type": kind, "factor": keys["rope.scaling.factor"]}
    if architecture == "gpt-oss":
        scaling["truncate"] = False
    if architecture == "deepseek2":
        # Both factors of YaRN's temperature are equal in all models of these files.
        logarithm = round(keys.get("rope.scaling.yarn_log_multiplier", 0.0) / 0.1, 6)
        scaling |= {"mscale": logarithm, "mscale_all_dim": logarithm} if logarithm else {}
    optional = {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    return scaling | {
        name: value for name, key in optional.items() if (value := keys.get(key)) is not None
    }


def _factors(file: GgufFile, name: str) -> list[float]:
    """Divisors of rotary frequencies, which a file has as a tensor."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.kind is not GGMLQuantizationType.F32:
        found = "missing" if tensor is None else f"{tensor.kind.name}, not F32"
        raise WeightsError(f"{file.path}: {name} is {found}.")
    return tensor.raw.view("<f4").tolist()
