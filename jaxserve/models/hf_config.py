"""Reading a Hugging Face `config.json`: the fields that every family shares."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.config import ModelConfig, RopeConfig
from jaxserve.models.rope import frequencies


def common_config(raw: dict[str, Any], **family_fields: Any) -> ModelConfig:
    """ModelConfig from `raw`, with what the family knows better given by name.

    Raises UnsupportedModelError when a required field is absent or the activation is not SiLU.
    """
    try:
        hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or hidden_size // num_heads
        fields = {
            "architecture": raw["architectures"][0],
            "vocab_size": raw["vocab_size"],
            "hidden_size": hidden_size,
            "intermediate_size": raw["intermediate_size"],
            "num_layers": raw["num_hidden_layers"],
            "num_heads": num_heads,
            "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
            "head_dim": head_dim,
            "max_position_embeddings": raw["max_position_embeddings"],
            "rope": rope_config(raw, head_dim),
            "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
            "tie_word_embeddings": raw.get("tie_word_embeddings", False),
            "sliding_windows": sliding_windows(raw),
            "bos_token_id": raw.get("bos_token_id"),
            "eos_token_ids": token_ids(raw.get("eos_token_id")),
            "pad_token_id": raw.get("pad_token_id"),
            "name": raw.get("_name_or_path") or "",
        }
    except KeyError as error:
        raise UnsupportedModelError(
            f"config.json has no field {error.args[0]!r}, which {raw.get('architectures')} needs."
        ) from None
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"hidden_act {raw['hidden_act']!r} is not implemented for {fields['architecture']}; "
            "only 'silu' is."
        )
    return ModelConfig(**(fields | family_fields))


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, several, or none, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def sliding_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """Attention window per layer, in tokens; None where a layer attends to everything."""
    layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    if window is None or not raw.get("use_sliding_window", True):
        return (None,) * layers
    if kinds := raw.get("layer_types"):
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise UnsupportedModelError(
                f"layer_types has {sorted(unknown)}; known are full_attention, sliding_attention."
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = raw.get("max_window_layers", 0)
    return tuple(window if layer >= first else None for layer in range(layers))


def rope_config(raw: dict[str, Any], head_dim: int) -> RopeConfig:
    """RopeConfig from `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    Raises UnsupportedModelError for scaling that `rope.frequencies` does not know.
    """
    scaling = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    trained = raw["max_position_embeddings"]
    original = scaling.get("original_max_position_embeddings") or raw.get(
        "original_max_position_embeddings"
    )
    factor = scaling.get("factor")
    if factor is None and original and kind in ("longrope", "yarn"):
        factor = trained / original
    rope = RopeConfig(
        theta=float(theta),
        kind=kind,
        rotary_dim=int(head_dim * partial),
        factor=float(factor or 1.0),
        original_max_position=original or trained,
        low_freq_factor=scaling.get("low_freq_factor", 1.0),
        high_freq_factor=scaling.get("high_freq_factor", 4.0),
        attention_factor=scaling.get("attention_factor"),
        beta_fast=scaling.get("beta_fast") or 32.0,
        beta_slow=scaling.get("beta_slow") or 1.0,
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        truncate=scaling.get("truncate", True),
        short_factor=_floats(scaling.get("short_factor")),
        long_factor=_floats(scaling.get("long_factor")),
    )
    frequencies(rope, trained)  # refuses here what would fail only once programs are traced
    return rope


def _floats(values: list[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(float(value) for value in values)
