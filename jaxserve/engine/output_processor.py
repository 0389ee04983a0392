"""Appends the tokens of a step to their requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxserve.core.in_flight import NO_TOKEN, StepResults, TokenLogprobs
from jaxserve.core.step_plan import ScheduledChunk, StepPlan
from jaxserve.engine.request import Request, SequenceOutput, Stop, TokenScores

SampledToken = tuple[int, int, int]
"""A token that a sequence gained: its row in the step's log probabilities, the sequence's id, its
own id."""


class Ended(NamedTuple):
    """A sequence that its last token finished (`stop`), or that failed (`error`)."""

    request: Request
    output: SequenceOutput
    stop: Stop | None
    error: str | None = None


class OutputProcessor:
    """Unfinished requests, and the outputs of their sequences."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self._owners: dict[int, tuple[Request, SequenceOutput]] = {}

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        for output in request.unfinished:
            self._owners[output.seq.seq_id] = request, output

    def remove(self, request: Request, output: SequenceOutput) -> None:
        """Removes a finished sequence, and with its last sequence the request."""
        del self._owners[output.seq.seq_id]
        if request.finished:
            del self.requests[request.request_id]

    def process(
        self, results: StepResults, tokens: Iterable[SampledToken]
    ) -> tuple[list[Request], list[Ended]]:
        """Appends a step's tokens, which `Sequence.output_token_ids` already has, to the outputs,
        at most one per sequence. Returns the requests that gained tokens, and the sequences that
        end with them."""
        touched: dict[str, Request] = {}
        ended = []
        for row, seq_id, token_id in tokens:
            request, output = self._owners[seq_id]
            touched[request.request_id] = request
            if token_id == NO_TOKEN:
                output.seq.output_token_ids.pop()
                error = "the model's logits leave no token to sample"
                ended.append(Ended(request, output, None, error))
                continue
            scores, count = None, output.seq.params.logprobs
            if results.logprobs is not None and count is not None:
                scores = _scores(results.logprobs, row, count)
            stop = output.append(token_id, scores)
            if stop is not None or output.error is not None:
                ended.append(Ended(request, output, stop, output.error))
        return list(touched.values()), ended

    def add_prompt_logprobs(self, plan: StepPlan, results: StepResults) -> None:
        """Adds a step's log probabilities of prompt tokens, if it has any."""
        if results.prompt_logprobs is None:
            return
        first = 0
        for chunk in plan.prefills:
            request, _ = self._owners.get(chunk.seq.seq_id, (None, None))
            if request is not None and request.params.prompt_logprobs is not None:
                _add_chunk(request, chunk, results.prompt_logprobs, first)
            first += chunk.num_tokens


def _add_chunk(
    request: Request, chunk: ScheduledChunk, scored: TokenLogprobs[np.ndarray], first: int
) -> None:
    """A token's hidden state scores the next token."""
    position = chunk.start + 1
    count = min(chunk.num_tokens, len(request.prompt_token_ids) - position)
    wanted = request.params.prompt_logprobs
    request.add_prompt_scores(
        position, [_scores(scored, first + i, wanted) for i in range(max(0, count))]
    )


def _scores(scored: TokenLogprobs[np.ndarray], row: int, count: int) -> TokenScores:
    ids, logprobs = scored.top_ids[row, :count], scored.top_logprobs[row, :count]
    return TokenScores(
        logprob=float(scored.logprobs[row]),
        rank=int(scored.ranks[row]),
        top=tuple(zip(ids.tolist(), logprobs.tolist())),
    )
