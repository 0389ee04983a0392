"""Appends the tokens of a step to their requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.core.steps.results import NO_TOKEN, StepResults, TokenLogprobs
from jaxserve.engine.request import Request, SequenceOutput, Stop, TokenScores


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

    def append(
        self, seq: Sequence, token_id: int, results: StepResults, row: int, place: int
    ) -> tuple[Request, Ended | None]:
        """Appends a step's token, which `seq.output_token_ids` already has, to its sequence's
        output: number `place` of `results.sampled[row]`. Returns the request, and how the sequence
        ends, if it does with this token."""
        request, output = self._owners[seq.seq_id]
        if token_id == NO_TOKEN:
            seq.output_token_ids.pop()
            error = "the model's logits leave no token to sample"
            return request, Ended(request, output, None, error)
        entry = None
        if results.logprobs is not None and seq.params.logprobs is not None:
            place += row * results.width
            scores = _scores(results.logprobs, place, seq.params.num_listed_logprobs)
            entry = output.entry(token_id, scores)
        stop = output.append(token_id, entry)
        if stop is None and output.error is None:
            return request, None
        return request, Ended(request, output, stop, output.error)

    def pool(self, plan: StepPlan, results: StepResults) -> list[Ended]:
        """Adds a step's hidden states to the requests that pool them. Returns the sequences that
        end with them."""
        if results.chunk_sums is not None:
            for row, chunk in enumerate(plan.prefills):
                request, _ = self._owners.get(chunk.seq.seq_id, (None, None))
                if request is not None and chunk.seq.needs_all_hidden_states:
                    request.add_hidden_sum(chunk.start, results.chunk_sums[row])
        ended = []
        for row, chunk in enumerate(results.sampled):
            if chunk.seq.pooling is None or chunk.seq.seq_id not in self._owners:
                continue
            request, output = self._owners[chunk.seq.seq_id]
            request.embed(results.last_hidden[row * results.width])
            if request.embedding is None:
                error = "the model's hidden states are not finite"
                ended.append(Ended(request, output, None, error))
            else:
                ended.append(Ended(request, output, Stop("stop")))
        return ended

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
