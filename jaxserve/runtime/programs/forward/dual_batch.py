"""Steps of a tensor-parallel mesh in two halves, one of which computes while the other's results
are summed over the devices: the nano-batches of NanoFlow (2408.12757), vLLM's dual batch overlap.

The halves are independent of each other within a layer, except that the second one's tokens may
attend to the first one's: keys and values are written, and attended to, half after half. So
compilers can put one half's products between the start and the end of the other's sums.

A layer computes, and twice sums its results. Each half reads the weights, and has its own messages
and launches (core/steps/layer_times.py). So halves pay for many tokens, which are bound by
arithmetic, and not for few, which take as long as the reading of the weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.core.devices import device_of_kind
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.layer_times import layer_times
from jaxserve.runtime.programs.forward.step_work import step_work
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from pallas_kernels.paged_attention import RaggedBatch

_MULTIPLE = 128
"""A half of many tokens is a multiple of this, so that it fills the tiles of products."""


def in_halves(shapes: ProgramShapes, key: ProgramKey) -> bool:
    """Whether a step's layers compute it in two halves.

    Of the devices that are described, only GPUs are known to compute beside sums
    (docs/decisions/019-two-halves.md). A program for each layer would wait for both halves' sums.
    """
    config = shapes.config
    if config.dual_batch_overlap != "auto":
        return config.dual_batch_overlap == "on" and key.num_tokens > 1
    split = shapes.seq > 1 or config.sequence_parallel or config.batch_invariant
    together = shapes.shares_prefixes or shapes.layouts[key].tree_depth
    if shapes.tensor == 1 or split or together or config.program_scope == "layer":
        return False
    device = device_of_kind(shapes.device.device_kind)
    if device is None or device.platform != "gpu":
        return False
    times = layer_times(device, step_work(shapes), key.num_tokens)
    return times.halves < times.whole


def halves(num_tokens: int) -> tuple[slice, slice]:
    """The tokens of each half of a step of two or more."""
    half = num_tokens // 2
    if half > _MULTIPLE:
        half -= half % _MULTIPLE
    return slice(0, half), slice(half, num_tokens)


def rows_of_half(batch: RaggedBatch, part: slice, decode_tokens: int) -> tuple[RaggedBatch, int]:
    """The rows of the tokens in `part` of a step whose first `decode_tokens` rows have one token
    each, with chunks clipped to it; and how many of these rows are decodes."""
    decodes = slice(min(part.start, decode_tokens), min(part.stop, decode_tokens))
    no_chunks = part.stop <= decode_tokens
    chunks = slice(decode_tokens, decode_tokens if no_chunks else len(batch.starts))
    rows = jax.tree.map(lambda x: jnp.concatenate([x[decodes], x[chunks]]), batch)
    ends = rows.starts + rows.lengths
    start, end = (jnp.clip(x, part.start, part.stop) for x in (rows.starts, ends))
    context = jnp.where(end > start, jnp.maximum(rows.context - (ends - end), 0), 0)
    own = RaggedBatch(rows.tables, context, start - part.start, end - start)
    return own, decodes.stop - decodes.start
