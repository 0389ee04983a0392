"""Measures what an engine with streamed weights computes and reads in its own steps."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.prompts import TokenizedPrompt

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

MAX_DECODES = 6
"""Steps of each kind, the first of which warms up."""
_SHORT = 16


class StepRates(NamedTuple):
    """Seconds of computing, as in `offload_policy.Rates`, and bytes a second of reads."""

    step_s: float
    row_s: float
    context_s: float
    prefill_s: float
    disk_to_host: float


class _Phase(NamedTuple):
    """Seconds of computing of all prefills, and of a decode."""

    prefill_s: float
    decode_s: float


class _Measuring:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._random = random.Random(0)
        self._vocab = engine.plan.info.model.vocab_size

    def phase(self, rows: int, prompt_tokens: int) -> _Phase:
        """Random prompts, so that none is cached, and a few decodes of all of them."""
        params = SamplingParams(temperature=0, max_tokens=1 + MAX_DECODES, ignore_eos=True)
        for _ in range(rows):
            token_ids = [self._random.randrange(self._vocab) for _ in range(prompt_tokens)]
            prompt = TokenizedPrompt(None, token_ids)
            self._engine.add(f"measured-{next(self._ids)}", prompt, params)
        prefill_s, decodes, reads = 0.0, [], self._engine.weight_reads
        while self._engine.has_work:
            begin_s, stalled_s = time.perf_counter(), reads.stall_s
            waiting = self._engine.scheduler.num_waiting
            touched = self._engine.step()
            compute_s = time.perf_counter() - begin_s - (reads.stall_s - stalled_s)
            if waiting or len(touched) < rows:
                prefill_s += compute_s
            else:
                decodes.append(compute_s)
        return _Phase(prefill_s, statistics.median(decodes[1:]))


def measure(engine: Engine, rows: int, context: int) -> StepRates:
    """Rates of an idle engine's steps with up to `rows` sequences, and contexts about `context`
    tokens long; the time that steps wait for reads is left out. Takes as long as a few prompts."""
    reads, measuring = engine.weight_reads, _Measuring(engine)
    one = measuring.phase(1, _SHORT)
    read_bytes, read_s = reads.num_bytes, reads.read_s
    many = measuring.phase(rows, _SHORT)
    length = max(2 * _SHORT, context)
    long = measuring.phase(rows, length)
    row_s = max(0.0, many.decode_s - one.decode_s) / max(1, rows - 1)
    return StepRates(
        step_s=max(0.0, one.decode_s - row_s),
        row_s=row_s,
        context_s=max(0.0, long.decode_s - many.decode_s) / (rows * (length - _SHORT)),
        prefill_s=long.prefill_s / (rows * length),
        disk_to_host=read_bytes / read_s,
    )
