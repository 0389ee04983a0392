"""The Gemma 3 family (2503.19786), its text model: a Gemma 2 with normed queries and keys.

Five in six layers have a window, and rotate by a base of their own. Models that also see have the
text model's config in `text_config` and its tensors below `language_model`; they answer text only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.models import rope
from jaxserve.models.families import gemma2, llama
from jaxserve.models.family import Attention, Params, ParamSpec
from jaxserve.models.hf_config import integer, malformed, rope_config, with_layer_types

# Defaults of the transformers class. Of a config of its own, some may be left out; of a
# `text_config` within another, all.
_DEFAULTS = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_THETA, _WINDOW_THETA = 1_000_000.0, 10_000.0
_PERIOD = 6
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
_VISION = (
    *("vision_config", "mm_tokens_per_image", "image_token_index", "image_token_id"),
    *("boi_token_index", "eoi_token_index"),
)
"""Fields of the vision tower, which is not loaded, and of its tokens in a prompt."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig from the parsed `config.json`, or from the `text_config` in it."""
    raw = _DEFAULTS | _text_fields(raw)
    periods = [integer(raw, name) for name in _PATTERNS if raw.get(name) is not None]
    full, windowed = _rope_fields(with_layer_types(raw, periods[0] if periods else _PERIOD))
    config = gemma2.gemma_config(
        full, implements=("rope_local_base_freq", *_PATTERNS, *_VISION), qk_norm=True
    )
    return dataclasses.replace(config, window_rope=rope_config(windowed, config.head_dim))


def _text_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model, where they are those of another model's part."""
    if "text_config" not in raw:
        return raw
    text = raw["text_config"]
    if not isinstance(text, dict):
        raise malformed("text_config", text, "an object")
    whole = {name: value for name, value in raw.items() if name != "text_config"}
    return _TEXT_DEFAULTS | text | whole


def _rope_fields(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`raw` with the rotation of full layers, and with that of layers with a window.

    `rope_parameters` has both. Without it, `rope_theta` and `rope_scaling` are of full layers.
    """
    of_kind = {} if raw.get("rope_parameters") is None else raw["rope_parameters"]
    if not isinstance(of_kind, dict) or of_kind.keys() - set(_LAYER_TYPES):
        required = f"an object with {' and '.join(_LAYER_TYPES)}"
        raise malformed("rope_parameters", of_kind, required)

    def theta(name: str, default: float) -> Any:
        return default if raw.get(name) is None else raw[name]

    full, windowed = (of_kind.get(kind) for kind in _LAYER_TYPES)
    return (
        raw | {"rope_theta": theta("rope_theta", _THETA), "rope_parameters": full},
        raw
        | {"rope_theta": theta("rope_local_base_freq", _WINDOW_THETA), "rope_parameters": windowed}
        | {"rope_scaling": None},
    )


LocalAndGlobalRotations = tuple[llama.Rotations, llama.Rotations]
"""Those of full layers, and of layers with a window."""


def embed(
    params: Params, config: ModelConfig, token_ids: jax.Array, positions: jax.Array
) -> tuple[jax.Array, LocalAndGlobalRotations]:
    """Gemma 2's embeddings, and both rotations."""
    x, full = gemma2.embed(params, config, token_ids, positions)
    window_rope = config.window_rope or config.rope
    return x, (full, rope.rotation(window_rope, config.max_position_embeddings, positions))


def layer(
    p: Params,
    config: ModelConfig,
    kind: LayerKind,
    x: jax.Array,
    rotations: LocalAndGlobalRotations,
    attention: Attention,
) -> jax.Array:
    """Gemma 2's layer, rotated as its kind is."""
    full, windowed = rotations
    own = full if kind.window is None else windowed
    return gemma2.layer(p, config, kind, x, own, attention)


FAMILY = dataclasses.replace(gemma2.FAMILY, config_from_hf=config_from_hf, embed=embed, layer=layer)


def _param_specs_beside_vision(config: ModelConfig) -> Params:
    def renamed(spec: ParamSpec) -> ParamSpec:
        parts = [
            dataclasses.replace(part, tensor=f"language_model.{part.tensor}") for part in spec.parts
        ]
        return dataclasses.replace(spec, parts=tuple(parts))

    return jax.tree.map(renamed, gemma2.param_specs(config))


BESIDE_VISION = dataclasses.replace(
    FAMILY,
    param_specs=_param_specs_beside_vision,
    other_tensors=("vision_tower.", "multi_modal_projector."),
)
