"""A step under way: as it is packed, dispatched, and read."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxserve.engine.plan import Chunk, StepPlan
from jaxserve.runtime.batch import Snapshot
from jaxserve.runtime.buckets import ProgramKey
from jaxserve.sampling import TokenLogprobs
from jaxserve.structured.matcher import Matcher


@dataclasses.dataclass(frozen=True)
class SamplingRow:
    """What the runner keeps of a sequence's sampling, from registration to its end."""

    constants: np.ndarray
    plain: bool
    """Whether the most likely token is all it wants, so that the greedy program will do."""
    stateful: bool
    matcher: Matcher | None
    bad_word_ids: tuple[tuple[int, ...], ...]
    eos_token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PackedStep:
    """A plan made ready: nothing the scheduler may change is read any more.

    `key` is the program that it enters. In a pipeline it goes on in those of later steps.
    """

    plan: StepPlan
    key: ProgramKey
    snapshot: Snapshot
    sampled: tuple[Chunk, ...]
    rows: tuple[SamplingRow, ...]
    """Of `sampled`."""


@dataclasses.dataclass(frozen=True)
class DispatchedStep:
    """A step on its way: arrays that the device has yet to fill."""

    plan: StepPlan
    key: ProgramKey
    """The program of the dispatch that it was done with."""
    together: tuple[StepPlan, ...]
    """The plans that this dispatch worked on: in a pipeline one for each stage."""
    sampled: tuple[Chunk, ...]
    hidden: jax.Array
    """What was sampled from. It is waited for even where nothing was: the host must not run ahead
    by all the chunks of a long prompt."""
    token_ids: jax.Array | None
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None
    number: int
    """Of the dispatch that it was done with."""


@dataclasses.dataclass(frozen=True)
class StepResults:
    """What the host reads of a step: `token_ids[i]` was sampled by `sampled[i]`.

    `logprobs` has the same rows; `prompt_logprobs` one row for each of the step's prefill tokens.
    Both are numpy, and None when nobody asked.
    """

    sampled: tuple[Chunk, ...]
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None


NOTHING = PackedStep(StepPlan(), ProgramKey(0, 0), Snapshot(), (), ())
"""What a stage without a step works on."""
