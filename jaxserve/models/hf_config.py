"""Reading a Hugging Face `config.json`: the fields that every family shares."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from typing import Any

import numpy as np

from jaxserve.core.errors import ModelError, UnsupportedModelError
from jaxserve.core.model_config import ModelConfig, RopeConfig
from jaxserve.core.model_files import shown
from jaxserve.models.config_fields import refuse_others
from jaxserve.models.rope import frequencies

_ATTENTION_KINDS = ("full_attention", "sliding_attention")
_REQUIRED: Any = object()
_INT32_MAX = (1 << 31) - 1
# Several times those of the largest models. Sizes are checked before anything is made of that size.
_MAX_SIZE = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "shared_expert_intermediate_size": 1 << 20,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "n_routed_experts": 1 << 12,
    "n_shared_experts": 1 << 8,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 13,
    "q_lora_rank": 1 << 16,
    "kv_lora_rank": 1 << 13,
    "qk_nope_head_dim": 1 << 13,
    "qk_rope_head_dim": 1 << 13,
    "v_head_dim": 1 << 13,
    "num_nextn_predict_layers": 1 << 8,
    "max_position_embeddings": 1 << 28,
}
_ROPE_FIELDS = {
    *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings"),
    *("partial_rotary_factor", "low_freq_factor", "high_freq_factor", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor"),
    "finetuned",  # says how the weights came to be
}
_YARN_FIELDS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
_FIELDS_OF_KIND: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", *_YARN_FIELDS),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}
"""Fields of each `rope_type`, besides those of all: `rope_theta`, `partial_rotary_factor` and
`original_max_position_embeddings`."""
_NEUTRAL_ROPE = {"factor": 1, "attention_factor": 1, "truncate": True}
"""Values that change nothing where the `rope_type` does not have the field."""


def common_config(
    raw: dict[str, Any],
    *,
    implements: Collection[str] = (),
    activation: str = "silu",
    stored: Collection[str] = (),
    **family_fields: Any,
) -> ModelConfig:
    """ModelConfig from `raw`, with family-specific fields given by name.

    `implements` names the fields of `raw` that the family reads itself; `activation` is that of its
    MLP, `stored` has quantization methods in which its weights may be stored besides those that all
    families read. Raises ModelError for a field of the wrong type or out of range,
    UnsupportedModelError when a required field is absent, the weights are quantized otherwise, or a
    field asks for what the family does not implement (models/config_fields.py).
    """
    architecture = raw["architectures"][0]
    refuse_others(raw, implements, activation, stored)
    # For these fields only, null means absent.
    optional = ("head_dim", "num_key_value_heads", "bos_token_id", "pad_token_id")
    raw = {name: value for name, value in raw.items() if value is not None or name not in optional}
    vocab_size, num_heads = integer(raw, "vocab_size"), integer(raw, "num_attention_heads")
    head_dim = _head_dim(raw, num_heads)
    name = raw.get("_name_or_path") or ""
    if not isinstance(name, str):
        raise malformed("_name_or_path", name, "a string")
    fields = {
        "architecture": architecture,
        "vocab_size": vocab_size,
        "hidden_size": integer(raw, "hidden_size"),
        "intermediate_size": integer(raw, "intermediate_size"),
        "num_layers": integer(raw, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": integer(raw, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": integer(raw, "max_position_embeddings"),
        "rope": rope_config(raw, head_dim),
        "rms_norm_eps": number(raw, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": boolean(raw, "tie_word_embeddings", False),
        "sliding_windows": sliding_windows(raw),
        "bos_token_id": integer(raw, "bos_token_id", None, minimum=0),
        "eos_token_ids": eos_token_ids(raw, vocab_size),
        "pad_token_id": integer(raw, "pad_token_id", None, minimum=-1),  # Llama 2 has -1
        "name": name,
    }
    return ModelConfig(**(fields | family_fields))


def eos_token_ids(
    raw: dict[str, Any], vocab_size: int, file: str = "config.json"
) -> tuple[int, ...]:
    """The end-of-sequence ids of `file`: one, several or none; ModelError unless 0..vocab_size-1.

    Both a `config.json` and a `generation_config.json` may have them.
    """
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise malformed(
            "eos_token_id", value, f"an id, or a list of ids, in 0..{vocab_size - 1}", file
        )
    return tuple(ids)


def with_layer_types(raw: dict[str, Any], period: int) -> dict[str, Any]:
    """`raw` with the kinds of its layers: by default all have a window, except every `period`-th.

    Raises ModelError where layers have a window of no size.
    """
    kinds = raw.get("layer_types")
    if kinds is None:
        count = integer(raw, "num_hidden_layers")
        kinds = [
            "sliding_attention" if (index + 1) % period else "full_attention"
            for index in range(count)
        ]
    if isinstance(kinds, list) and "sliding_attention" in kinds:
        integer(raw, "sliding_window")
    return raw | {"layer_types": kinds}


def sliding_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """Attention window per layer, in tokens; None for full attention."""
    layers, kinds = integer(raw, "num_hidden_layers"), raw.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise malformed("layer_types", kinds, f"a list of {layers}, one for each layer")
        if unknown := [kind for kind in kinds if kind not in _ATTENTION_KINDS][:1]:
            raise UnsupportedModelError(
                f"layer_types has {shown(unknown)}; known are {', '.join(_ATTENTION_KINDS)}."
            )
    if raw.get("sliding_window") is None or not boolean(raw, "use_sliding_window", True):
        return (None,) * layers
    window = integer(raw, "sliding_window")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = integer(raw, "max_window_layers", 0, minimum=0)
    return tuple(window if layer >= first else None for layer in range(layers))


def rope_config(raw: dict[str, Any], head_dim: int) -> RopeConfig:
    """RopeConfig from `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    Raises ModelError for a field of the wrong type or out of range, UnsupportedModelError for
    scaling that `rope.frequencies` does not know.
    """
    scaling = _rope_fields(raw)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    _refuse_rope_fields(scaling, kind)
    trained = integer(raw, "max_position_embeddings")
    original = integer(scaling, "original_max_position_embeddings", None)
    if kind in ("longrope", "yarn") and original:
        factor = number(scaling, "factor", trained / original)
    elif kind in ("linear", "dynamic", "llama3", "yarn"):
        factor = number(scaling | {"factor": scaling.get("factor")}, "factor")
    else:
        factor = number(scaling, "factor", 1.0)
    partial = number(scaling, "partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * min(partial, 1.0))
    if partial > 1 or rotary_dim < 2 or rotary_dim % 2:
        required = f"in (0, 1] and leave an even part of head_dim {head_dim}"
        raise malformed("partial_rotary_factor", partial, required)
    rope = RopeConfig(
        theta=number(scaling, "rope_theta", 10_000.0, above=1.0),
        kind=kind,
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_position=original or trained,
        low_freq_factor=number(scaling, "low_freq_factor", 1.0),
        high_freq_factor=number(scaling, "high_freq_factor", 4.0),
        attention_factor=number(scaling, "attention_factor", None),
        beta_fast=number(scaling, "beta_fast", 32.0),
        beta_slow=number(scaling, "beta_slow", 1.0),
        mscale=number(scaling, "mscale", None, above=-math.inf),
        mscale_all_dim=number(scaling, "mscale_all_dim", None, above=-math.inf),
        truncate=boolean(scaling, "truncate", True),
        short_factor=_factors(scaling, "short_factor"),
        long_factor=_factors(scaling, "long_factor"),
    )
    if kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        required = f"above low_freq_factor {rope.low_freq_factor}"
        raise malformed("high_freq_factor", rope.high_freq_factor, required)
    try:
        # Fails here rather than when programs are traced.
        for context in {trained, rope.original_max_position}:
            with np.errstate(all="ignore"):
                inverse, scale = frequencies(rope, context)
            if not (np.isfinite(inverse).all() and math.isfinite(scale)):
                raise ArithmeticError("a frequency is not finite")
    except (ArithmeticError, ValueError) as error:
        raise ModelError(
            f"config.json asks for {shown(rope)}, which is undefined: {error}."
        ) from error
    return rope


def _head_dim(raw: dict[str, Any], num_heads: int) -> int:
    hidden_size = integer(raw, "hidden_size")
    if "head_dim" not in raw and hidden_size % num_heads:
        required = f"a multiple of num_attention_heads {num_heads}, as there is no head_dim"
        raise malformed("hidden_size", hidden_size, required)
    return integer(raw, "head_dim", hidden_size // num_heads)


def _rope_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """All fields about rotation, without nulls: the newer location overrides the older."""
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    fields = {name: raw.get(name) for name in names}
    for place in ("rope_scaling", "rope_parameters"):
        inner = {} if raw.get(place) is None else raw[place]
        if not isinstance(inner, dict):
            raise malformed(place, inner, "an object")
        if unknown := sorted(name for name in inner.keys() - _ROPE_FIELDS if inner[name]):
            raise UnsupportedModelError(
                f"{place} has {unknown[0]} {shown(inner[unknown[0]])}, which is not implemented."
            )
        fields |= {name: value for name, value in inner.items() if value is not None}
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_rope_fields(scaling: dict[str, Any], kind: Any) -> None:
    """Raises UnsupportedModelError for a field that scaling of this kind does not read."""
    if scaling.get("type", kind) != kind:
        raise UnsupportedModelError(
            f"config.json has the rope_type {shown(kind)} and the type {shown(scaling['type'])}; "
            "remove one of them."
        )
    if not isinstance(kind, str) or kind not in _FIELDS_OF_KIND:
        return  # `rope.frequencies` refuses it
    others = set().union(*_FIELDS_OF_KIND.values()) - set(_FIELDS_OF_KIND[kind])
    for name in sorted(others & scaling.keys()):
        if scaling[name] != _NEUTRAL_ROPE.get(name):
            raise UnsupportedModelError(
                f"config.json has a rotation with {name} {shown(scaling[name])}, which the "
                f"rope_type {kind!r} does not have; remove it, or correct the rope_type."
            )


def integer(raw: dict[str, Any], name: str, default: Any = _REQUIRED, minimum: int = 1) -> Any:
    """The integer `name`; `default`, which may be None, where it is absent.

    Raises ModelError unless it is from `minimum` to the most that any model has.
    """
    if name not in raw:
        return _default(raw, name, default)
    value = raw[name]
    maximum = _MAX_SIZE.get(name, _INT32_MAX)
    # isinstance would let True pass for 1
    if type(value) is not int or not minimum <= value <= maximum:
        raise malformed(name, value, f"an integer of at least {minimum} and at most {maximum}")
    return value


def number(raw: dict[str, Any], name: str, default: Any = _REQUIRED, above: float = 0.0) -> Any:
    """The finite number `name` as a float; `default`, which may be None, where it is absent.

    Raises ModelError unless it is larger than `above`.
    """
    if name not in raw:
        return _default(raw, name, default)
    if not _is_number(raw[name], above):
        raise malformed(name, raw[name], f"a number above {above:g}")
    return float(raw[name])


def boolean(raw: dict[str, Any], name: str, default: bool, file: str = "config.json") -> bool:
    """The field `name`, or `default` where it is absent; ModelError unless true or false."""
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise malformed(name, value, "true or false", file)
    return value


def flag(raw: dict[str, Any], name: str) -> bool:
    """The field `name`, false where it is absent or null; ModelError unless true or false."""
    return raw.get(name) is not None and boolean(raw, name, False)


def _factors(raw: dict[str, Any], name: str) -> tuple[float, ...] | None:
    values = raw.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or not all(_is_number(value, 0.0) for value in values):
        raise malformed(name, values, "a list of numbers above 0")
    return tuple(float(value) for value in values)


def _is_number(value: Any, above: float) -> bool:
    return type(value) in (int, float) and above < value <= sys.float_info.max


def _default(raw: dict[str, Any], name: str, default: Any) -> Any:
    if default is _REQUIRED:
        raise UnsupportedModelError(
            f"config.json has no field {name!r}, which {shown(raw.get('architectures'))} needs."
        )
    return default


def malformed(name: str, value: Any, required: str, file: str = "config.json") -> ModelError:
    """The error for field `name` of `file`, whose `value` is not what is `required`."""
    return ModelError(f"{file} has {name} {shown(value)}; it must be {required}.")
