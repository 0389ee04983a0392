"""Which steps are compiled with ring attention, whose context is short."""

from __future__ import annotations

from bisect import bisect_left

import jax
import jax.numpy as jnp

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets, ProgramKey
from jaxserve.runtime.hardware.devices import collective_rates
from pallas_kernels.ring_attention import choose_scheme

RING_CHUNKS = 4
"""Ring attention is for contexts of at most this many chunks: buffers for the longest are allocated
and sent, whatever the context is."""


def ring_contexts(
    config: EngineConfig, model: ModelConfig, device: jax.Device, buckets: Buckets
) -> dict[ProgramKey, int]:
    """For each program that gets a ring variant, the longest context that it is used for, in whole
    pages."""
    contexts = {}
    for key in buckets.keys():  # noqa: SIM118
        # Full chunks only, since short sends wait for each other.
        if key.prefill_tokens == buckets.max_prefill_tokens and (
            context := longest_ring_context(config, model, device, key.prefill_tokens)
        ):
            contexts[key] = cdiv(context, config.page_size) * config.page_size
    return contexts


def longest_ring_context(
    config: EngineConfig, model: ModelConfig, device: jax.Device, prefill_tokens: int
) -> int:
    """Longest context, in tokens, with which a chunk of `prefill_tokens` that fills the step is
    faster by ring attention than by passing its queries; 0 for none, as in a pipeline, whose stages
    work on several chunks at once. `config` is resolved and `model` partitioned."""
    ranks = config.context_parallel_size
    if ranks == 1 or config.pipeline_parallel_size > 1 or prefill_tokens % (2 * ranks):
        return 0
    if model.mla:  # Latents are not sent around.
        return 0
    rates = collective_rates(device)

    def travels(context: int) -> bool:
        scheme = choose_scheme(
            new_tokens=prefill_tokens,
            cached_tokens=context - prefill_tokens,
            ranks=ranks,
            query_heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            element_bytes=jnp.dtype(config.dtype).itemsize,
            flops_per_s=rates.flops_per_s,
            link_bytes_per_s=rates.link_bytes_per_s,
        )
        return scheme == "pass_kv"

    most_pages = cdiv(config.max_model_len, config.page_size)
    most = min(most_pages * config.page_size, RING_CHUNKS * prefill_tokens)
    contexts = range(prefill_tokens, most + 1)
    count = bisect_left(contexts, True, key=lambda context: not travels(context))
    return contexts[count - 1] if count else 0
