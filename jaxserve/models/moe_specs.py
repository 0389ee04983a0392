"""Mixtures of experts as checkpoints have them: fields of `config.json`, and parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxserve.core.model_config import ModelConfig, MoEConfig
from jaxserve.models.family import AnySpec, Params, ParamSpec, TensorPart, one_tensor
from jaxserve.models.hf_config import boolean, integer, malformed

_COUNTS = ("num_experts", "num_local_experts")
FIELDS = (*_COUNTS, "num_experts_per_tok")
"""Fields that `moe_config` reads for every family, for the `implements` of `common_config`."""
# Several times those of the largest models, in all layers.
_MAX_EXPERTS = 1 << 16


def moe_config(
    raw: dict[str, Any],
    sparse_layers: tuple[bool, ...],
    *,
    num_experts: int,
    intermediate_size: str = "intermediate_size",
    shared_intermediate_size: int = 0,
    norm_topk_prob: bool | None = None,
) -> MoEConfig:
    """The mixture of a parsed `config.json`.

    `num_experts` is for a config without that field, `intermediate_size` the name of the field with
    the inner dimension of an expert; `norm_topk_prob` is the field of that name unless given.
    Raises ModelError for a field of the wrong type or out of range.
    """
    experts, chosen = _num_experts(raw, num_experts), integer(raw, "num_experts_per_tok")
    if chosen > experts:
        raise malformed("num_experts_per_tok", chosen, f"at most the number of experts, {experts}")
    if experts > (most := _MAX_EXPERTS // len(sparse_layers)):
        raise malformed("num_experts", experts, f"at most {most} in {len(sparse_layers)} layers")
    if norm_topk_prob is None:
        norm_topk_prob = boolean(raw, "norm_topk_prob", False)
    return MoEConfig(
        num_experts=experts,
        num_experts_per_tok=chosen,
        intermediate_size=integer(raw, intermediate_size),
        sparse_layers=sparse_layers,
        shared_intermediate_size=shared_intermediate_size,
        norm_topk_prob=norm_topk_prob,
    )


def _num_experts(raw: dict[str, Any], default: int) -> int:
    """The number of experts, by either of the two names that versions of transformers write."""
    names = [name for name in _COUNTS if raw.get(name) is not None]
    found = {integer(raw, name) for name in names} or {default}
    if len(found) > 1:
        required = f"num_experts {raw['num_experts']}"
        raise malformed("num_local_experts", raw["num_local_experts"], required)
    return found.pop()


def with_experts(
    specs: Params,
    config: ModelConfig,
    block: str,
    projections: tuple[str, str, str],
    router: str = "gate",
    shared: str = "shared_expert",
) -> Params:
    """A Llama's `specs` with a mixture instead of the MLP in its sparse layers.

    `block` is the mixture's name in a layer, `projections` those of an expert's gate, up and down;
    `router` and `shared` are those of the router and of the expert that all tokens share.
    """
    for index, (kind, layer) in enumerate(zip(config.layer_kinds, specs["layers"])):
        if kind.sparse:
            del layer["gate_up"], layer["down"]
            prefix = f"model.layers.{index}.{block}."
            names = prefix + router, f"{prefix}{shared}."
            layer |= _mixture_specs(config, prefix, projections, *names)
    return specs


def _mixture_specs(
    config: ModelConfig, prefix: str, projections: tuple[str, str, str], router: str, shared: str
) -> dict[str, ParamSpec]:
    hidden, moe = config.hidden_size, config.moe
    count, ff = moe.num_experts, moe.intermediate_size
    gate, up, down = projections
    experts = [f"{prefix}experts.{index}." for index in range(count)]
    specs = {
        "router": one_tensor(router + ".weight", (count, hidden), (None, "embed")),
        "experts_gate_up": ParamSpec(
            shape=(2 * count, ff, hidden),
            axes=("experts", "expert_mlp", "embed"),
            parts=tuple(
                TensorPart(f"{expert}{half}.weight", (1, ff, hidden))
                for expert in experts
                for half in (gate, up)
            ),
            num_inputs=1,
        ),
        "experts_down": ParamSpec(
            shape=(count, hidden, ff),
            axes=("experts", "embed", "expert_mlp"),
            parts=tuple(
                TensorPart(f"{expert}{down}.weight", (1, hidden, ff)) for expert in experts
            ),
            num_inputs=1,
        ),
    }
    if moe.biased:
        specs |= {
            "router_bias": one_tensor(router + ".bias", (count,), (None,), init="zeros"),
            "experts_gate_up_bias": ParamSpec(
                shape=(2 * count, ff),
                axes=("experts", "expert_mlp"),
                parts=tuple(
                    TensorPart(f"{expert}{half}.bias", (1, ff))
                    for expert in experts
                    for half in (gate, up)
                ),
                init="zeros",
            ),
            "experts_down_bias": ParamSpec(
                shape=(count, hidden),
                axes=("experts", "embed"),
                parts=tuple(TensorPart(f"{expert}{down}.bias", (1, hidden)) for expert in experts),
                init="zeros",
            ),
        }
    if moe.corrected:
        correction = one_tensor(router + ".e_score_correction_bias", (count,), (None,), "zeros")
        specs["router_correction"] = dataclasses.replace(correction, dtype="float32")
    if ff := moe.shared_intermediate_size:
        if moe.shared_gate:
            specs["shared_router"] = one_tensor(
                prefix + "shared_expert_gate.weight", (1, hidden), (None, "embed")
            )
        specs |= {
            "shared_gate_up": ParamSpec(
                shape=(2, ff, hidden),
                axes=("gate_up", "mlp", "embed"),
                parts=(
                    TensorPart(f"{shared}{gate}.weight", (1, ff, hidden)),
                    TensorPart(f"{shared}{up}.weight", (1, ff, hidden)),
                ),
                num_inputs=1,
            ),
            "shared_down": one_tensor(
                f"{shared}{down}.weight", (hidden, ff), ("embed", "mlp"), num_inputs=1
            ),
        }
    return specs


def active_size(config: ModelConfig, spec: AnySpec) -> int:
    """Entries of a parameter that one token is multiplied with: of a mixture, its own experts'."""
    if "experts" not in spec.axes:
        return spec.size
    return spec.size * config.moe.num_experts_per_tok // config.moe.num_experts


def active_parameters(config: ModelConfig, specs: Params) -> int:
    """Number of parameters without the experts that one token does not take."""
    return sum(active_size(config, spec) for spec in jax.tree.leaves(specs))
