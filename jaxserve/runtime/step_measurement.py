"""Measures the steps of a runner: every forward program, at a few context lengths.

Steps are dispatched and read as the engine does: one is dispatched before the previous is read.
Everything is timed in several rounds, each in an order of its own, so that a minute in which the
machine is slower slows a part of every measurement and not all of some, and no step always follows
the same one. The time of a step is the mean of the middle half of its times in all rounds: what a
server on this machine will see, where the fastest would be what it sees at its best. Steps whose
rounds differ get more of them.
Sequences have pages of their own as far as the pool goes, since shared ones would be read from the
caches of a processor; their content does not matter. Tokens are random, so that a
mixture of experts takes as many of them as it would in service.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import ProgramMissError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.kv.layout import TRANSFER_SIZES
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.runner import Runner
from jaxserve.scheduler.step_time import StepLoad

_MIN_ROUNDS, _MAX_ROUNDS = 4, 12
_STANDARD_ERROR = 0.015
"""Of the mean of a step's rounds, relative: above it there are more rounds."""
_MIN_STEPS, _MAX_STEPS, _ENOUGH_S = 2, 6, 0.15
"""Steps of each kind that are timed in a round: at least so many, then until they took long
enough."""
_SHARES = ((0.0, 0.0), (0.25, 0.0), (0.0, 0.25), (0.125, 0.125), (0.5, 0.5))
"""How far into the context decodes and prefill chunks begin."""
_HELD_OUT = (0.125, 0.125)


class Measurement(NamedTuple):
    """The time of a dispatch. `held_out`: not to be fitted to, but to judge a fit by."""

    key: ProgramKey
    load: StepLoad
    seconds: float
    held_out: bool


class _Point(NamedTuple):
    """A step to time. `plans`: with page tables to upload, and the same once they are uploaded."""

    key: ProgramKey
    load: StepLoad
    plans: tuple[StepPlan, StepPlan]
    held_out: bool


class StepMeasurements:
    """Drives a runner that serves nothing else."""

    def __init__(self, shapes: ProgramShapes, runner: Runner) -> None:
        self._shapes = shapes
        self._runner = runner
        self._ids = itertools.count()
        self._random = np.random.default_rng(0)
        config = shapes.config
        params = SamplingParams(temperature=0.0, max_tokens=2)
        self._sequences = [
            Sequence(slot, str(slot), 0, self._tokens(config.max_model_len), params, arrival_us=0)
            for slot in range(config.max_num_seqs)
        ]
        for seq in self._sequences:
            runner.register(seq, 0, (), (), None)

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(self._shapes.model.vocab_size, size=count).tolist()

    def run(self) -> Iterator[tuple[int, int, Measurement | None]]:
        """Times step after step. Yields how many are done, of how many at most, and at the end all
        measurements. Fewer are done than that where rounds agree."""
        points = self._points()
        rounds: list[list[list[float]]] = [[] for _ in points]
        done, noisy = 0, list(range(len(points)))
        for rounds_left in reversed(range(_MAX_ROUNDS)):
            total = done + (rounds_left + 1) * len(noisy)
            for number in self._random.permutation(noisy):
                rounds[number].append(self._time(*points[number].plans))
                done += 1
                yield done, total, None
            if _MAX_ROUNDS - rounds_left >= _MIN_ROUNDS:
                noisy = [number for number in noisy if _is_noisy(rounds[number])]
        for point, times in zip(points, rounds):
            seconds = _middle_mean([*itertools.chain(*times)])
            yield done, done, Measurement(point.key, point.load, seconds, point.held_out)
        for seq in self._sequences:
            self._runner.forget(seq)

    def _points(self) -> list[_Point]:
        """What is timed, without points whose contexts are too short for the program, or the same
        as for another point."""
        points: dict[tuple[ProgramKey, StepLoad], _Point] = {}
        buckets = self._shapes.buckets
        for key, shares in itertools.product((*buckets.keys(), *buckets.ring_keys()), _SHARES):
            plans = self._plans(key, *shares)
            if plans is None or buckets.program([plans[0].shape]) != key:
                continue
            load = StepLoad.of(plans[0])
            points.setdefault((key, load), _Point(key, load, plans, shares == _HELD_OUT))
        return list(points.values())

    def page_copy_s(self) -> float:
        """Time of copying one page."""
        count = min(TRANSFER_SIZES[-1], (self._shapes.num_pages - 1) // 2)
        if not count:
            return 0.0
        pairs = [(page, page + count) for page in range(1, count + 1)]

        def seconds(repeats: int) -> float:
            begin = time.perf_counter()
            for _ in range(repeats):
                self._runner.copy(pairs)
            self._runner.read_pages([1])
            return time.perf_counter() - begin

        seconds(1)
        few, many = (statistics.median(seconds(n) for _ in range(3)) for n in (1, 9))
        return max(0.0, many - few) / (8 * count)

    def _plans(
        self, key: ProgramKey, decodes_at: float, prefills_at: float
    ) -> tuple[StepPlan, StepPlan] | None:
        """A step of a program, with page tables to upload, and the same once they are uploaded.
        None where the context does not hold it."""
        config, buckets = self._shapes.config, self._shapes.buckets
        longest = config.max_model_len
        rows = key.rows
        if key.prefill_tokens and rows == config.max_step_seqs:
            rows -= 1  # The last sequence prefills.
        spans = [(int(decodes_at * (longest - key.width)), 1)] * rows
        left = key.prefill_tokens
        while left and len(spans) < config.max_step_seqs:
            size = min(left, longest)
            spans.append((min(int(prefills_at * longest), longest - size), size))
            left -= size
        try:
            plans = tuple(
                self._plan(spans, rows, key.width - 1, uploaded) for uploaded in (False, True)
            )
            return plans if buckets.program([plans[0].shape]) else None
        except ProgramMissError:
            return None

    def _plan(
        self, spans: list[tuple[int, int]], rows: int, num_drafts: int, uploaded: bool
    ) -> StepPlan:
        """Of `rows` decodes, which verify `num_drafts` each, and prefills."""
        chunks = [
            self._chunk(slot, *span, num_drafts if slot < rows else 0, uploaded)
            for slot, span in enumerate(spans)
        ]
        return StepPlan(tuple(chunks[:rows]), tuple(chunks[rows:]))

    def _chunk(
        self, slot: int, start: int, num_tokens: int, num_drafts: int, uploaded: bool
    ) -> ScheduledChunk:
        count = cdiv(start + num_tokens + num_drafts, self._shapes.config.page_size)
        first = slot * cdiv(self._shapes.config.max_model_len, self._shapes.config.page_size)
        pages = [1 + (first + page) % (self._shapes.num_pages - 1) for page in range(count)]
        done = count if uploaded else 0
        others = ((pages, done),) * (len(self._shapes.kv_layout.groups) - 1)
        seq = self._sequences[slot]
        return ScheduledChunk(
            seq,
            start,
            num_tokens,
            True,
            0,
            slot,
            pages,
            done,
            num_drafts,
            num_drafts,
            others=others,
        )

    def _time(self, first: StepPlan, again: StepPlan) -> list[float]:
        """Seconds of each dispatch: with pipeline stages, all of which run such a step."""
        runner, times = self._runner, []
        ahead = self._shapes.stages
        for _ in range(ahead):
            self._dispatch(first)
        runner.read(runner.in_flight.popleft())
        last = time.perf_counter()
        while len(times) <= _MIN_STEPS or (sum(times) < _ENOUGH_S and len(times) <= _MAX_STEPS):
            self._dispatch(again)
            while len(runner.in_flight) > 1:
                runner.read(runner.in_flight.popleft())
            now = time.perf_counter()
            times.append(now - last)
            last = now
        while runner.busy:
            runner.advance()
        while runner.in_flight:
            runner.read(runner.in_flight.popleft())
        return times[1:]  # The first is shorter: nothing was in flight.

    def _dispatch(self, plan: StepPlan) -> None:
        self._runner.set_last_tokens(self._tokens(self._shapes.config.max_num_seqs))
        self._runner.dispatch(self._runner.pack(plan, next(self._ids)), None)


def _is_noisy(rounds: list[list[float]]) -> bool:
    medians = [statistics.median(times) for times in rounds]
    standard_error = statistics.stdev(medians) / math.sqrt(len(medians))
    return standard_error > _STANDARD_ERROR * statistics.mean(medians)


def _middle_mean(times: list[float]) -> float:
    """The mean of the middle half: as steady as a mean, and a burst of slow steps does not move
    it."""
    left_out = len(times) // 4
    return statistics.mean(sorted(times)[left_out : len(times) - left_out])
