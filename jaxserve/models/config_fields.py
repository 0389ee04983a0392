"""Which fields of a Hugging Face `config.json` a family takes, and which it refuses.

A field is read by `common_config`, read by the family (`implements`), known to change nothing of
what a model computes (`HARMLESS`), or known to change nothing with some values (`_OPTIONS`). Any
other one is refused by its name and value unless it is null, since a model that is computed without
it may be another model. So is one that `common_config` reads for some families only (windows, a
part of a head that rotates), in a family whose reference implementation ignores it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.core.model_files import shown
from jaxserve.models.quantization_config import FIELD, METHODS, method_of
from jaxserve.models.quantization_config import parse as parse_quantization

_COMMON = {
    *("architectures", "_name_or_path", "hidden_act", "hidden_activation", FIELD),
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    "original_max_position_embeddings",
}
"""Fields that `common_config` reads for every family."""

WINDOW = ("sliding_window",)
WINDOW_BY_LAYER = (*WINDOW, "layer_types")
WINDOW_SWITCHED = (*WINDOW_BY_LAYER, "use_sliding_window", "max_window_layers")
"""Fields of attention windows, for the `implements` of families: one of all layers, one of some,
and one that can be turned off."""

HARMLESS = {
    # What wrote the file, and for which classes and dtypes.
    *("model_type", "auto_map", "transformers_version", "torch_dtype", "dtype", "is_llama_config"),
    *(
        "_commit_hash",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
    ),
    *("_flash_attn_2_enabled", "_experts_implementation", "transformers.js_config"),
    *("unsloth_fixed", "unsloth_version", "unsloth_optimized", "finetuning_task"),
    *("task_specific_params", "problem_type", "id2label", "label2id", "num_labels"),
    # Training, and how it was distributed.
    *("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"),
    *("initializer_range", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef"),
    *("router_jitter_noise", "output_router_logits", "pretraining_tp", "ep_size"),
    *("gradient_checkpointing", "use_bfloat16", "initial_context_length", "tf_legacy_loss"),
    # What transformers returns and caches.
    *("use_cache", "cache_implementation", "cache_config", "output_attentions", "torchscript"),
    *("output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate"),
    *("use_return_dict", "chunk_size_feed_forward", "is_decoder", "tie_encoder_decoder"),
    # Sampling, which generation_config.json recommends, and tokens, which tokenizer files have.
    *("do_sample", "temperature", "top_k", "top_p", "typical_p", "max_length", "min_length"),
    *("max_new_tokens", "num_beams", "num_beam_groups", "num_return_sequences", "early_stopping"),
    *("diversity_penalty", "length_penalty", "repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id", "suppress_tokens"),
    *("forced_eos_token_id", "begin_suppress_tokens", "remove_invalid_values", "prefix"),
    *("exponential_decay_length_penalty", "tokenizer_class", "sep_token_id", "unk_token_id"),
    *("cls_token_id", "mask_token_id", "decoder_start_token_id"),
}
"""Fields that published files have and that change nothing of what a model computes."""

# Fields that change what some models compute, with the values that change nothing.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (None, False),
    "alibi": (None, False),
    "attention_bias": (None, False),
    "attention_k_eq_v": (None, False),
    "attention_multiplier": (None, 1),
    "attn_output_gate": (None, False),
    "attn_temperature_tuning": (None, False, 0),
    "embedding_multiplier": (None, 1),
    "first_k_dense_replace": (None, 0),
    "full_attn_mod": (None, 1),
    "hidden_size_per_layer_input": (None, 0),
    "interpolate_factor": (None, 1),
    "is_encoder_decoder": (None, False),
    "lm_head_bias": (None, False),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "mlp_bias": (None, False),
    "moe_layer_freq": (None, 1),
    "n_group": (None, 1),
    "n_shared_experts": (None, 0),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0, 1),
    "num_kv_shared_layers": (None, 0),
    "num_local_experts": (None, 0, 1),
    "num_nextn_predict_layers": (None, 0),
    "pruned_heads": (None, {}),
    "residual_multiplier": (None, 1),
    "rope_interleave": (None, False),
    "rope_interleaved": (None, False),
    "routed_scaling_factor": (None, 1),
    "scale_emb": (None, 1),
    "scoring_func": (None, "softmax"),
    "topk_group": (None, 1),
    "topk_method": (None, "greedy"),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
    "use_parallel_residual": (None, False),
    "use_qk_norm": (None, False),
}
_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_pytorch_tanh": ("gelu_pytorch_tanh",)}


def refuse_others(
    raw: Mapping[str, Any], implements: Collection[str], activation: str, stored: Collection[str]
) -> None:
    """Raises UnsupportedModelError for a field that asks for what a family does not implement.

    The parameters are those of `common_config`.
    """
    architecture = raw["architectures"][0]
    quantized = raw.get(FIELD)
    if quantized is not None and method_of(raw) not in (*METHODS, *stored):
        raise UnsupportedModelError(
            f"config.json has {FIELD} {shown(quantized)}; quant_method may be "
            f"{', '.join((*METHODS, *stored))}: use such a checkpoint, a GGUF, or an unquantized "
            "one."
        )
    parse_quantization(raw)
    for name in ("hidden_act", "hidden_activation"):
        if raw.get(name, activation) not in _ACTIVATIONS[activation]:
            raise UnsupportedModelError(
                f"{name} {shown(raw[name])} is not implemented for {architecture}; only "
                f"{activation!r} is."
            )
    _refuse_windows(raw, implements)
    if "partial_rotary_factor" not in implements:
        for fields in (raw, raw.get("rope_scaling"), raw.get("rope_parameters")):
            partial = fields.get("partial_rotary_factor") if isinstance(fields, dict) else None
            only(raw | {"partial_rotary_factor": partial}, "partial_rotary_factor", None, 1)
    for name in sorted(raw.keys() - _COMMON - HARMLESS - set(implements)):
        if name in _OPTIONS:
            only(raw, name, *_OPTIONS[name])
        elif raw[name] is not None:
            raise UnsupportedModelError(
                f"{name} {shown(raw[name])} is not implemented for {architecture}. If it changes "
                "nothing that the model computes, delete it from config.json."
            )


def _refuse_windows(raw: Mapping[str, Any], implements: Collection[str]) -> None:
    """Raises UnsupportedModelError for a field that gives layers a window, or takes it from them,
    where the family does not read that field."""
    window, is_on = raw.get("sliding_window"), raw.get("use_sliding_window")
    if "sliding_window" not in implements:
        if is_on is not False:
            only(raw, "sliding_window", None)
        window = None
    if "use_sliding_window" not in implements and window is not None:
        only(raw, "use_sliding_window", None, True)
        only(raw, "max_window_layers", None, 0)
    if "layer_types" not in implements and isinstance(kinds := raw.get("layer_types"), list):
        kind = "full_attention" if window is None else "sliding_attention"
        only(raw, "layer_types", [kind] * len(kinds))


def only(raw: Mapping[str, Any], name: str, *values: Any) -> None:
    """Raises UnsupportedModelError unless the field `name`, None if absent, is one of `values`."""
    if raw.get(name) not in values:
        raise UnsupportedModelError(
            f"{name} {shown(raw[name])} is not implemented for {raw['architectures'][0]}; only "
            f"{' and '.join(map(repr, values))} {'are' if len(values) > 1 else 'is'}."
        )
