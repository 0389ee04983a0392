"""The capacity of a live server: the highest rate at which a load meets its SLO.

The rates and the bisection are those of `jaxserve search`, with real requests in the place of
simulated ones, in the manner of Etalon's capacity search (Agrawal et al., 2024, arXiv:2407.07000).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxserve.cli.arguments.load_options import NOTABLE_LAG_US
from jaxserve.cli.terminal.text import milliseconds
from jaxserve.core.errors import EndpointError
from jaxserve.loadgen.results import RequestResult
from jaxserve.loadgen.series import in_flight
from jaxserve.loadgen.trace import TraceRequest
from jaxserve.metrics.fluidity import Deadlines
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import SequenceSummary
from jaxserve.simulator.deployments.capacity import HALF, bisected, lowered, raised, rate_at
from jaxserve.simulator.deployments.slo import Slo

_WARM_UP = 8
"""Requests that are sent before the first probe, at once."""
_HALVINGS = 10
"""How often the rate is halved before the SLO counts as out of reach."""

ServeTrace = Callable[[Sequence[TraceRequest], int], Sequence[RequestResult]]
"""Sends a load, whose prompts are those of no other number, and waits for all answers. Returns
fewer results than requests when it was stopped."""


class Stopped(Exception):
    """Ctrl-C or SIGTERM ended a probe."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """The load at one rate.

    Attributes:
        step: of the grid of rates.
        rate: requests per second.
        values: of the SLO's limits, over the answers that completed; None if none did.
        failed: requests that failed, each of which misses any SLO.
        lag_us: the 99th percentile of how late requests were sent.
        most_in_flight: requests at once.
        inconclusive: why this load is none of that rate; None for one that is.
    """

    slo: Slo
    step: int
    rate: float
    values: tuple[float, ...] | None
    failed: int
    lag_us: int
    most_in_flight: int
    inconclusive: str | None

    @classmethod
    def of(cls, slo: Slo, step: int, rate: float, results: Sequence[RequestResult]) -> Probe:
        done = [_seen(result, slo.deadlines) for result in results if result.completed]
        lag_us = percentile([result.lag_us for result in results], 99)
        inconclusive = None
        if lag_us > NOTABLE_LAG_US:
            inconclusive = f"the load generator was {milliseconds(lag_us)} late"
        elif max(r.sent_us for r in results) < min(r.end_us for r in results):
            inconclusive = "the load was over before its first answer"
        return cls(
            slo,
            step,
            rate,
            slo.measured(done) if done else None,
            len(results) - len(done),
            lag_us,
            max(in_flight(results)[1]),
            inconclusive,
        )

    @property
    def met(self) -> bool:
        meets = self.values is not None and self.slo.met(self.values)
        return meets and not self.failed and self.inconclusive is None

    def text(self) -> str:
        """One line."""
        words = [f"{self.rate:10,.3f} requests/s", *self._values()]
        verdict = "met" if self.met else "not met"
        if self.inconclusive is not None:
            verdict = f"does not count: {self.inconclusive}"
        elif self.failed:
            verdict = f"not met: {self.failed:,} failed"
        return "   ".join([*words, verdict])

    def reached(self) -> str:
        """The values, human-readable."""
        return ", ".join(self._values())

    def _values(self) -> list[str]:
        if self.values is None:
            return ["no answer"]
        return [f"{limit} {limit.shown(v)}" for limit, v in zip(self.slo.limits, self.values)]

    def as_json(self) -> dict[str, Any]:
        limits = map(str, self.slo.limits)
        return {
            "requests_per_s": self.rate,
            "values": self.values and dict(zip(limits, self.values)),
            "met": self.met,
            "failed": self.failed,
            "lag_p99_us": self.lag_us,
            "most_in_flight": self.most_in_flight,
            "inconclusive": self.inconclusive,
        }


@dataclasses.dataclass(frozen=True)
class Found:
    """What the probes tell, in the order in which they were made."""

    slo: Slo
    probes: Sequence[Probe]

    @functools.cached_property
    def best(self) -> Probe | None:
        """That of the highest rate that meets the SLO."""
        met = (probe for probe in self.probes if probe.met)
        return max(met, key=lambda probe: probe.step, default=None)

    @property
    def rate(self) -> float | None:
        """The capacity in requests per second; None if no rate that was tried meets the SLO."""
        return None if self.best is None else self.best.rate

    @property
    def at_least(self) -> str | None:
        """Why the capacity may be more: the next rate that was tried does not count. None if the
        server missed the SLO there."""
        above = [p for p in self.probes if self.best is None or p.step > self.best.step]
        return min(above, key=lambda probe: probe.step).inconclusive if above else None

    def text(self) -> str:
        """The capacity, or the best that there is instead."""
        if self.best is not None:
            about = f"{self.best.rate:,.3f} requests/s, with {self.best.reached()}"
            if self.at_least is None:
                return f"capacity: {about}"
            return f"capacity: at least {about}; at the next rate {self._mended(self.at_least)}"
        within = ", ".join(limit.text for limit in self.slo.limits)
        measured = [probe for probe in self.probes if probe.values is not None]
        if not measured:
            return f"no request was answered at any rate, within {within} or later."
        best = min(measured, key=lambda probe: (probe.failed, self.slo.over(probe.values)))
        why = best.inconclusive
        return (
            f"no rate that was tried meets {within}; the best seen is {best.reached()} at "
            f"{best.rate:,.3f} requests/s"
            + (f", with {best.failed:,} failed" if best.failed else "")
            + (f", where {self._mended(why)}" if why else ".")
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "capacity_requests_per_s": self.rate,
            "at_least": self.at_least,
            "probes": [probe.as_json() for probe in self.probes],
        }

    def _mended(self, inconclusive: str) -> str:
        """Why a probe does not count, and what to do about it."""
        if "load generator" in inconclusive:
            return f"{inconclusive}: give it more CPU, or run it on another machine."
        return f"{inconclusive}: give more requests with --num-requests."


class CapacityFinder:
    """The search for the capacity of a server: a bracket that doubles or halves the rate, and
    bisection. Each load drains before the next begins."""

    def __init__(
        self,
        serve: ServeTrace,
        requests: Sequence[TraceRequest],
        own_rate: float,
        slo: Slo,
        tell: Callable[[Probe], None],
    ) -> None:
        """`requests` arrive at `own_rate`, where the search begins; `tell` gets each probe."""
        self._serve = serve
        self._requests = requests
        self._own_rate = own_rate
        self._slo = slo
        self._tell = tell
        self._probes: dict[int, Probe] = {}

    def find(self) -> Found:
        """Raises Stopped, and EndpointError when the server does not answer at all."""
        self._warm_up()
        if self._meets(0):
            met, missed = raised(self._meets, 0, itertools.count(HALF, HALF))
        else:
            met, missed = lowered(self._meets, 0, self._halved())
        if met is not None:
            bisected(self._meets, met, missed)
        return self.so_far()

    def so_far(self) -> Found:
        return Found(self._slo, tuple(self._probes.values()))

    def _halved(self) -> Iterator[int]:
        """Steps that halve the rate, until each request was alone: a lower rate changes nothing."""
        for halvings in range(1, _HALVINGS + 1):
            if min(probe.most_in_flight for probe in self._probes.values()) == 1:
                return
            yield -halvings * HALF

    def _meets(self, step: int) -> bool:
        if step not in self._probes:
            faster = rate_at(step, 1.0)
            requests = [
                dataclasses.replace(each, arrival_us=round(each.arrival_us / faster))
                for each in self._requests
            ]
            rate = rate_at(step, self._own_rate)
            results = self._served(requests, 1 + len(self._probes))
            self._probes[step] = probe = Probe.of(self._slo, step, rate, results)
            self._tell(probe)
        return self._probes[step].met

    def _warm_up(self) -> None:
        few = self._requests[:_WARM_UP]
        self._served([dataclasses.replace(request, arrival_us=0) for request in few], 0)

    def _served(self, requests: Sequence[TraceRequest], number: int) -> Sequence[RequestResult]:
        results = self._serve(requests, number)
        if len(results) < len(requests):
            raise Stopped
        if all(result.response.failure == "no connection" for result in results):
            raise EndpointError(
                f"the server does not answer any more: {results[0].response.detail}; is it running?"
            )
        return results


def _seen(result: RequestResult, deadlines: Deadlines) -> SequenceSummary:
    """An answer as the client saw it, by the clock that begins when its request was sent."""
    times = result.response.token_us
    return SequenceSummary(
        request_id=str(result.place),
        arrival_us=0,
        admitted_us=None,
        first_token_us=times[0],
        last_token_us=times[-1],
        finish_us=result.response.end_us,
        finish_reason="",
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.response.cached_tokens or 0,
        output_tokens=len(times),
        preemptions=0,
        fluidity=result.fluidity(deadlines),
        token_us=times,
    )
