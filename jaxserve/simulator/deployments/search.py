"""The search for the best of many deployments, in the manner of Vidur-Search (Agrawal et al. 2024).

A deployment is some number of like engines, which get requests in turn; the first of them is
simulated. One that cannot be better than another, by its bounds, is not simulated, or only once.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Literal

from jaxserve.simulator.deployments.capacity import (
    Bounds,
    Capacity,
    CapacitySearch,
    Load,
    nearest_step,
)
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.deployments.slo import Slo
from jaxserve.simulator.step_times import StepTimes

_AHEAD = 4
"""How many searches for a capacity are begun before the first of them must have ended."""


@dataclasses.dataclass(frozen=True)
class EngineUnderLoad:
    """An engine to simulate, and the load that it gets."""

    deployment: Deployment
    times: StepTimes
    load: Load

    def bounds(self, slo: Slo) -> Bounds:
        """Raises RequestError when a request can never run."""
        return Bounds.of(self.deployment, self.times, self.load, slo)

    def capacity(self, slo: Slo, above: int | None, last: int) -> Capacity:
        """As `CapacitySearch.between`."""
        return CapacitySearch(self.deployment, self.times, self.load, slo).between(above, last)

    def at_once(self, slo: Slo, step: int) -> float:
        """As `CapacitySearch.at_once`."""
        return CapacitySearch(self.deployment, self.times, self.load, slo).at_once(step)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A deployment that may be chosen: what it costs an hour, and its bounds."""

    cost: float
    bounds: Bounds

    @property
    def latency(self) -> int:
        """The latency of a request alone, in steps as wide as those of rates: what differs by less
        is no reason to prefer one of two."""
        return nearest_step(self.bounds.latency_us)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was found of a deployment.

    Attributes:
        kind: `met`, its capacity is known; `unmet`, no rate meets the SLO; or `dominated`, another
            costs no more, is no slower alone and has no less capacity.
        step: the capacity, as a step of the grid, where it is known.
        values: of the SLO's limits at that step; of one that is `unmet`, the best known.
        simulations: how many it took.
    """

    kind: Literal["met", "unmet", "dominated"]
    step: int | None = None
    values: tuple[float | None, ...] | None = None
    simulations: int = 0

    @classmethod
    def of(cls, found: Capacity, above: int | None) -> Outcome:
        """Of a capacity that was asked to be more than `above`."""
        if found.step is not None:
            return cls("met", found.step, found.values, found.simulations)
        kind = "unmet" if above is None else "dominated"
        return cls(kind, None, found.values, found.simulations)


Evaluate = Callable[[int, int | None, int], Future[Capacity]]
"""Starts the search for the capacity of a candidate, by its number: above a step, up to another."""


def outcomes(
    candidates: Sequence[Candidate],
    evaluate: Evaluate,
    slo: Slo,
    known: Mapping[int, Outcome] | None = None,
    *,
    prune: bool = True,
    ahead: int = _AHEAD,
) -> Iterator[tuple[int, Outcome]]:
    """The outcome of each candidate with its number, `in_order`. Those that are
    `known` from an earlier search of the same candidates are not evaluated again. A
    candidate is judged by all before it but the last `ahead`, which may be running: so the number
    of processes changes no result. Without `prune` every capacity is searched for."""
    known = known or {}
    found: dict[int, Outcome] = {}
    pending: collections.deque[tuple[int, Callable[[], Outcome]]] = collections.deque()

    def best_step(candidate: Candidate) -> int | None:
        """The most capacity of those found that are as cheap and as fast alone."""
        return max(
            (
                outcome.step
                for number, outcome in found.items()
                if outcome.step is not None
                and candidates[number].cost <= candidate.cost
                and candidates[number].latency <= candidate.latency
            ),
            default=None,
        )

    def begun(number: int) -> Callable[[], Outcome]:
        candidate = candidates[number]
        above = best_step(candidate) if prune else None
        if number in known:
            return lambda: known[number]
        if prune and candidate.bounds.rules_out(slo):
            return lambda: Outcome("unmet", values=candidate.bounds.alone)
        if above is not None and candidate.bounds.last_step <= above:
            return lambda: Outcome("dominated")
        future = evaluate(number, above, candidate.bounds.last_step)
        return lambda: Outcome.of(future.result(), above)

    def ended() -> tuple[int, Outcome]:
        number, result = pending.popleft()
        found[number] = result()
        return number, found[number]

    for number in in_order(candidates):
        if len(pending) == ahead:
            yield ended()
        pending.append((number, begun(number)))
    while pending:
        yield ended()


def in_order(candidates: Sequence[Candidate]) -> list[int]:
    """The numbers of candidates, the cheapest first, then the fastest alone, then those that may
    have the most capacity: none is better than one before it in both cost and latency, so that the
    capacity of each is searched for only above those that it has to exceed."""
    ranks = [
        (candidate.cost, candidate.latency, -candidate.bounds.last_step) for candidate in candidates
    ]
    return sorted(range(len(candidates)), key=lambda number: ranks[number])


def front(candidates: Sequence[Candidate], found: Mapping[int, Outcome]) -> list[int]:
    """The Pareto front: the deployments than which none is better in cost, latency alone or
    capacity, and no worse in the others; the cheapest first."""
    order = [number for number in in_order(candidates) if number in found]
    merits = {
        number: (-candidates[number].cost, -candidates[number].latency, step)
        for number in order
        if (step := found[number].step) is not None
    }
    best: list[int] = []
    for number, merit in merits.items():
        others = (merits[other] for other in merits if other != number)
        better = any(
            other != merit and all(b >= a for a, b in zip(merit, other)) for other in others
        )
        if not better and merit not in (merits[other] for other in best):
            best.append(number)
    return sorted(best, key=lambda number: merits[number], reverse=True)


def winner(candidates: Sequence[Candidate], found: Mapping[int, Outcome]) -> int | None:
    """The cheapest deployment that serves the load at its own rate; of several that with the most
    capacity, and then the fastest alone. None if none serves it."""
    best = [number for number in front(candidates, found) if found[number].step >= 0]
    return min(
        best,
        key=lambda n: (candidates[n].cost, -found[n].step, candidates[n].latency),
        default=None,
    )


class Processes:
    """Runs searches for capacities in this process, or in several others."""

    def __init__(self, slo: Slo, count: int) -> None:
        self._slo = slo
        self._pool = None
        if count > 1:
            self._pool = ProcessPoolExecutor(
                count, multiprocessing.get_context("spawn"), _begin_process
            )

    def submit(self, engine: EngineUnderLoad, above: int | None, last: int) -> Future[Capacity]:
        if self._pool is not None:
            return self._pool.submit(engine.capacity, self._slo, above, last)
        done: Future[Capacity] = Future()
        done.set_result(engine.capacity(self._slo, above, last))
        return done

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=not any(raised), cancel_futures=True)


def _begin_process() -> None:
    """Leaves Ctrl-C to the process that started this one, and ends when that has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def end_with_it() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()
