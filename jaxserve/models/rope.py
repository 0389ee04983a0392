"""Rotary position embedding and its methods for longer contexts.

A rotation is defined by inverse frequencies, computed once in float64 while a program is traced,
and by a factor on the attention logits that some methods need. Keys are cached after rotation, so
the frequencies may depend on the engine's configured context, never on a request's length: the two
methods that Hugging Face switches at run time (`dynamic`, `longrope`) depend on `context` here.

Sources: RoFormer (2104.09864), position interpolation (2306.15595), NTK-aware scaling,
YaRN (2309.00071), LongRoPE (2402.13753), Llama 3.1's frequency bands.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.core.model_config import RopeConfig
from jaxserve.core.model_files import shown


def frequencies(rope: RopeConfig, context: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [rotary_dim / 2] and the factor that cos and sin are multiplied by.

    `context` is the longest sequence to be served, in tokens. Raises UnsupportedModelError for an
    unknown kind or one whose lists do not match `rotary_dim`.
    """
    dim = rope.rotary_dim
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    base = 1.0 / rope.theta**exponents
    original = rope.original_max_position or context
    match rope.kind:
        case "default":
            return base, 1.0
        case "linear":
            return base / rope.factor, 1.0
        case "dynamic":
            stretch = rope.factor * max(context, original) / original - (rope.factor - 1)
            theta = rope.theta * stretch ** (dim / (dim - 2))
            return 1.0 / theta**exponents, 1.0
        case "llama3":
            return _llama3(rope, base, original), 1.0
        case "yarn":
            return _yarn(rope, base, original)
        case "longrope":
            return _longrope(rope, base, original, context)
    raise UnsupportedModelError(
        f"rope scaling {shown(rope.kind)} is not known; known are default, linear, dynamic, "
        "llama3, yarn and longrope."
    )


def _llama3(rope: RopeConfig, base: np.ndarray, original: int) -> np.ndarray:
    """Slow rotations are interpolated, fast ones kept, and the band between is blended."""
    turns = original * base / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(rope: RopeConfig, base: np.ndarray, original: int) -> tuple[np.ndarray, float]:
    dim = rope.rotary_dim

    def dimension_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    scaled = base / rope.factor * ramp + base * (1 - ramp)

    if rope.attention_factor is not None:
        return scaled, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scaled, magnitude(rope, rope.mscale) / magnitude(rope, rope.mscale_all_dim)
    return scaled, magnitude(rope, 1.0)


def magnitude(rope: RopeConfig, mscale: float) -> float:
    """YaRN's factor of queries and keys, which grows with the stretch of the context."""
    return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _longrope(
    rope: RopeConfig, base: np.ndarray, original: int, context: int
) -> tuple[np.ndarray, float]:
    factors = rope.long_factor if context > original else rope.short_factor
    if factors is None or len(factors) != base.size:
        raise UnsupportedModelError(
            f"longrope needs {base.size} short and long factors (half of rotary_dim "
            f"{rope.rotary_dim}); the config gives {None if factors is None else len(factors)}."
        )
    scaled = base / np.asarray(factors, np.float64)
    if rope.attention_factor is not None:
        return scaled, rope.attention_factor
    if rope.factor <= 1.0:
        return scaled, 1.0
    return scaled, math.sqrt(1 + math.log(rope.factor) / math.log(original))


def rotation(rope: RopeConfig, context: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [tokens, rotary_dim / 2] float32 for int32 positions [tokens]."""
    inverse, factor = frequencies(rope, context)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse, jnp.float32)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [tokens, heads, head_dim] by pairs (i, i + rotary_dim / 2), as Hugging Face does."""
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    cos, sin = (each.astype(x.dtype)[:, None] for each in (cos, sin))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def halves(x: jax.Array) -> jax.Array:
    """x [..., dim] with its even dimensions first, then the odd ones: what some checkpoints rotate
    by neighbours (2i, 2i + 1), `rotate` then does."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)
