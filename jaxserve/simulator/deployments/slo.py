"""Service level objectives of a load: limits of percentiles, such as `ttft=2s,itl_p90=50ms`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Self

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import ConfigError
from jaxserve.metrics.fluidity import INTERACTIVE, Deadlines, fluidity
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import SequenceSummary

_LATENCIES = ("queue", "ttft", "itl", "tpot", "e2e")
_OF_THE_QUEUE = ("queue", "ttft", "e2e", "fluidity")
"""Those that a queue that grows for ever breaks at last."""
_PERCENT = 99
_UNITS_US = {"us": 1, "ms": 1_000, "s": 1_000_000}
_TERM = re.compile(r"(?P<metric>[a-z0-9]+)(?:_p(?P<percent>\d+))?=(?P<value>.+)")
_TIME = re.compile(r"(?P<number>\d*\.?\d+)(?P<unit>us|ms|s)")


@dataclasses.dataclass(frozen=True)
class Limit:
    """`percent` % of the requests, of `itl` of all gaps between tokens, take at most `limit`
    microseconds; of `fluidity` they have at least that index. `queue` is the scheduling delay, from
    the arrival to the first step, which clients do not see."""

    metric: str
    percent: int
    limit: float

    def __str__(self) -> str:
        return f"{self.metric}_p{self.percent}"

    def shown(self, value: float) -> str:
        """A value of this metric, human-readable."""
        return f"{value:.3f}" if self.metric == "fluidity" else f"{value / 1000:,.1f} ms"

    @property
    def text(self) -> str:
        """The limit, human-readable."""
        limit = self.limit
        return f"{self} {limit:g}" if self.metric == "fluidity" else f"{self} {limit / 1000:,g} ms"

    def over(self, value: float) -> float:
        """How many times the limit a value is; at most 1 where it is met."""
        if self.metric == "fluidity":
            return self.limit / value if value else float("inf")
        return value / self.limit

    @property
    def fewest_requests(self) -> int:
        """With fewer the percentile is the worst value, except that the 100th always is."""
        return 1 if self.percent == 100 else cdiv(100, 100 - self.percent)

    def may_miss(self, requests: int) -> int:
        """How many of so many requests may be over the limit."""
        return requests - cdiv(self.percent * requests, 100)


@dataclasses.dataclass(frozen=True)
class Slo:
    """What a load must meet. `deadlines` are those of the fluidity index."""

    limits: tuple[Limit, ...]
    deadlines: Deadlines = INTERACTIVE

    @classmethod
    def of(cls, text: str, deadlines: Deadlines = INTERACTIVE) -> Self:
        """From terms such as `ttft=2s`, of the 99th percentile, or `itl_p90=50ms`.

        Raises ConfigError for another text, and where any load would be met, however long its
        queue.
        """
        limits = tuple(_limit(term.strip()) for term in text.split(","))
        names = [str(limit) for limit in limits]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"slo has {twice[0]} twice; give it once.")
        if not any(limit.metric in _OF_THE_QUEUE for limit in limits):
            raise ConfigError(
                f"slo is {text!r}, which any rate meets with a long enough queue; add a limit of "
                f"{', '.join(_OF_THE_QUEUE[:-1])} or {_OF_THE_QUEUE[-1]}, such as ttft=2s."
            )
        return cls(limits, deadlines)

    @property
    def queue_us(self) -> tuple[Limit, ...]:
        """The limits of the time before a request's first step."""
        return tuple(limit for limit in self.limits if limit.metric == "queue")

    @property
    def first_token_us(self) -> tuple[Limit, ...]:
        """The limits that a request is over when its first token takes longer than they."""
        return tuple(limit for limit in self.limits if limit.metric in ("ttft", "e2e"))

    @property
    def gaps_us(self) -> tuple[Limit, ...]:
        """The limits of times between tokens."""
        return tuple(limit for limit in self.limits if limit.metric == "itl")

    def measured(self, requests: Sequence[SequenceSummary]) -> tuple[float, ...]:
        """The value of each limit's metric over requests, one or more, with their token times."""
        return tuple(self._measured(limit, requests) for limit in self.limits)

    def met(self, values: Sequence[float]) -> bool:
        return self.over(values) <= 1

    def over(self, values: Sequence[float]) -> float:
        """How many times its limit the worst of the values is."""
        return max(limit.over(value) for limit, value in zip(self.limits, values))

    def _measured(self, limit: Limit, requests: Sequence[SequenceSummary]) -> float:
        if limit.metric == "fluidity":
            return -percentile([-self._index(request) for request in requests], limit.percent)
        found = [us for request in requests for us in _VALUES_US[limit.metric](request)]
        return percentile(found, limit.percent) if found else 0

    def _index(self, request: SequenceSummary) -> float:
        deadlines = self.deadlines
        return fluidity(
            request.arrival_us,
            request.token_us,
            deadlines.prefill_us(request.prompt_tokens),
            deadlines.decode_us,
        ).index


_VALUES_US: dict[str, Callable[[SequenceSummary], Sequence[int]]] = {
    "queue": lambda request: (request.queue_us,),
    "ttft": lambda request: (request.ttft_us,),
    "itl": lambda request: request.inter_token_us,
    "tpot": lambda request: _mean(request.inter_token_us),
    "e2e": lambda request: (request.e2e_us,),
}


def _mean(gaps_us: Sequence[int]) -> tuple[int, ...]:
    return (sum(gaps_us) // len(gaps_us),) if gaps_us else ()


def _limit(term: str) -> Limit:
    """Raises ConfigError."""
    found = _TERM.fullmatch(term)
    if found is None:
        raise ConfigError(
            f"slo has {term!r}; it must be terms such as ttft=2s or itl_p90=50ms, with commas "
            "between them."
        )
    metric, percent = found["metric"], int(found["percent"] or _PERCENT)
    if metric not in (*_LATENCIES, "fluidity"):
        raise ConfigError(
            f"slo has {metric!r}; it must be {', '.join(_LATENCIES)} or fluidity, such as ttft=2s."
        )
    if not 1 <= percent <= 100:
        raise ConfigError(f"slo has the percentile {percent}; it must be from 1 to 100.")
    if metric == "fluidity":
        try:
            index = float(found["value"])
        except ValueError:
            index = 0.0
        if not 0 < index <= 1:
            raise ConfigError(f"slo has {term!r}; the index must be above 0 and at most 1.")
        return Limit(metric, percent, index)
    time = _TIME.fullmatch(found["value"])
    us = time and float(time["number"]) * _UNITS_US[time["unit"]]
    if not us:
        raise ConfigError(
            f"slo has {term!r}; the limit must be a time above 0 with its unit, us, ms or s, such "
            f"as {metric}=50ms."
        )
    return Limit(metric, percent, us)
