"""Measures what an engine with streamed weights computes and reads in its own steps."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.offline.offload_policy import prefill_steps

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

MAX_DECODES = 8
"""Of all sequences, the first of which warms up."""
_PASSES = 3
_SHORT = 16
LEAST_CONTEXT = 2 * _SHORT
_HIDES = 1.05
"""Reads hide computing in a step that takes no more times as long as they do."""


class StepRates(NamedTuple):
    """As in `offload_policy.PolicyRates`."""

    decode_s: dict[int, float]
    context_s: float
    prefill_s: float
    disk_to_host: float
    contention: float


class _Phase(NamedTuple):
    """Seconds of a token of the prefills, padding included, and the passes that it takes; seconds
    of a decode, without and with its waits for reads."""

    prefill_s: float
    prefill_passes: float
    decode_s: float
    with_waits_s: float


class _Measuring:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._random = random.Random(0)
        self._vocab = engine.plan.info.model.vocab_size
        self._sizes = engine.plan.shapes.buckets.prefill_tokens

    def phase(self, rows: int, prompt_tokens: int) -> _Phase:
        """Random prompts, so that none is cached, and a few decodes of all of them."""
        num_steps, padded = prefill_steps(rows, prompt_tokens, rows, self._sizes)
        max_tokens = 1 + num_steps + MAX_DECODES
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for _ in range(rows):
            token_ids = [self._random.randrange(self._vocab) for _ in range(prompt_tokens)]
            prompt = TokenizedPrompt(None, token_ids)
            self._engine.add(f"measured-{next(self._ids)}", prompt, params)
        prefill_s, decodes, reads = 0.0, [], self._engine.counters.weight_reads
        started: set[str] = set()
        while self._engine.has_work:
            prefills = len(started) < rows
            begin_s, stalled_s = time.perf_counter(), reads.stall_s
            touched = self._engine.step()
            step_s = time.perf_counter() - begin_s
            compute_s = step_s - (reads.stall_s - stalled_s)
            started.update(request.request_id for request in touched)
            if prefills:
                prefill_s += compute_s
            elif len(touched) == rows:
                decodes.append((compute_s, step_s))
        medians = map(statistics.median, zip(*decodes[1:]))
        return _Phase(prefill_s / padded, num_steps / padded, *medians)


def longest_context(rows: int, chunk: int, num_tokens: int) -> int:
    """The longest context that can be measured of so many sequences, if each may have `num_tokens`:
    the first ones decode until the last ones have been prefilled, in steps of `chunk` tokens. Below
    LEAST_CONTEXT nothing can be measured."""
    return int((num_tokens - MAX_DECODES - 2) / (1 + rows / chunk))


def measure(engine: Engine, sizes: Sequence[int], context: int) -> StepRates:
    """Rates of an idle engine's steps with so many sequences, ascending, and contexts about
    `context` tokens long: of steps that read no weights, of passes through the layers that compute
    nothing, and of both at once. What a step loses to making arrays of the layers is no part of its
    computing: reads have it, once a pass. Takes as long as a few prompts. The engine must not be
    used afterwards."""
    measuring, rows = _Measuring(engine), sizes[-1]
    read_s, read_bytes = _read(engine)
    measuring.phase(rows, _SHORT)  # Warms up.
    together = measuring.phase(rows, _SHORT)
    engine.weight_source.unread = True
    unread_s, _ = _read(engine)
    short = {size: measuring.phase(size, _SHORT) for size in sizes}
    length = max(LEAST_CONTEXT, context)
    long = measuring.phase(rows, length)
    many = short[rows]
    # Where reads take so long that steps wait for them anyway, only slower computing tells.
    hidden = together.with_waits_s < _HIDES * read_s
    with_reads, without = (
        (together.decode_s, many.decode_s) if hidden else (together.with_waits_s, many.with_waits_s)
    )
    contention = min(1.0, max(0.0, (with_reads - without) / max(1e-9, read_s - unread_s)))
    passing_s = contention * unread_s
    return StepRates(
        decode_s={size: max(0.0, one.decode_s - passing_s) for size, one in short.items()},
        context_s=max(0.0, long.decode_s - many.decode_s) / (rows * (length - _SHORT)),
        prefill_s=max(0.0, long.prefill_s - long.prefill_passes * passing_s),
        disk_to_host=read_bytes / read_s,
        contention=contention,
    )


def _read(engine: Engine) -> tuple[float, float]:
    """Seconds and bytes of a pass that takes all layers, and computes nothing."""
    weights, num_layers = engine.weight_source, engine.plan.shapes.model.num_layers
    seconds, nothing = [], np.zeros(())
    before = weights.reads.num_bytes
    for _ in range(1 + _PASSES):
        begin_s = time.perf_counter()
        for layer in range(num_layers):
            weights.take(slice(layer, layer + 1), nothing)
        weights.end_step(nothing)
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds[1:]), (weights.reads.num_bytes - before) / len(seconds)
