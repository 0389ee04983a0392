"""A model that recalls, at any distance, what last followed a token, with constructed weights.

It is an induction head (2209.11895) as a Qwen2 on disk, with one head per layer; no layer is
trained, and all weights are constructed here. A token is a word of the extended Golay code, 24
features of +1 and -1, of which any two of the 4,096 differ in at least 8 places: their product is
24 for the same token and at most 8 for two. The residual stream consists of parts of 24 features:

    part 0: the token        part 1: the token before        part 2: what last followed the token

- A layer with a sliding window of 4 attends to the token before and copies it to part 1. Only the
  distance matters: queries and keys are biases. Their pair of features rotates by one radian per
  token, and they are one radian apart, so that the score at distance d is 400 cos(d - 1).
- A layer of full attention looks for positions whose token before is this token, copies the token
  there to part 2, and of several takes the last. Matching uses features that (almost) do not
  rotate, recency a pair that makes a quarter turn over the whole context.

The LM head reads part 2. MLPs are zero.

All three speeds of rotation are factors of a "longrope" (LongRoPE, 2402.13753), as the "long" ones
of a context beyond the original; with the "short" ones all features rotate, and nothing matches.
Its factor on attention, from 1 at 4,096 tokens to 1.7 at a million, makes every score larger.

Margins, in nats, for scores as `MATCH` and `RECENCY` set them: a match scores 240 and any other
token at most 80; recency adds from +57 here to -57 at the far end of the context. So a match
anywhere is at least 47 ahead of any other token, which is 33 ahead of a million of them together.
Of two matches, the later one is ahead by 89 times their distance over the context, or more.

With two hops, there is another pair of layers, which looks up what followed the token that was
found: variable tracking, in the terms of RULER (2404.06654). Its sliding layer has nothing left to
do. Results are written at a tenth of a code word's size, so that norms depend little on how
distinct the match was.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models

BITS = 24
VOCAB = 4096
HEAD_DIM = BITS + 4
WINDOW = 4
ORIGINAL_CONTEXT = 4096
"""Tokens from which on longrope's long factors count."""
PREVIOUS = 400.0
"""Score of the token before, in nats; the next best has 0.54 of it."""
MATCH = 240.0
RECENCY = 80.0
FOUND = 0.1
"""Size of what is found, in the residual stream."""

_FAST, _SLOW = 0, 1
_HALF = HEAD_DIM // 2
_CODE = [*range(2, _HALF), *range(_HALF + 2, HEAD_DIM)]
"""Features of a head by what they are for: pair i is features i and i + _HALF."""
_GOLAY = 0b110001110101
"""Generator polynomial of the Golay code of 23 bits."""
_STILL = 1e9
"""Rotation is slowed by this much where it is not wanted: to a thousandth in a million tokens."""


def write_induction_model(directory: Path, context: int, hops: int = 1) -> Path:
    """A Hugging Face directory of the model for sequences of up to `context` tokens.

    Its greedy next token after a known token x is what last followed x, or with two hops what last
    followed that. Raises ValueError unless the context is longer than ORIGINAL_CONTEXT.
    """
    if context <= ORIGINAL_CONTEXT:
        raise ValueError(f"context is {context}; longrope needs more than {ORIGINAL_CONTEXT}.")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(context, hops)))
    save_file(_tensors(hops), directory / "model.safetensors")
    tokenizer = tokenizers.Tokenizer(models.BPE({f"t{id}": id for id in range(VOCAB)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def _config(context: int, hops: int) -> dict[str, Any]:
    theta = 10_000.0
    slow = 2 * context / math.pi * theta ** (-_SLOW / _HALF)  # a quarter of a turn in all
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": (2 + hops) * BITS,
        "intermediate_size": 8,
        "num_hidden_layers": 2 * hops,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "layer_types": ["sliding_attention", "full_attention"] * hops,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_position_embeddings": context,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": theta,
            "factor": context / ORIGINAL_CONTEXT,
            "original_max_position_embeddings": ORIGINAL_CONTEXT,
            "short_factor": [1.0] * _HALF,
            "long_factor": [1.0, slow] + [_STILL] * (_HALF - 2),
        },
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }


def code_words() -> np.ndarray:
    """The extended Golay code, float32 [VOCAB, BITS] of +1 and -1."""
    messages = np.arange(VOCAB)
    words = np.zeros(VOCAB, np.int64)
    for place in range(BITS // 2):
        words ^= np.where(messages >> place & 1, _GOLAY << place, 0)
    bits = words[:, None] >> np.arange(BITS - 1) & 1
    bits = np.concatenate([bits, bits.sum(1, keepdims=True) % 2], axis=1)
    return (1 - 2 * bits).astype(np.float32)


def _tensors(hops: int) -> dict[str, np.ndarray]:
    hidden = (2 + hops) * BITS
    tensors = {
        "model.embed_tokens.weight": _placed((VOCAB, hidden), slice(None), _part(0), code_words()),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": _placed(
            (VOCAB, hidden), slice(None), _part(1 + hops), code_words() / FOUND
        ),
    }
    # What the norm before a layer divides by: parts present, of all of them.
    sizes = [math.sqrt((2 + found * FOUND**2) / (2 + hops)) for found in range(hops)]
    for hop, size in enumerate(sizes):
        first = math.sqrt(1 / (2 + hops)) if hop == 0 else 0.0
        tensors |= _layer(hidden, 2 * hop, *_previous_token(hidden, first))
        tensors |= _layer(hidden, 2 * hop + 1, *_lookup(hidden, hop, size))
    return tensors


def _previous_token(hidden: int, size: float) -> tuple[dict[str, np.ndarray], ...]:
    """Weights and biases of a head that copies the token before to part 1, or does nothing."""
    strength = math.sqrt(PREVIOUS * math.sqrt(HEAD_DIM))
    weights = {
        "v": _placed((HEAD_DIM, hidden), _CODE, _part(0), np.eye(BITS)),
        "o": _placed((hidden, HEAD_DIM), _part(1), _CODE, np.eye(BITS) * size),
    }
    return weights, {"q": _turned(_FAST, -1.0, strength), "k": _turned(_FAST, 0.0, strength)}


def _lookup(hidden: int, hop: int, size: float) -> tuple[dict[str, np.ndarray], ...]:
    """Weights and biases of a head that finds what last followed the token in a part."""
    read = 0 if hop == 0 else 1 + hop
    strength = size * math.sqrt(MATCH * math.sqrt(HEAD_DIM) / BITS)
    recency = math.sqrt(RECENCY * math.sqrt(HEAD_DIM))
    query = strength if hop == 0 else strength / FOUND
    weights = {
        "q": _placed((HEAD_DIM, hidden), _CODE, _part(read), np.eye(BITS) * query),
        "k": _placed((HEAD_DIM, hidden), _CODE, _part(1), np.eye(BITS) * strength),
        "v": _placed((HEAD_DIM, hidden), _CODE, _part(0), np.eye(BITS)),
        "o": _placed((hidden, HEAD_DIM), _part(2 + hop), _CODE, np.eye(BITS) * size * FOUND),
    }
    return weights, {"q": _turned(_SLOW, math.pi / 4, recency), "k": _turned(_SLOW, 0.0, recency)}


def _layer(
    hidden: int, index: int, weights: dict[str, np.ndarray], biases: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Tensors of a layer, zero where nothing is given."""
    prefix = f"model.layers.{index}."
    shapes = dict.fromkeys("qkv", (HEAD_DIM, hidden)) | {"o": (hidden, HEAD_DIM)}
    mlp = {"gate": (8, hidden), "up": (8, hidden), "down": (hidden, 8)}
    tensors = {f"mlp.{name}_proj.weight": np.zeros(shape) for name, shape in mlp.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{norm}.weight"] = np.ones(hidden)
    for name, shape in shapes.items():
        tensors[f"self_attn.{name}_proj.weight"] = weights.get(name, np.zeros(shape))
    for name in "qkv":
        tensors[f"self_attn.{name}_proj.bias"] = biases.get(name, np.zeros(HEAD_DIM))
    return {prefix + name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def _part(index: int) -> list[int]:
    """Features of a part of the residual stream."""
    return list(range(index * BITS, (index + 1) * BITS))


def _placed(shape: tuple[int, int], rows: Any, columns: list[int], block: np.ndarray) -> np.ndarray:
    """A matrix that is `block` in these rows and columns, and zero elsewhere."""
    matrix = np.zeros(shape, np.float32)
    rows = range(shape[0]) if isinstance(rows, slice) else rows
    matrix[np.ix_(rows, columns)] = block
    return matrix


def _turned(pair: int, angle: float, length: float) -> np.ndarray:
    """A bias whose pair of features stands at `angle`."""
    bias = np.zeros(HEAD_DIM)
    bias[[pair, pair + _HALF]] = length * math.cos(angle), length * math.sin(angle)
    return bias
