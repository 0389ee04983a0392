"""Which steps programs are compiled for, and how layers and tokens are divided among programs."""

from __future__ import annotations

import dataclasses

import jax

from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets, ProgramKey
from jaxserve.runtime.programs.layout.tiles import DEFAULT_TILE_TOKENS, TILE_TOKENS
from jaxserve.runtime.programs.shapes.ring import ring_contexts

DECODE_LAYERS = 6
"""Layers of a decode step compiled together on CPUs (docs/decisions/002-programs.md)."""
LEAST_ROWS = {"gpu": 2}
"""Decode rows of the smallest program, by platform. Compiled for an H200, a single row of
Llama-3.1-8B takes 18 kernels a layer and two rows take 12: XLA drops a dimension of size one, and
no longer fuses norms, nor rotations with writes of keys."""


def step_buckets(config: EngineConfig, model: ModelConfig, device: jax.Device) -> Buckets:
    """Sizes of steps on devices like `device`. `config` is resolved and `model` partitioned."""
    buckets = Buckets.from_config(
        config.max_step_seqs,
        config.max_num_batched_tokens,
        pipelined=config.pipeline_parallel_size > 1,
        seq=config.context_parallel_size,
        tiled=config.batch_invariant,
        least_rows=LEAST_ROWS.get(device.platform, 1),
        draft_lengths=config.draft_lengths,
    )
    contexts = ring_contexts(config, model, device, buckets)
    return dataclasses.replace(buckets, ring_contexts=contexts)


def tile_tokens(config: EngineConfig, device: jax.Device) -> int | None:
    """Tokens per tile with `batch_invariant`; None for no tiling."""
    if not config.batch_invariant:
        return None
    return TILE_TOKENS.get(device.platform, DEFAULT_TILE_TOKENS)


def layer_slices(
    config: EngineConfig, key: ProgramKey, num_layers: int, streamed: bool
) -> list[slice]:
    """Consecutive layers that run in one program, where the model is not one program. `streamed`:
    whether layers are streamed one by one.

    Decode steps are short, so they use larger groups and fewer calls, unless layers are streamed.
    """
    one = bool(key.prefill_tokens or streamed or config.steps_per_weight_read > 1)
    size = 1 if one else DECODE_LAYERS
    return [slice(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
