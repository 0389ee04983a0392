"""The capacity of an engine: the highest rate of requests at which a load meets its SLO.

Rates are those of a grid, `ratio ** step` times the load's own with whole steps, so that a capacity
does not depend on where the search for it began. `raised`, `lowered` and `bisected` search that
grid, for simulations here and for live servers in `jaxserve bench serve --find-capacity`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from jaxserve.core.events import Admitted, Arrived, Collected, Record
from jaxserve.core.settings.config import EngineConfig
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import SequenceSummary
from jaxserve.simulator.deployments.bounds import (
    LoadTokens,
    least_decode_s,
    least_seconds,
    num_decodes,
)
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.deployments.slo import Slo
from jaxserve.simulator.simulation import Arrival
from jaxserve.simulator.step_times import StepTimes

_RATIO = 1.025
HALF = round(math.log(2) / math.log(_RATIO))
"""Steps of the grid that halve the rate."""
FEWEST_ROUNDS = 4
"""A load of fewer requests than so many times those at once ends before its queue is seen."""
_TRIES = 4
"""Rates that are tried downwards, at growing distances, before the SLO counts as out of reach: the
last is about a thousandth of the highest."""


def rate_at(step: int, own_rate: float) -> float:
    """The rate of a step of the grid, whose step 0 is `own_rate`."""
    return own_rate * _RATIO**step


def last_step(rate: float, own_rate: float) -> int:
    """The highest step whose rate is at most `rate`."""
    return math.floor(math.log(rate / own_rate) / math.log(_RATIO))


def nearest_step(value: float) -> int:
    """The step of the grid from 1 on that is nearest to a value of 1 or more."""
    return round(math.log(max(1, value)) / math.log(_RATIO))


def raised(meets: Callable[[int], bool], met: int, steps: Iterable[int]) -> tuple[int, int]:
    """The two that enclose the capacity: of `met`, which meets the SLO, and ever higher `steps`.
    Raises ValueError when all of these meet it."""
    for step in steps:
        if not meets(step):
            return met, step
        met = step
    raise ValueError(f"step {met} meets the SLO, and there is no higher one to try")


def lowered(
    meets: Callable[[int], bool], missed: int, steps: Iterable[int]
) -> tuple[int | None, int]:
    """The two that enclose the capacity: of ever lower `steps`, and `missed`, which misses the
    SLO. None and the lowest that was tried if none meets it."""
    for step in steps:
        if meets(step):
            return step, missed
        missed = step
    return None, missed


def bisected(meets: Callable[[int], bool], met: int, missed: int) -> int:
    """The capacity, from a step that meets the SLO and a higher one that misses it. Assumes that a
    rate meets the SLO where a higher one does."""
    while missed - met > 1:
        middle = (met + missed) // 2
        if meets(middle):
            met = middle
        else:
            missed = middle
    return met


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests that one engine gets, with the times of arrival of the load's own rate.

    Attributes:
        arrivals: in order of time, one or more.
        rate: requests per second of this engine.
    """

    arrivals: Sequence[Arrival]
    rate: float

    def at(self, step: int) -> list[Arrival]:
        """The same requests at the rate of a step of the grid."""
        return [
            dataclasses.replace(arrival, time_us=round(arrival.time_us / _RATIO**step))
            for arrival in self.arrivals
        ]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What is known of an engine under a load without simulating the load.

    Attributes:
        last_step: the highest step of the grid that the engine could keep up with.
        latency_us: from the arrival to the last token of a request with the median lengths of the
            load, alone.
        alone: for each limit of the SLO, a value that its metric cannot be better than, at any
            rate; None where there is no bound.
    """

    last_step: int
    latency_us: int
    alone: tuple[float | None, ...]

    @classmethod
    def of(cls, deployment: Deployment, times: StepTimes, load: Load, slo: Slo) -> Bounds:
        """Raises RequestError when a request of the load can never run."""
        config, buckets = deployment.config, deployment.buckets
        tokens = LoadTokens.of(load.arrivals, config)
        busy_s = least_seconds(times, buckets, tokens, config)
        prompts = [len(arrival.token_ids) for arrival in load.arrivals]
        outputs = [arrival.params.max_tokens for arrival in load.arrivals]
        shares_prefixes = tokens.prefill < sum(prompts)

        def alone_us(prompt_tokens: int, output_tokens: int) -> int:
            output_tokens = min(output_tokens, config.max_model_len - prompt_tokens)
            session = deployment.session(times, prompt_tokens, output_tokens)
            return round((session.prefill_s + session.decode_s) * 1e6)

        def bound(metric: str, percent: int) -> float | None:
            if metric in ("itl", "tpot"):
                if config.num_speculative_tokens:
                    return None  # A step may yield several tokens.
                least_s = least_decode_s(times, buckets, config.pipeline_parallel_size)
                return least_s * 1e6 if tokens.decode else None
            if metric in ("fluidity", "queue") or shares_prefixes:
                return None
            return alone_us(percentile(prompts, percent), 1)

        return cls(
            last_step(len(load.arrivals) / busy_s, load.rate),
            alone_us(percentile(prompts, 50), percentile(outputs, 50)),
            tuple(bound(limit.metric, limit.percent) for limit in slo.limits),
        )

    def rules_out(self, slo: Slo) -> bool:
        """Whether no rate can meet the SLO."""
        known = [pair for pair in zip(slo.limits, self.alone) if pair[1] is not None]
        return any(limit.over(value) > 1 for limit, value in known)


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Where the search for a capacity ended.

    Attributes:
        step: of the grid, the highest that meets the SLO; None if none does, or none above the one
            that the search was asked to exceed.
        values: of the SLO's limits at that step; with None, at the lowest that was tried, or None.
        simulations: how many it took.
    """

    step: int | None
    values: tuple[float, ...] | None
    simulations: int


class CapacitySearch:
    """The search for the capacity of one engine, which counts its simulations."""

    def __init__(self, deployment: Deployment, times: StepTimes, load: Load, slo: Slo) -> None:
        self._deployment = deployment
        self._times = times
        self._load = load
        self._slo = slo
        self._met: dict[int, tuple[float, ...] | None] = {}

    def between(self, above: int | None, last: int) -> Capacity:
        """The capacity, a step of at most `last`. If it is not more than the step `above`, where
        that is given, it is None after one simulation.

        Assumes that a rate meets the SLO where a higher one does. Raises RequestError when a
        request can never run.
        """
        if above is not None:
            if last <= above or not self._meets(above + 1):
                return Capacity(None, None, len(self._met))
            ever_higher = (above + 2**power for power in itertools.count(1))
            steps = itertools.takewhile(lambda step: step < last, ever_higher)
            met, missed = raised(
                lambda step: step <= last and self._meets(step), above + 1, [*steps, last, last + 1]
            )
        else:
            widths = (2 * HALF // 3 * (2**power - 1) for power in itertools.count(1))
            steps = (last + 1 - width for width in itertools.islice(widths, _TRIES))
            met, missed = lowered(self._meets, last + 1, steps)
            if met is None:
                values = self._slo.measured(self._serve(missed, to_the_end=True))
                return Capacity(None, values, len(self._met) + 1)
        met = bisected(self._meets, met, missed)
        return Capacity(met, self._met[met], len(self._met))

    def at_once(self, step: int) -> float:
        """Requests that are waiting or running at a rate, on average while they arrive: by Little's
        law, if the load is much longer than a request."""
        served = self._serve(step, to_the_end=True)
        return rate_at(step, self._load.rate) * sum(r.e2e_us for r in served) / 1e6 / len(served)

    def _meets(self, step: int) -> bool:
        if step not in self._met:
            served = self._serve(step)
            values = served and self._slo.measured(served)
            self._met[step] = values if values and self._slo.met(values) else None
        return self._met[step] is not None

    def _serve(self, step: int, to_the_end: bool = False) -> list[SequenceSummary] | None:
        """The requests at one rate, as the engine served them; None once too many of them have
        waited too long, or too many tokens, unless it is simulated `to_the_end`."""
        arrivals = self._load.at(step)
        monitor = _SloMonitor(self._slo, arrivals, self._deployment.config)
        simulation = self._deployment.simulation(
            self._times, self._slo.deadlines, sinks=() if to_the_end else (monitor.fold,)
        )
        for _ in simulation.serve(arrivals, stop=lambda: monitor.too_many):
            pass
        if monitor.too_many:
            return None
        served = sorted(simulation.metrics.finished(), key=lambda each: int(each.request_id))
        # A request may arrive during a step, after which the engine takes it.
        return [
            summary._replace(arrival_us=arrival.time_us)
            for summary, arrival in zip(served, arrivals)
        ]


class _SloMonitor:
    """A sink of events that counts what was late for the SLO: requests, by their first steps and
    first tokens, and times between tokens.

    Attributes:
        too_many: whether the SLO is missed, whatever comes.
    """

    def __init__(self, slo: Slo, arrivals: Sequence[Arrival], config: EngineConfig) -> None:
        self.too_many = False
        self._arrivals = arrivals
        self._arrived_us: dict[int, int] = {}
        """Of sequences without a token."""
        self._last_us: dict[int, int] = {}
        """The last tokens of the others."""
        allowed = [
            [_MissBudget(limit.limit, limit.may_miss(len(arrivals))) for limit in limits]
            for limits in (slo.queue_us, slo.first_token_us)
        ]
        self._queued, self._requests = allowed
        num_gaps = sum(num_decodes(arrivals, config))
        self._gaps = [_MissBudget(limit.limit, limit.may_miss(num_gaps)) for limit in slo.gaps_us]

    def fold(self, record: Record) -> None:
        if type(record) is Arrived:
            self._arrived_us[record.sequence] = self._arrivals[int(record.request_id)].time_us
        elif type(record) is Admitted:
            self._waited(record.sequence, record.time_us, (*self._queued, *self._requests))
        elif type(record) is Collected:
            self._collected(record)

    def _collected(self, record: Collected) -> None:
        now_us, last_us = record.time_us, self._last_us
        for seq in record.sequences:
            if seq not in last_us:
                self._waited(seq, now_us, self._requests)
                last_us[seq] = now_us
        for limit in self._gaps:
            since_us = now_us - limit.us
            limit.left -= sum(last_us[seq] < since_us for seq in record.sequences)
            self.too_many |= limit.left < 0
        last_us.update(dict.fromkeys(record.sequences, now_us))

    def _waited(self, seq: int, now_us: int, limits: Iterable[_MissBudget]) -> None:
        """Of a sequence that got its first step or its first token now."""
        waited_us = now_us - self._arrived_us[seq]
        for limit in limits:
            if waited_us > limit.us and seq not in limit.late:
                limit.late.add(seq)
                limit.left -= 1
                self.too_many |= limit.left < 0


@dataclasses.dataclass
class _MissBudget:
    """How many may still take longer than a limit; `late` are those that are counted once."""

    us: float
    left: int
    late: set[int] = dataclasses.field(default_factory=set)
