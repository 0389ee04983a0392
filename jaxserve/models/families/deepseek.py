"""DeepSeek V2 (2405.04434) and V3 (2412.19437): Llamas of latent attention and mixtures.

The first layers have a plain MLP. The others have experts that every token takes, in one, and
choose further ones within groups of experts: V2 by the softmax of its router, V3 by sigmoids that
each expert corrects. The layers of V3 that predict further tokens are no part of
the family (models/drafters/mtp.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.core.model_config import ExpertGroups, LayerKind, MLAConfig, ModelConfig, MoEConfig
from jaxserve.models import layers, mla, moe_specs, rope
from jaxserve.models.config_fields import only
from jaxserve.models.families import llama
from jaxserve.models.family import Attention, Params
from jaxserve.models.hf_config import boolean, common_config, flag, integer, malformed, number

# Defaults of the transformers classes, which a config.json may leave out.
_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V2_DEFAULTS = _DEFAULTS | {
    "moe_intermediate_size": 1407,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,  # the class has none
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
_V3_DEFAULTS = _DEFAULTS | {
    "moe_intermediate_size": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
_MAX_MSCALE = 100  # published models have 1 or less
_FIELDS = (
    *("attention_bias", "first_k_dense_replace", "moe_intermediate_size", "norm_topk_prob"),
    *("n_group", "n_routed_experts", "n_shared_experts", "routed_scaling_factor", "scoring_func"),
    *("topk_group", "topk_method", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "qk_head_dim", "v_head_dim", "rope_interleave"),
    *moe_specs.FIELDS,
)


def v2_config(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a DeepSeek V2 from its parsed `config.json`."""
    raw = _V2_DEFAULTS | raw
    only(raw, "topk_method", None, "greedy", "group_limited_greedy")
    only(raw, "scoring_func", None, "softmax")
    only(raw, "norm_topk_prob", None, False)
    mixture = _mixture(raw)
    if raw["topk_method"] == "group_limited_greedy":
        mixture = dataclasses.replace(mixture, groups=_groups(raw, mixture, best=1))
    return _config(raw, mixture)


def v3_config(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a DeepSeek V3 from its parsed `config.json`."""
    raw = _V3_DEFAULTS | raw
    only(raw, "topk_method", None, "noaux_tc")
    only(raw, "scoring_func", None, "sigmoid")
    mixture = dataclasses.replace(_mixture(raw), scores="sigmoid", corrected=True)
    mixture = dataclasses.replace(mixture, groups=_groups(raw, mixture, best=2))
    config = _config(raw, mixture, "num_nextn_predict_layers")
    further = integer(raw, "num_nextn_predict_layers", minimum=0)
    return dataclasses.replace(config, num_mtp_layers=further)


def _mixture(raw: dict[str, Any]) -> MoEConfig:
    dense = integer(raw, "first_k_dense_replace", minimum=0)
    inner = integer(raw, "moe_intermediate_size")
    mixture = moe_specs.moe_config(
        raw | {"num_experts": integer(raw, "n_routed_experts")},
        tuple(layer >= dense for layer in range(integer(raw, "num_hidden_layers"))),
        num_experts=0,
        intermediate_size="moe_intermediate_size",
        shared_intermediate_size=inner * integer(raw, "n_shared_experts", minimum=0),
    )
    scale = number(raw, "routed_scaling_factor")
    return dataclasses.replace(mixture, shared_gate=False, routed_scale=scale)


def _groups(raw: dict[str, Any], mixture: MoEConfig, best: int) -> ExpertGroups | None:
    """The groups of experts, each scored by its `best` best; None for a single one."""
    count, chosen = integer(raw, "n_group"), integer(raw, "topk_group")
    experts, each = mixture.num_experts, mixture.num_experts // count
    if experts % count or (count > 1 and each < best):
        required = f"a divisor of n_routed_experts {experts}, with groups of {best} or more"
        raise malformed("n_group", count, required)
    if chosen > count or chosen * each < mixture.num_experts_per_tok:
        required = (
            f"at most n_group {count}, and have the {mixture.num_experts_per_tok} experts of a "
            f"token in groups of {each}"
        )
        raise malformed("topk_group", chosen, required)
    return ExpertGroups(count, chosen, best) if chosen < count else None


def _config(raw: dict[str, Any], mixture: MoEConfig, *further: str) -> ModelConfig:
    """The config, of whose fields `further` ones are those of one version."""
    latent = MLAConfig(
        q_rank=None if raw["q_lora_rank"] is None else integer(raw, "q_lora_rank"),
        kv_rank=integer(raw, "kv_lora_rank"),
        nope_dim=integer(raw, "qk_nope_head_dim"),
        rope_dim=integer(raw, "qk_rope_head_dim"),
        value_dim=integer(raw, "v_head_dim"),
        interleaved=boolean(raw, "rope_interleave", True),
    )
    only(raw, "qk_head_dim", None, latent.nope_dim + latent.rope_dim)
    only(raw, "head_dim", None, latent.rope_dim)
    for name in ("num_experts", "num_local_experts"):  # other names of the same
        only(raw, name, None, mixture.num_experts)
    biased = flag(raw, "attention_bias")
    config = common_config(
        raw | {"head_dim": latent.rope_dim},  # that part of a head alone rotates
        implements=(*_FIELDS, *further),
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope_dim,
        qkv_bias=biased,
        output_bias=biased,
        mla=latent,
        moe=mixture,
    )
    heads = config.num_heads
    if raw.get("num_key_value_heads") not in (None, heads):
        required = f"num_attention_heads {heads}, as every head has keys of its own"
        raise malformed("num_key_value_heads", raw["num_key_value_heads"], required)
    # YaRN stretches all of a head here, also what does not rotate.
    stretch, rotation = 1.0, config.rope
    if rotation.kind != "default" and rotation.mscale_all_dim:
        if not 0 < rotation.mscale_all_dim <= _MAX_MSCALE:
            required = f"a number from 0 to {_MAX_MSCALE}"
            raise malformed("mscale_all_dim", rotation.mscale_all_dim, required)
        stretch = rope.magnitude(rotation, rotation.mscale_all_dim)
    dim = latent.nope_dim + latent.rope_dim
    return dataclasses.replace(config, query_pre_attn_scalar=dim / stretch**4)


def param_specs(config: ModelConfig) -> Params:
    """Llama's parameters, with latent attention and experts."""
    specs = mla.with_latents(llama.param_specs(config), config)
    projections = ("gate_proj", "up_proj", "down_proj")
    return moe_specs.with_experts(specs, config, "mlp", projections, shared="shared_experts")


def layer(
    p: Params,
    config: ModelConfig,
    kind: LayerKind,
    x: layers.Residual,
    rotations: llama.Rotations,
    attention: Attention,
) -> layers.Residual:
    """One pre-norm block: x [tokens, hidden] plus its attention, plus its MLP or mixture."""
    x, normed = layers.normed(x, p["attn_norm"], config.rms_norm_eps)
    attended = mla.attend(p, config, kind, normed, rotations, attention)
    x = x + layers.row_parallel(p["attn_out"], attended, p.get("attn_out_bias"))
    normed = layers.rms_norm(x, p["mlp_norm"], config.rms_norm_eps)
    return llama.add_mlp(p, config, kind, x, normed)


V2 = dataclasses.replace(
    llama.FAMILY, config_from_hf=v2_config, param_specs=param_specs, layer=layer
)
V3 = dataclasses.replace(V2, config_from_hf=v3_config)
