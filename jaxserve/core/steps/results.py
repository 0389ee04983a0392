"""A step in flight as plain data: packed, dispatched, read. Executors add what they run it with."""

from __future__ import annotations

import dataclasses
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jaxserve.core.events import DraftTree
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan

NO_TOKEN = -1
"""Token id of a row whose logits are all NaN or leave nothing to sample."""

Array = TypeVar("Array")


class TokenLogprobs(NamedTuple, Generic[Array]):
    """`logprobs` float32 [n] and `ranks` int32 [n] of given tokens, 1 being the most likely.

    `top_ids` int32 and `top_logprobs` float32 [n, 20] are the most likely tokens, best first,
    lower ids first on ties.
    """

    logprobs: Array
    ranks: Array
    top_ids: Array
    top_logprobs: Array


@dataclasses.dataclass(frozen=True)
class PackedStep:
    """A plan ready to dispatch, independent of state that the scheduler changes.

    `key` is the program that it enters. In a pipeline it continues in those of later steps.
    """

    step_id: int
    plan: StepPlan
    key: ProgramKey


@dataclasses.dataclass(frozen=True)
class DispatchedStep:
    """A step completed by a dispatch, whose results the device may not have computed yet.

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
    """The plans that it ran: in a pipeline one per stage. Empty for steps that shared the reads of
    weights, whose own times are unknown."""

    def draft_trees(self) -> list[DraftTree]:
        """The drafts that each sampled row verified, read only for a log that keeps them; none
        where there are no drafts, or only how many is known. Call it after the step was read."""
        return []


@dataclasses.dataclass(frozen=True)
class StepResults:
    """Results of a step on the host: `token_ids[i]` were sampled by `sampled[i]`, the j-th of them
    after it and j drafts, `num_drafts[i]` of which were verified.

    `logprobs` has `width` rows for each; `prompt_logprobs` one row per prefill token of the step.
    Both are None if not requested. If something is pooled, `last_hidden` [rows, hidden] has `width`
    rows for each of `sampled`, and `chunk_sums` float32 [chunks, hidden] the sums of hidden states
    of each prefill chunk, None if only last ones are pooled. `late`: whether the devices were done
    before the host began to wait, so that it does not know when.
    """

    sampled: tuple[ScheduledChunk, ...]
    token_ids: list[list[int]]
    num_drafts: list[int]
    width: int
    logprobs: TokenLogprobs[np.ndarray] | None = None
    prompt_logprobs: TokenLogprobs[np.ndarray] | None = None
    last_hidden: np.ndarray | None = None
    chunk_sums: np.ndarray | None = None
    late: bool = False
