"""What an engine cannot do better than, known without a simulation.

Attention is left out, so no schedule of the programs reaches these bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets, ProgramKey
from jaxserve.core.steps.plan import StepPlan
from jaxserve.simulator.simulation import Arrival
from jaxserve.simulator.step_times import StepTimes

_PRICES = 129
"""How many prices of a decoded token are tried."""


@dataclasses.dataclass(frozen=True)
class LoadTokens:
    """Tokens that steps must compute for a load: of prompts, those once that requests share if
    prefixes are cached; and of outputs, which decodes compute, all but the first of each."""

    prefill: int
    decode: int

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], config: EngineConfig) -> Self:
        """For a resolved `config`. An output that does not fit the context is cut off."""
        prompts = [list(arrival.token_ids) for arrival in arrivals]
        prefill = sum(map(len, prompts))
        if config.enable_prefix_caching:
            prefill -= sum(_common(*pair) for pair in pairwise(sorted(prompts)))
        outputs = (
            min(arrival.params.max_tokens, config.max_model_len - len(prompt))
            for arrival, prompt in zip(arrivals, prompts)
        )
        return cls(max(prefill, len(prompts)), sum(max(0, length - 1) for length in outputs))


def least_seconds(times: StepTimes, buckets: Buckets, tokens: LoadTokens) -> float:
    """The time that so many tokens take at least, in the best mix of programs: the linear program
    of how often each program runs, bounded by its dual.

    Any prices of a prefilled and of a decoded token that no program exceeds in its time are a
    bound. Those tried are evenly apart, so that it is not quite the largest.
    """
    keys = (*buckets.keys(), *buckets.ring_keys())
    seconds, rows, prefill = (
        np.array(column, float)
        for column in zip(
            *((_step_s(times, key), key.decode_tokens, key.prefill_tokens) for key in keys)
        )
    )
    decodes, prefills = rows > 0, prefill > 0
    dearest = (seconds[decodes] / rows[decodes]).min()
    of_decode = np.linspace(0, dearest, _PRICES)
    left = seconds[prefills, None] - rows[prefills, None] * of_decode
    of_prefill = (left / prefill[prefills, None]).min(axis=0)
    bounds = of_prefill * tokens.prefill + of_decode * tokens.decode
    return float(bounds[of_prefill >= 0].max())


def least_decode_s(times: StepTimes, buckets: Buckets) -> float:
    """The time between two tokens of a sequence at least."""
    return min(_step_s(times, ProgramKey(rows, 0)) for rows in buckets.rows)


def _step_s(times: StepTimes, key: ProgramKey) -> float:
    return times.step(key, (StepPlan(),))


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    for place, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return place
    return min(len(left), len(right))
