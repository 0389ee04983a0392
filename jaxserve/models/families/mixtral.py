"""The Mixtral family (2401.04088): a Llama whose MLPs are mixtures of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.core.model_config import ModelConfig
from jaxserve.models import moe_specs
from jaxserve.models.config_fields import WINDOW
from jaxserve.models.families import llama
from jaxserve.models.family import Params
from jaxserve.models.hf_config import common_config, integer

# Defaults of the transformers class, which a config.json may leave out.
_DEFAULTS = {
    "num_experts_per_tok": 2,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-5,
}


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig from the parsed `config.json`."""
    raw = _DEFAULTS | raw
    mixture = moe_specs.moe_config(
        raw,
        (True,) * integer(raw, "num_hidden_layers"),
        num_experts=8,
        norm_topk_prob=True,
    )
    return common_config(raw, implements=(*WINDOW, *moe_specs.FIELDS), moe=mixture)


def param_specs(config: ModelConfig) -> Params:
    """Llama's parameters, with experts."""
    specs = llama.param_specs(config)
    return moe_specs.with_experts(specs, config, "block_sparse_moe", ("w1", "w3", "w2"))


FAMILY = dataclasses.replace(llama.FAMILY, config_from_hf=config_from_hf, param_specs=param_specs)
