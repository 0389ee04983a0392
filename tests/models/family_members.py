"""Tiny models of every family member, the same here and in transformers.

A member is a transformers config class with a few fields. Its weights follow from the names of its
tensors, so that a golden file needs to hold only names and shapes.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 40
VOCAB = 64
_HALF_DIM = 8
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 0.01,  # large, so that leaving it out shows
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(_HALF_DIM)],
    "long_factor": [1.5 + 0.8 * i for i in range(_HALF_DIM)],
}


@dataclasses.dataclass(frozen=True)
class Member:
    """`family` names the transformers classes, `fields` goes to the config.

    `context` is the longest sequence to serve where that is not `max_position_embeddings`.
    transformers goes by the sequence at hand, of TOKENS tokens, in the two scalings that depend on
    length; the comparison holds where both come to the same frequencies.
    """

    family: str
    fields: dict[str, Any]
    context: int | None = None


def _llama(context: int | None = None, **fields: Any) -> Member:
    return Member("Llama", fields, context)


MEMBERS = {
    "llama2_mha": _llama(num_key_value_heads=4),
    "llama_mqa": _llama(num_key_value_heads=1),
    "llama_biases": _llama(attention_bias=True, mlp_bias=True),
    "llama3": _llama(
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "rope_linear": _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    ),
    "rope_dynamic": _llama(
        context=TOKENS,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    ),
    "rope_yarn": _llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "rope_yarn_mscale": _llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 0.5,
            "mscale": 1.5,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    ),
    "rope_longrope_short": _llama(
        context=128, rope_parameters=_LONGROPE | {"original_max_position_embeddings": 128}
    ),
    "rope_longrope_long": _llama(
        rope_parameters=_LONGROPE | {"original_max_position_embeddings": 32}
    ),
    "smollm2": _llama(
        tie_word_embeddings=True,
        hidden_size=48,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    ),
    "smollm3": Member("SmolLM3", {"num_hidden_layers": 4}),
    "mistral": Member("Mistral", {"sliding_window": 9}),
    "mistral_head_dim": Member("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": Member(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2_tied": Member("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": Member("Qwen3", {"head_dim": 32}),
    "olmo2": Member("Olmo2", {}),
}


def token_ids() -> np.ndarray:
    """The sequence that every member is given, int64 [TOKENS]."""
    return np.random.RandomState(1).randint(0, VOCAB, TOKENS)


def tensors(shapes: dict[str, list[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 values for tensors of the given Hugging Face names and shapes."""
    return {name: _draw(name, shape, seed) for name, shape in shapes.items()}


def _draw(name: str, shape: list[int], seed: int) -> np.ndarray:
    # RandomState, because numpy promises its stream for all time, unlike a Generator's.
    rng = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    values = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        return (1 + 0.3 * values).astype(np.float32)
    if name.endswith("bias"):
        return (0.5 * values).astype(np.float32)
    # Queries and keys are larger, so that attention is sharp and where it looks matters.
    sharp = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
    return (sharp * values / np.sqrt(shape[-1])).astype(np.float32)


def hf_model(member: Member, seed: int = 0) -> Any:
    """The member as a transformers model on the CPU. Needs torch and transformers."""
    import torch
    import transformers

    config_class = getattr(transformers, f"{member.family}Config")
    model_class = getattr(transformers, f"{member.family}ForCausalLM")
    config = config_class(**_SIZES | member.fields)
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    parameters = dict(model.named_parameters())
    values = tensors({name: list(p.shape) for name, p in parameters.items()}, seed)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(values[name]))
    return model.eval()


def hf_shapes(model: Any) -> dict[str, list[int]]:
    """Names and shapes of a transformers model's parameters; tied ones count once."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def hf_config(model: Any, directory: Path) -> dict[str, Any]:
    """The `config.json` that transformers writes for a model, left in `directory`."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    return json.loads((directory / "config.json").read_text())


def hf_logits(model: Any) -> np.ndarray:
    """Logits float32 [TOKENS, VOCAB] of a transformers model on `token_ids`."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(token_ids())[None]).logits[0].numpy()
