"""Options of `jaxserve bench serve` and `jaxserve simulate`: the load, the SLOs, the deadlines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from jaxserve.core.errors import ConfigError
from jaxserve.loadgen.lengths import (
    LengthPairs,
    Quantiles,
    lognormal_lengths,
    uniform_lengths,
    zipf_lengths,
)
from jaxserve.loadgen.results import Objectives
from jaxserve.loadgen.trace import Fit, TraceRequest, drawn, gaps, read_trace
from jaxserve.metrics.fluidity import Deadlines, linear_prefill

NOTABLE_LAG_US = 50_000
"""With a 99th percentile of lag above this, the load that was sent is not the one asked for."""

_NUM_REQUESTS = 32
_NUM_TO_SEARCH = 100
_FEWEST_TO_SEARCH = 10
_TRACED = ("rate_scale", "length_scale")
_P90 = ("input_len_p90", "output_len_p90")
_DRAWN = ("input_len", "output_len", "random_range_ratio", "zipf_theta", *_P90)


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Arrival times and lengths: from a trace, or drawn at random.

    Attributes:
        trace: CSV with arrived_at, num_prefill_tokens, num_decode_tokens (Vidur) or TIMESTAMP,
            ContextTokens, GeneratedTokens (Azure), or JSON lines with timestamp, input_length,
            output_length, hash_ids (Mooncake). Without one, arrivals and lengths are drawn, and
            with request_rate arrivals alone.
        rate_scale: speeds up the trace's arrivals by this factor.
        length_scale: multiplies the trace's lengths, and the prefixes that its prompts share.
        request_rate: requests per second on average, by default those of the trace, or 1; inf sends
            all at once.
        burstiness: with request_rate or without a trace, the shape of the gamma distribution of
            gaps between requests: 1, the default, for Poisson arrivals, less for bursts, inf for
            equal gaps.
        input_len: without a trace, tokens per prompt; by default 128.
        output_len: without a trace, output tokens per request; by default 64.
        random_range_ratio: without a trace, draw lengths within this share of the given ones; by
            default 0.
        zipf_theta: with random_range_ratio, draw the tokens of a request by Zipf's law with this
            exponent, so that short requests are the most frequent, all with the same ratio of
            prompt to output; by default both lengths are uniform.
        input_len_p90: without a trace, draw log-normal prompts with the median input_len and this
            90th percentile.
        output_len_p90: the same of outputs.
        max_input_tokens: longer prompts are truncated.
        max_output_tokens: longer outputs are truncated.
        num_requests: send at most this many; by default the whole trace, or 32 without one (100
            where a rate is searched for).
        duration_s: send only requests that arrive within this many seconds.
    """

    trace: Path | None = None
    rate_scale: float | None = None
    length_scale: float | None = None
    request_rate: float | None = None
    burstiness: float | None = None
    input_len: int | None = None
    output_len: int | None = None
    random_range_ratio: float | None = None
    zipf_theta: float | None = None
    input_len_p90: int | None = None
    output_len_p90: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        names, why = (_TRACED, "without") if self.trace is None else (_DRAWN, "with")
        for name in names:
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} has no effect {why} a trace; leave it out.")
        if self.trace is not None and self.request_rate is None and self.burstiness is not None:
            raise ConfigError(
                "burstiness has no effect with the times of a trace; leave it out, or give "
                "request_rate, by which arrivals are drawn."
            )
        if self.rate_scale is not None and self.request_rate is not None:
            raise ConfigError("rate_scale has no effect with request_rate; leave one of them out.")
        _check_positive(self, but=("request_rate", "burstiness", "random_range_ratio"))
        for name in ("request_rate", "burstiness"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be more than 0, or inf.")
        ratio = self.random_range_ratio
        if ratio is not None and not 0 <= ratio <= 1:
            raise ConfigError(f"random_range_ratio is {ratio}; it must be from 0 to 1.")
        if self.zipf_theta is not None and not ratio:
            raise ConfigError(
                f"zipf_theta is {self.zipf_theta}, and random_range_ratio, within which lengths "
                "are drawn, is missing; give both."
            )
        self._check_p90()

    def _check_p90(self) -> None:
        """Raises ConfigError for 90th percentiles below the median, or of another law."""
        for name, median in zip(_P90, self._means()):
            p90 = getattr(self, name)
            if p90 is None:
                continue
            if self.random_range_ratio is not None:
                raise ConfigError(
                    f"{name} is {p90}, for log-normal lengths, and random_range_ratio is for "
                    "others; leave one of them out."
                )
            if p90 < median:
                length = name.removesuffix("_p90")
                raise ConfigError(
                    f"{name} is {p90}, less than the median, {length} of {median}; set it to that "
                    "or more."
                )

    def _means(self) -> tuple[int, int]:
        """Tokens of a drawn prompt, and of an output: the medians of log-normal ones."""
        return self.input_len or 128, self.output_len or 64

    def _lengths(self, seed: int) -> LengthPairs:
        """Those of drawn requests."""
        prompt, output = self._means()
        ratio = self.random_range_ratio or 0.0
        if self.zipf_theta is not None:
            return zipf_lengths(prompt, output, seed, ratio, self.zipf_theta)
        if self.input_len_p90 is None and self.output_len_p90 is None:
            return uniform_lengths(prompt, output, seed, ratio)
        return lognormal_lengths(
            Quantiles(prompt, self.input_len_p90 or prompt),
            Quantiles(output, self.output_len_p90 or output),
            seed,
        )

    def requests_to_search(self, seed: int) -> list[TraceRequest]:
        """As `requests`, by default more, so that a search for the rate sees the queue. Raises
        ConfigError for too few."""
        limited = self.trace is not None or self.num_requests or self.duration_s is not None
        more = self if limited else dataclasses.replace(self, num_requests=_NUM_TO_SEARCH)
        requests = more.requests(seed)
        if len(requests) < _FEWEST_TO_SEARCH:
            raise ConfigError(
                f"the load has {len(requests)} requests, too few to see a queue grow; with "
                f"find_capacity give {_FEWEST_TO_SEARCH} or more, better hundreds."
            )
        return requests

    def rate_of(self, requests: Sequence[TraceRequest]) -> float:
        """The own rate of a load, requests per second: that asked for, or a trace's mean. Raises
        ConfigError for one that arrives all at once."""
        span_s = requests[-1].arrival_us / 1e6
        rate = (len(requests) - 1) / span_s if span_s else math.inf
        if self.trace is None or self.request_rate is not None:
            rate = self.request_rate or 1.0
        if math.isinf(rate):
            raise ConfigError(
                "the load arrives all at once, so that its rate cannot be changed; leave "
                "request_rate inf out, or give a trace of two requests or more with their times."
            )
        return rate

    def requests(self, seed: int) -> list[TraceRequest]:
        """One or more requests. Raises ConfigError for a trace that is unreadable or has none."""
        fit = Fit(
            self.rate_scale or 1.0,
            self.length_scale or 1.0,
            self.max_input_tokens,
            self.max_output_tokens,
            self.num_requests,
            None if self.duration_s is None else round(self.duration_s * 1e6),
        )
        if self.trace is not None and self.request_rate is not None:
            apart = gaps(self.request_rate, seed, self.burstiness or 1.0)
            return fit(read_trace(self.trace, apart))
        if self.trace is not None:
            return fit(read_trace(self.trace))
        all_at_once = self.request_rate == math.inf
        if self.num_requests is None and (self.duration_s is None or all_at_once):
            fit = dataclasses.replace(fit, num_requests=_NUM_REQUESTS)
        lengths = self._lengths(seed)
        return fit(drawn(self.request_rate or 1.0, lengths, seed, self.burstiness or 1.0))


@dataclasses.dataclass(frozen=True)
class SloOptions:
    """Goodput counts the requests that meet all of these.

    Attributes:
        slo_ttft_ms: time to first token.
        slo_itl_ms: inter-token latency, between any two tokens.
        slo_tpot_ms: mean time per output token after the first.
        slo_e2e_ms: end-to-end latency.
    """

    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_e2e_ms: float | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        _check_positive(self)

    def objectives(self) -> Objectives:
        limits = dataclasses.astuple(self)
        return Objectives(*(None if ms is None else round(ms * 1000) for ms in limits))


@dataclasses.dataclass(frozen=True)
class Deadline:
    """Fluidity is the share of tokens, weighted by lateness, that met these.

    Attributes:
        deadline_first_ms: deadline of the first token.
        deadline_prompt_token_ms: added to the first token's deadline per prompt token.
        deadline_token_ms: deadline of each later token, after the previous deadline.
    """

    deadline_first_ms: float = 1000.0
    deadline_prompt_token_ms: float = 2.0
    deadline_token_ms: float = 100.0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        _check_positive(self, but=("deadline_prompt_token_ms",))
        per_token_ms = self.deadline_prompt_token_ms
        if not 0 <= per_token_ms < math.inf:
            raise ConfigError(f"deadline_prompt_token_ms is {per_token_ms}; it must be 0 or more.")

    def deadlines(self) -> Deadlines:
        first_us, prompt_token_us, token_us = (round(ms * 1000) for ms in dataclasses.astuple(self))
        return Deadlines(linear_prefill(first_us, prompt_token_us), max(1, token_us))


def _check_positive(options: object, but: tuple[str, ...] = ()) -> None:
    for name, value in vars(options).items():
        if name not in but and isinstance(value, (int, float)) and not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; it must be more than 0.")
