"""Results of a load: latencies, throughput, goodput, fluidity. Pure computation."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.loadgen.timed_response import TimedResponse
from jaxserve.loadgen.trace import TraceRequest
from jaxserve.metrics.fluidity import (
    Deadlines,
    Fluidity,
    fluid_decode_us,
    fluid_token_rate,
    fluidity,
)
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import Percentiles

FLUID = 0.9
"""Fluidity index from which a request counts as fluid (Agrawal et al., 2024)."""


@dataclass(frozen=True)
class RequestResult:
    """One request of a load, when it was sent [us since the load began], and its response."""

    place: int
    request: TraceRequest
    sent_us: int
    response: TimedResponse

    @property
    def lag_us(self) -> int:
        """How late the generator sent the request. Not included in latencies."""
        return self.sent_us - self.request.arrival_us

    @property
    def completed(self) -> bool:
        return self.response.failure is None

    @property
    def end_us(self) -> int:
        """End of the response, since the load began."""
        return self.sent_us + self.response.end_us

    @property
    def prompt_tokens(self) -> int:
        """As counted by the server, or else as requested."""
        counted = self.response.prompt_tokens
        return self.request.prompt_tokens if counted is None else counted

    @property
    def ttft_us(self) -> int | None:
        """Time to first token, from sending."""
        return self.response.token_us[0] if self.response.token_us else None

    @property
    def between_us(self) -> tuple[int, ...]:
        """Inter-token latencies; 0 between tokens that arrived together."""
        times = self.response.token_us
        return tuple(later - earlier for earlier, later in itertools.pairwise(times))

    @property
    def tpot_us(self) -> int | None:
        """Mean time per output token after the first; None for a single token."""
        times = self.response.token_us
        return (times[-1] - times[0]) // (len(times) - 1) if len(times) > 1 else None

    def fluidity(self, deadlines: Deadlines) -> Fluidity:
        prefill_us = deadlines.prefill_us(self.prompt_tokens)
        return fluidity(0, self.response.token_us, prefill_us, deadlines.decode_us)

    def fluid_decode_us(self, deadlines: Deadlines) -> int | None:
        """The shortest time per token at which this response is fluid; None if there is none."""
        return fluid_decode_us(0, self.response.token_us, deadlines.prefill_us(self.prompt_tokens))

    def as_json(self) -> dict[str, Any]:
        """All times of this request, in whole microseconds; token times are since `sent_us`."""
        return {
            "place": self.place,
            "arrival_us": self.request.arrival_us,
            "sent_us": self.sent_us,
            "asked_prompt_tokens": self.request.prompt_tokens,
            "asked_output_tokens": self.request.output_tokens,
            **dataclasses.asdict(self.response),
        }


@dataclass(frozen=True)
class Objectives:
    """Service level objectives of one request, in microseconds; None sets no limit.

    `itl_us` applies to every inter-token latency, `tpot_us` to their mean.
    """

    ttft_us: int | None = None
    itl_us: int | None = None
    tpot_us: int | None = None
    e2e_us: int | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in self.limits_us())

    def limits_us(self) -> tuple[int | None, ...]:
        """For TTFT, ITL, TPOT and end-to-end latency."""
        return (self.ttft_us, self.itl_us, self.tpot_us, self.e2e_us)

    def met_by(self, result: RequestResult) -> bool:
        """Whether a request met all objectives. A failed request did not."""
        longest_us = max(result.between_us, default=None)
        times = (result.ttft_us, longest_us, result.tpot_us, result.response.end_us)
        return result.completed and all(
            us is None or limit is None or us <= limit for us, limit in zip(times, self.limits_us())
        )


@dataclass(frozen=True)
class Summary:
    """Statistics of a load. Rates are per second of `elapsed_us`, from sending the first request to
    the end of the last response; tokens, latencies and fluidity are those of completed requests,
    None if none has any. `asked_` are the token counts that the load requested for them.

    `between_us` is over all gaps of all responses, `tpot_us` over the means of the responses.
    `goodput` counts requests that met the objectives, None without objectives.
    `fluid_tokens_per_s` is None if the responses were too short to limit it.
    """

    requests: int
    completed: int
    failures: dict[str, int]
    elapsed_us: int
    prompt_tokens: int
    asked_prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    asked_output_tokens: int
    ttft_us: Percentiles | None
    between_us: Percentiles | None
    tpot_us: Percentiles | None
    e2e_us: Percentiles | None
    lag_us: Percentiles
    max_lag_us: int
    goodput: int | None
    mean_fluidity: float | None
    fluid: int
    fluid_tokens_per_s: float | None

    @classmethod
    def of(
        cls, results: Sequence[RequestResult], objectives: Objectives, deadlines: Deadlines
    ) -> Summary:
        """Raises ValueError for empty results."""
        done = [result for result in results if result.completed]
        failures = [result.response.failure for result in results if not result.completed]
        counts = (result.response.cached_tokens for result in done)
        cached = [count for count in counts if count is not None]
        indices = [result.fluidity(deadlines).index for result in done]
        paces = [result.fluid_decode_us(deadlines) for result in done]
        lags = [result.lag_us for result in results]
        begin_us = min(result.sent_us for result in results)
        return cls(
            requests=len(results),
            completed=len(done),
            failures=dict(collections.Counter(failures).most_common()),
            elapsed_us=max(1, max(result.end_us for result in results) - begin_us),
            prompt_tokens=sum(result.prompt_tokens for result in done),
            asked_prompt_tokens=sum(result.request.prompt_tokens for result in done),
            cached_tokens=sum(cached) if cached else None,
            output_tokens=sum(len(result.response.token_us) for result in done),
            asked_output_tokens=sum(result.request.output_tokens for result in done),
            ttft_us=_percentiles(result.ttft_us for result in done),
            between_us=_percentiles(gap for result in done for gap in result.between_us),
            tpot_us=_percentiles(result.tpot_us for result in done),
            e2e_us=_percentiles(result.response.end_us for result in done),
            lag_us=Percentiles(*(percentile(lags, p) for p in (50, 90, 99))),
            max_lag_us=max(lags),
            goodput=sum(map(objectives.met_by, results)) if objectives else None,
            mean_fluidity=sum(indices) / len(indices) if indices else None,
            fluid=sum(index >= FLUID for index in indices),
            fluid_tokens_per_s=fluid_token_rate(paces) if paces else 0.0,
        )

    def per_second(self, count: int) -> float:
        return count * 1e6 / self.elapsed_us


def _percentiles(values: Iterable[int | None]) -> Percentiles | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Percentiles(*(percentile(known, p) for p in (50, 90, 99)))
