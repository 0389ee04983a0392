"""The Phi-3 family (2404.14219), Phi-4 and Phi-4-mini with it: a Llama whose projections are fused.

One tensor has the queries, then the keys, then the values of all heads; another the MLP's gate and
its inputs. Part of a head may rotate, by one list of factors for short contexts and another for
long ones: which, follows from the engine's context (models/rope.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from jaxserve.core.model_config import ModelConfig
from jaxserve.models.config_fields import WINDOW
from jaxserve.models.families import llama
from jaxserve.models.family import Params, ParamSpec
from jaxserve.models.hf_config import common_config

# Defaults of the transformers class, which a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
_OLD_LONGROPE = ("su", "yarn")


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig from the parsed `config.json`."""
    raw = _DEFAULTS | raw
    for place in ("rope_scaling", "rope_parameters"):
        if isinstance(raw.get(place), dict):
            raw = raw | {place: _renamed(raw[place])}
    return common_config(raw, implements=(*WINDOW, "partial_rotary_factor"))


def _renamed(scaling: dict[str, Any]) -> dict[str, Any]:
    """The fields of a rotation, whose method had other names when Phi-3 came out."""
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind not in _OLD_LONGROPE:
        return scaling
    return {name: scaling[name] for name in scaling if name != "type"} | {"rope_type": "longrope"}


def param_specs(config: ModelConfig) -> Params:
    """Llama's parameters, out of fused tensors."""
    specs = llama.param_specs(config)
    for index, layer_specs in enumerate(specs["layers"]):
        prefix = f"model.layers.{index}."
        for name, tensor in (("qkv", "self_attn.qkv_proj"), ("gate_up", "mlp.gate_up_proj")):
            layer_specs[name] = _fused(layer_specs[name], f"{prefix}{tensor}.weight")
    return specs


def _fused(spec: ParamSpec, tensor: str) -> ParamSpec:
    """The parameter with its parts below each other in one tensor."""
    rows = [math.prod(part.shape[: -spec.num_inputs]) for part in spec.parts]
    parts = [
        dataclasses.replace(part, tensor=tensor, first=first, rows=sum(rows))
        for part, first in zip(spec.parts, itertools.accumulate(rows, initial=0))
    ]
    return dataclasses.replace(spec, parts=tuple(parts))


FAMILY = dataclasses.replace(llama.FAMILY, config_from_hf=config_from_hf, param_specs=param_specs)
