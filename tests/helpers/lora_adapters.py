"""LoRA adapters as PEFT writes them, and the models that merging them gives."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import write_hf
from tiny_engines import TinyModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LLAMA = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
"""Linear layers of a Llama, by the names that PEFT has for targets."""


def write_adapter(
    directory: Path,
    model: TinyModel,
    *,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = LLAMA,
    seed: int = 0,
    **options: Any,
) -> Path:
    """A random adapter that changes what the model says. `options` are other fields of its
    `adapter_config.json`."""
    rng, tensors, all_rank = np.random.default_rng(seed), {}, rank
    for name, weight in _weights(model.path).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            outputs, inputs = weight.shape
            rank = of_module(options.get("rank_pattern", {}), module, all_rank)
            a = rng.normal(size=(rank, inputs)) / math.sqrt(inputs)
            b = rng.normal(size=(outputs, rank)) / math.sqrt(rank) * weight.std() * 4
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"base_model.model.{module}.lora_B.weight"] = b.astype(np.float32)
    config = {
        "base_model_name_or_path": "org/base",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": all_rank,
        "rank_pattern": {},
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return write_peft(directory, config | options, tensors)


def of_module(pattern: dict[str, float], module: str, otherwise: float) -> float:
    """PEFT's rule: the first name that the module's ends with, at a dot."""
    ends = (value for name, value in pattern.items() if f".{module}".endswith(f".{name}"))
    return next(ends, otherwise)


def write_peft(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A directory as PEFT writes it."""
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merged(model: TinyModel, adapter: Path, directory: Path) -> TinyModel:
    """The model with W + scale * B A in the place of every W that the adapter changes."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    weights = _weights(model.path)
    for name in weights:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in factors:
            of = name.removesuffix(".weight")
            rank = of_module(config.get("rank_pattern", {}), of, config["r"])
            alpha = of_module(config.get("alpha_pattern", {}), of, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
            a, b = (factors[f"{module}.lora_{half}.weight"] for half in "AB")
            weights[name] = (weights[name] + scale * b.astype(float) @ a).astype(np.float32)
    raw = json.loads((model.path / "config.json").read_text())
    return TinyModel.open(write_hf(directory, raw, weights))


def _weights(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "model.safetensors")
