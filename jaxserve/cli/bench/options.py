"""What `jaxserve bench serve` takes: the load, and what answers are held to."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from jaxserve.engine.fluidity import Deadlines, linear_prefill
from jaxserve.errors import ConfigError
from jaxserve.loadgen.results import Objectives
from jaxserve.loadgen.trace import Fit, TraceRequest, poisson, read_trace

_NUM_REQUESTS = 32


@dataclasses.dataclass(frozen=True)
class Load:
    """Arrivals and lengths: those of a trace, or random arrivals of equal requests.

    Attributes:
        trace: CSV with arrived_at, num_prefill_tokens, num_decode_tokens, or JSON lines with
            timestamp, input_length, output_length, hash_ids. None draws random arrivals.
        rate_scale: a trace's requests arrive so many times as fast.
        length_scale: a trace's lengths, and the prefixes that its prompts share, times this.
        request_rate: without a trace, requests per second on average; None is 1.
        input_len: without a trace, tokens of each prompt; None is 128.
        output_len: without a trace, tokens of each answer; None is 64.
        max_input_tokens: longer prompts are cut.
        max_output_tokens: longer answers are cut.
        num_requests: send at most so many; None is all of a trace, or else 32.
        duration_s: send what arrives within so many seconds.
        seed: of prompts and of random arrivals. None draws one, so that a second run does not find
            the prompts of the first in the server's cache.
    """

    trace: Path | None = None
    rate_scale: float | None = None
    length_scale: float | None = None
    request_rate: float | None = None
    input_len: int | None = None
    output_len: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        traced, drawn = ("rate_scale", "length_scale"), ("request_rate", "input_len", "output_len")
        names, why = (traced, "without") if self.trace is None else (drawn, "with")
        for name in names:
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} means nothing {why} a trace.")
        _check_positive(self, but="seed")

    def requests(self, seed: int) -> list[TraceRequest]:
        """At least one. Raises ConfigError for a trace that cannot be read or has none."""
        fit = Fit(
            self.rate_scale or 1.0,
            self.length_scale or 1.0,
            self.max_input_tokens,
            self.max_output_tokens,
            self.num_requests,
            None if self.duration_s is None else round(self.duration_s * 1e6),
        )
        if self.trace is not None:
            return fit(read_trace(self.trace))
        if self.num_requests is None and self.duration_s is None:
            fit = dataclasses.replace(fit, num_requests=_NUM_REQUESTS)
        lengths = self.input_len or 128, self.output_len or 64
        return fit(poisson(self.request_rate or 1.0, *lengths, seed))


@dataclasses.dataclass(frozen=True)
class Slo:
    """Goodput counts the requests that kept to all of these.

    Attributes:
        slo_ttft_ms: to the first token.
        slo_tbt_ms: from any token to the next.
        slo_tpot_ms: for a token after the first, on average.
        slo_e2e_ms: to the end of the answer.
    """

    slo_ttft_ms: float | None = None
    slo_tbt_ms: float | None = None
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
        deadline_first_ms: of the first token,
        deadline_prompt_token_ms: and so much more for each token of the prompt.
        deadline_token_ms: of each later token, from the deadline before.
    """

    deadline_first_ms: float = 1000.0
    deadline_prompt_token_ms: float = 2.0
    deadline_token_ms: float = 100.0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        _check_positive(self, but="deadline_prompt_token_ms")
        per_token_ms = self.deadline_prompt_token_ms
        if not 0 <= per_token_ms < math.inf:
            raise ConfigError(f"deadline_prompt_token_ms is {per_token_ms}; it must be 0 or more.")

    def deadlines(self) -> Deadlines:
        first_us, prompt_token_us, token_us = (round(ms * 1000) for ms in dataclasses.astuple(self))
        return Deadlines(linear_prefill(first_us, prompt_token_us), max(1, token_us))


def _check_positive(options: object, but: str = "") -> None:
    for name, value in vars(options).items():
        if name != but and isinstance(value, (int, float)) and not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; it must be more than 0.")
