"""The gpt-oss family: a Llama of mixtures of experts, with an attention sink in every head.

Every other layer has a window. Routers and experts have biases, and the activation of experts is
clamped. Published files store the experts in MXFP4 (loading/fused_experts.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.core.model_config import ClampedSwiGLU, ModelConfig
from jaxserve.models import moe_specs
from jaxserve.models.config_fields import WINDOW_BY_LAYER, only
from jaxserve.models.families import llama
from jaxserve.models.family import Params
from jaxserve.models.hf_config import boolean, common_config, integer, number, with_layer_types

# Defaults of the transformers class, which a config.json may leave out.
_DEFAULTS = {
    "num_experts_per_tok": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig from the parsed `config.json`."""
    raw = with_layer_types(_DEFAULTS | raw, period=2)
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        raw["rope_scaling"] = _ROPE
    only(raw, "experts_per_token", None, raw["num_experts_per_tok"])  # its older name
    clamped = ClampedSwiGLU(number(raw, "swiglu_alpha"), number(raw, "swiglu_limit"))
    mixture = moe_specs.moe_config(
        raw,
        (True,) * integer(raw, "num_hidden_layers"),
        num_experts=128,
        norm_topk_prob=True,  # its softmax is over the chosen experts
    )
    biased = boolean(raw, "attention_bias", True)
    return common_config(
        raw,
        implements=(
            *("attention_bias", "swiglu_alpha", "swiglu_limit", "experts_per_token"),
            *WINDOW_BY_LAYER,
            *moe_specs.FIELDS,
        ),
        stored=("mxfp4",),
        moe=dataclasses.replace(mixture, biased=True, clamped=clamped),
        qkv_bias=biased,
        output_bias=biased,
        attention_sinks=True,
    )


def param_specs(config: ModelConfig) -> Params:
    """Llama's parameters, with sinks and experts."""
    projections = ("gate_proj", "up_proj", "down_proj")
    specs = llama.param_specs(config)
    return moe_specs.with_experts(specs, config, "mlp", projections, router="router")


FAMILY = dataclasses.replace(llama.FAMILY, config_from_hf=config_from_hf, param_specs=param_specs)
