"""The loads of `jaxserve bench serve` as the simulator takes them, and what it made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.loadgen.prompts import plain_token_ids
from jaxserve.loadgen.results import RequestResult
from jaxserve.loadgen.timed_response import TimedResponse
from jaxserve.loadgen.trace import TraceRequest
from jaxserve.metrics.summaries import SequenceSummary
from jaxserve.simulator.simulation import Arrival


def arrivals(requests: Sequence[TraceRequest]) -> Iterator[Arrival]:
    for index, request in enumerate(requests):
        yield Arrival(
            request.arrival_us,
            plain_token_ids(index, request),
            SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True),
        )


def result(index: int, request: TraceRequest, summary: SequenceSummary) -> RequestResult:
    """What a client would have seen of a request."""
    arrival_us = request.arrival_us
    response = TimedResponse(
        token_us=tuple(us - arrival_us for us in summary.token_us),
        end_us=summary.finish_us - arrival_us,
        prompt_tokens=summary.prompt_tokens,
        cached_tokens=summary.cached_tokens,
        output_tokens=summary.output_tokens,
    )
    return RequestResult(index, request, arrival_us, response)


def check_lengths(requests: Sequence[TraceRequest], max_model_len: int) -> None:
    """Raises ConfigError for a prompt that no engine of this context accepts."""
    for number, request in enumerate(requests, start=1):
        if request.prompt_tokens >= max_model_len:
            raise ConfigError(
                f"request {number} has a prompt of {request.prompt_tokens} tokens, and "
                f"max_model_len is {max_model_len}; raise that, or truncate prompts by "
                f"max_input_tokens of at most {max_model_len - 1}."
            )
