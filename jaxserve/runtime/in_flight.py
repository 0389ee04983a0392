"""A step in flight: packed, dispatched, read."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxserve.core.buckets import ProgramKey
from jaxserve.core.step_plan import ScheduledChunk, StepPlan
from jaxserve.runtime.programs.step_layout import FrozenPlan
from jaxserve.sampling import TokenLogprobs
from jaxserve.structured.matcher import Matcher


@dataclasses.dataclass(frozen=True)
class SamplingRow:
    """A sequence's sampling data, held by the runner from registration until it finishes."""

    constants: np.ndarray
    plain: bool
    """Whether it only needs the most likely token, so that the greedy program suffices."""
    stateful: bool
    matcher: Matcher | None
    bad_word_ids: tuple[tuple[int, ...], ...]
    eos_token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PackedStep:
    """A plan with its uploads, independent of state that the scheduler changes.

    `key` is the program that it enters. In a pipeline it continues in those of later steps.
    """

    step_id: int
    plan: StepPlan
    key: ProgramKey
    frozen: FrozenPlan
    sampled: tuple[ScheduledChunk, ...]
    rows: tuple[SamplingRow, ...]
    """One per entry of `sampled`."""


@dataclasses.dataclass(frozen=True)
class DispatchedStep:
    """A step completed by a dispatch: arrays that the device may not have computed yet.

    `number` and `begun_us` are that dispatch's number and time; `begun_us` is None if it only
    emptied the pipeline before a page operation.
    """

    step_id: int
    number: int
    begun_us: int | None
    plan: StepPlan
    key: ProgramKey
    """The program of that dispatch."""
    together: tuple[StepPlan, ...]
    """The plans that it ran: in a pipeline one per stage."""
    sampled: tuple[ScheduledChunk, ...]
    hidden: jax.Array
    """Hidden states to sample from. `read` waits for them even if nothing was sampled: the host
    must not run ahead by all the chunks of a long prompt."""
    token_ids: jax.Array | None
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None


@dataclasses.dataclass(frozen=True)
class StepResults:
    """Results of a step on the host: `token_ids[i]` was sampled by `sampled[i]`.

    `logprobs` has the same rows; `prompt_logprobs` one row per prefill token of the step. Both are
    numpy, or None if not requested.
    """

    sampled: tuple[ScheduledChunk, ...]
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None


BUBBLE = PackedStep(-1, StepPlan(), ProgramKey(0, 0), FrozenPlan(), (), ())
"""Pipeline bubble: a stage without a step."""
