"""What an engine cannot do better than, known without a simulation.

Holds for step times that are those of a program and, on top, of attention: of the keys that decodes
see together, and of whole prompts at least, however these are cut into chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets, ProgramKey
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.simulator.simulation import Arrival
from jaxserve.simulator.step_times import StepTimes

_PRICES = 129
"""How many prices of a decoded token are tried."""


@dataclasses.dataclass(frozen=True)
class LoadTokens:
    """Tokens that steps must compute for a load: of prompts, those once that requests share if
    prefixes are cached; and of outputs, which decodes compute, all but the first of each.

    `attention` is one plan whose attention costs no more than that of all steps together.
    """

    prefill: int
    decode: int
    attention: StepPlan = dataclasses.field(default_factory=StepPlan)

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], config: EngineConfig) -> Self:
        """For a resolved `config`. An output that does not fit the context is cut off."""
        prompts = [list(arrival.token_ids) for arrival in arrivals]
        prefill = sum(map(len, prompts))
        if config.enable_prefix_caching:
            prefill -= sum(_common(*pair) for pair in pairwise(sorted(prompts)))
        decodes = num_decodes(arrivals, config)
        # A prompt that begins like another may have a part of its attention left out.
        whole = prompts if prefill == sum(map(len, prompts)) else []
        # The n-th decode of a sequence sees its prompt and n tokens.
        seen = sum(len(p) * n + n * (n + 1) // 2 for p, n in zip(prompts, decodes))
        seen //= 1 + config.num_speculative_tokens  # Where every draft is accepted.
        if config.shared_prefix_attention == "enabled" and not whole:
            seen = 0  # Decodes may read what prompts have in common once.
        attention = StepPlan(
            (_chunk(seen - 1, 1),) if seen else (), tuple(_chunk(0, len(p)) for p in whole)
        )
        return cls(max(prefill, len(prompts)), sum(decodes), attention)


def num_decodes(arrivals: Sequence[Arrival], config: EngineConfig) -> list[int]:
    """Decodes of each request, and so times between its tokens."""
    lengths = (
        min(arrival.params.max_tokens, config.max_model_len - len(arrival.token_ids))
        for arrival in arrivals
    )
    return [max(0, length - 1) for length in lengths]


def least_seconds(
    times: StepTimes, buckets: Buckets, tokens: LoadTokens, config: EngineConfig
) -> float:
    """The time that so many tokens take at least: that of attention, and of the best mix of
    programs. The latter is the linear program of how often each program runs, bounded by its dual.

    Any prices of a prefilled and of a decoded token that no program exceeds in its time are a
    bound. Those tried are evenly apart, so that it is not quite the largest.
    """
    keys = (*buckets.keys(), *buckets.ring_keys())
    seconds, rows, prefill = (
        np.array(column, float)
        for column in zip(*((_step_s(times, key), key.rows, key.prefill_tokens) for key in keys))
    )
    # Each dispatch takes its share of the sequences: the others are in the stages of the pipeline.
    rows = np.minimum(rows, cdiv(config.max_num_seqs, config.pipeline_parallel_size))
    rows *= np.array([key.width for key in keys])  # Tokens, if every draft is accepted.
    decodes, prefills = rows > 0, prefill > 0
    dearest = (seconds[decodes] / rows[decodes]).min()
    of_decode = np.linspace(0, dearest, _PRICES)
    left = seconds[prefills, None] - rows[prefills, None] * of_decode
    of_prefill = (left / prefill[prefills, None]).min(axis=0)
    bounds = of_prefill * tokens.prefill + of_decode * tokens.decode
    attention_s = times.step(keys[0], (tokens.attention,)) - _step_s(times, keys[0])
    return float(bounds[of_prefill >= 0].max()) + attention_s


def least_decode_s(times: StepTimes, buckets: Buckets, stages: int) -> float:
    """The time between two tokens of a sequence at least: a dispatch for each stage."""
    return stages * min(_step_s(times, ProgramKey(rows, 0)) for rows in buckets.rows)


def _step_s(times: StepTimes, key: ProgramKey) -> float:
    return times.step(key, (StepPlan(),))


def _chunk(start: int, num_tokens: int) -> ScheduledChunk:
    """Of no sequence: step times depend on its positions only."""
    return ScheduledChunk(None, start, num_tokens, samples=True, output_index=0, slot=0)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    for place, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return place
    return min(len(left), len(right))
