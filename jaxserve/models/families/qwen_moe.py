"""Qwen2-MoE (2407.10671) and Qwen3-MoE (2505.09388): Qwen2 and Qwen3 with mixtures of experts.

Some layers may have a plain MLP. Qwen2-MoE has an expert that every token takes beside its own,
weighted by a gate of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.core.model_config import ModelConfig
from jaxserve.models import moe_specs
from jaxserve.models.config_fields import WINDOW_SWITCHED
from jaxserve.models.families import llama
from jaxserve.models.family import Params
from jaxserve.models.hf_config import boolean, common_config, flag, integer, malformed

# Defaults of the transformers classes, which a config.json may leave out.
_DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_QWEN2_DEFAULTS = _DEFAULTS | {
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "max_window_layers": 28,
}
_QWEN3_DEFAULTS = _DEFAULTS | {
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_FIELDS = (
    *("moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
    *WINDOW_SWITCHED,
    *moe_specs.FIELDS,
)


def qwen2_config(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen2-MoE from its parsed `config.json`."""
    raw = _QWEN2_DEFAULTS | raw
    if raw.get("layer_types") is None and boolean(raw, "use_sliding_window", False):
        first_full = integer(raw, "max_window_layers", minimum=0)
        raw["layer_types"] = [
            "full_attention" if layer % 2 or layer >= first_full else "sliding_attention"
            for layer in range(integer(raw, "num_hidden_layers"))
        ]
    mixture = moe_specs.moe_config(
        raw,
        _sparse_layers(raw),
        num_experts=60,
        intermediate_size="moe_intermediate_size",
        shared_intermediate_size=integer(raw, "shared_expert_intermediate_size"),
    )
    return common_config(
        raw,
        implements=(*_FIELDS, "shared_expert_intermediate_size", "qkv_bias"),
        moe=mixture,
        qkv_bias=boolean(raw, "qkv_bias", True),
    )


def qwen3_config(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3-MoE from its parsed `config.json`."""
    # A window is that of every layer here, whatever max_window_layers says.
    raw = _QWEN3_DEFAULTS | raw | {"max_window_layers": 0}
    mixture = moe_specs.moe_config(
        raw, _sparse_layers(raw), num_experts=128, intermediate_size="moe_intermediate_size"
    )
    biased = flag(raw, "attention_bias")
    return common_config(
        raw,
        implements=("attention_bias", *_FIELDS),
        moe=mixture,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
    )


def _sparse_layers(raw: dict[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has experts: every `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    num_layers, step = integer(raw, "num_hidden_layers"), integer(raw, "decoder_sparse_step")
    plain = raw.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        raise malformed("mlp_only_layers", plain, "a list of layers")
    return tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers))


def param_specs(config: ModelConfig) -> Params:
    """Llama's parameters, with experts."""
    projections = ("gate_proj", "up_proj", "down_proj")
    return moe_specs.with_experts(llama.param_specs(config), config, "mlp", projections)


QWEN2 = dataclasses.replace(llama.FAMILY, config_from_hf=qwen2_config, param_specs=param_specs)
QWEN3 = dataclasses.replace(llama.FAMILY, config_from_hf=qwen3_config, param_specs=param_specs)
