"""A request: its sequences, their outputs, and stop conditions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.core.requests.outputs import (
    CompletionOutput,
    Delta,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    WeightsRun,
)
from jaxserve.core.sequence import Sequence
from jaxserve.structured.matcher import TokenMatcher, advance
from jaxserve.text import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from jaxserve.core.requests.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Stop:
    """Why a sequence ends."""

    reason: FinishReason
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Log probabilities at one position: of the token itself and of the most likely ones."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@functools.lru_cache(maxsize=256)
def _stops(stop_token_ids: tuple[int, ...], eos_token_ids: frozenset[int]) -> Mapping[int, Stop]:
    """The stops by token: one mapping for all sequences with the same, since each of their tokens
    is looked up in it."""
    stops = {token_id: Stop("stop", token_id) for token_id in stop_token_ids}
    return stops | dict.fromkeys(eos_token_ids, Stop("stop"))


class SequenceOutput:
    """The output of one sequence so far: text, logprobs, and deltas not yet streamed."""

    __slots__ = (
        "_cumulative_logprob",
        "_detokenizer",
        "_logprobs",
        "_stops",
        "_tokenizer",
        "_weights",
        "delta",
        "matcher",
        "seq",
    )

    def __init__(
        self,
        seq: Sequence,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        matcher: TokenMatcher | None = None,
    ) -> None:
        """`matcher`: what constrains the output, in its initial state."""
        self.seq = seq
        self.matcher = matcher
        self.delta: list[Delta] = []
        self._tokenizer = tokenizer
        params = seq.params
        eos: frozenset[int] = frozenset() if params.ignore_eos else eos_token_ids
        self._stops = _stops(params.stop_token_ids, eos)
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_token_ids=seq.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._weights: list[tuple[int, int]] = []
        """Versions of the weights, each with the number of tokens before its first."""

    def use_weights(self, version: int) -> None:
        """Notes that this version of the weights makes the next tokens; the first one noted also
        made those of an output that another engine began."""
        begin = len(self.seq.output_token_ids) if self._weights else 0
        self._weights.append((begin, version))

    @property
    def _weights_runs(self) -> tuple[WeightsRun, ...]:
        begins = [*(begin for begin, _ in self._weights), len(self.seq.output_token_ids)]
        lengths = (stop - start for start, stop in itertools.pairwise(begins))
        runs = ((version, length) for (_, version), length in zip(self._weights, lengths))
        return tuple(WeightsRun(*run) for run in runs if run[1])

    @property
    def error(self) -> str | None:
        """Why generation failed, if it did."""
        if self.matcher is None:
            return None
        error = self.matcher.error(len(self.seq.output_token_ids))
        return error and f"structured_outputs: {error}"

    def replay(
        self, token_ids: SequenceOf[int], logprobs: SequenceOf[dict[int, Logprob]] | None
    ) -> None:
        """Append an output that another engine generated; all of it is streamed again.

        `seq.kv_limit` must be the same as in that engine.
        """
        for place, token_id in enumerate(token_ids):
            self.seq.output_token_ids.append(token_id)
            self.append(token_id, None if logprobs is None else logprobs[place])

    def append(self, token_id: int, entry: dict[int, Logprob] | None = None) -> Stop | None:
        """Process the token just added to the sequence, with its `entry` in the log probabilities;
        returns the Stop if it is the last."""
        seq, token_ids = self.seq, (token_id,)
        count = len(seq.output_token_ids)
        stop = self._stops.get(token_id)
        if stop is not None and count < seq.params.min_tokens:
            stop = None
        ends_by_token = stop is not None
        if stop is None and count >= seq.max_tokens:
            stop = Stop("length")
        if self.matcher is not None:
            advance([(self.matcher, count - 1, token_id)])
            if self.matcher.complete(count) and not ends_by_token:
                stop = Stop("stop")
        text = ""
        if self._detokenizer is not None:
            if not ends_by_token or seq.params.include_stop_str_in_output:
                text = self._detokenizer.push(token_ids)
            if self._detokenizer.stop_reason is not None:
                stop = Stop("stop", self._detokenizer.stop_reason)
            elif stop is not None:
                text += self._detokenizer.finish()
        logprobs = None
        if entry is not None:
            logprobs = [entry]
            self._logprobs.append(entry)
            self._cumulative_logprob += entry[token_id].logprob
        if stop is None:
            self.delta.append(Delta(seq.index, text, token_ids, logprobs))
        else:
            delta = Delta(seq.index, text, token_ids, logprobs, stop.reason, stop.stop_reason)
            self.delta.append(delta)
        return stop

    def end(self, reason: FinishReason) -> None:
        """Add the last delta of a sequence ended without a token; flushes the text held back."""
        text = self._detokenizer.finish() if self._detokenizer is not None else ""
        self.delta.append(Delta(self.seq.index, text, (), finish_reason=reason))

    def output(self) -> CompletionOutput:
        seq = self.seq
        return CompletionOutput(
            index=seq.index,
            text=self._detokenizer.text if self._detokenizer is not None else "",
            token_ids=tuple(seq.output_token_ids),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            weights=self._weights_runs,
        )

    def entry(self, token_id: int, scores: TokenScores) -> dict[int, Logprob]:
        """The log probabilities of a token, as many as the request asks for."""
        tokenizer = self._tokenizer if self.seq.params.detokenize else None
        params = self.seq.params
        ranked = params.logprob_token_ids is None
        return logprob_entry(tokenizer, token_id, scores, params.num_listed_logprobs, ranked)


class Request:
    """One user's request. One with `pooling` generates no tokens: its prompt is embedded."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        sequence_outputs: SequenceOf[SequenceOutput],
        tokenizer: Tokenizer | None,
        seed: int = 0,
        bad_word_ids: SequenceOf[SequenceOf[int]] = (),
    ) -> None:
        """`seed`: of sampling. `bad_word_ids`: the bad words as token ids."""
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.sequence_outputs = tuple(sequence_outputs)
        self.error: str | None = None
        self.pooling = sequence_outputs[0].seq.pooling
        adapter = sequence_outputs[0].seq.adapter
        self.lora_request = None if adapter is None else adapter.request
        self.embedding: list[float] | None = None
        self._hidden_sum: np.ndarray | None = None
        self.seed = seed
        self.bad_word_ids = bad_word_ids
        self._tokenizer = tokenizer if params.detokenize else None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else [None] * len(prompt_token_ids)
        )

    @property
    def unfinished(self) -> list[SequenceOutput]:
        return [output for output in self.sequence_outputs if not output.seq.finished]

    @property
    def finished(self) -> bool:
        return all(sequence_output.seq.finished for sequence_output in self.sequence_outputs)

    def add_prompt_scores(self, start: int, scores: SequenceOf[TokenScores]) -> None:
        """Add scores of the prompt tokens from position `start` on."""
        for position, token_scores in enumerate(scores, start):
            token_id = self.prompt_token_ids[position]
            self.prompt_logprobs[position] = logprob_entry(
                self._tokenizer, token_id, token_scores, self.params.prompt_logprobs
            )

    def add_hidden_sum(self, start: int, hidden_sum: np.ndarray) -> None:
        """Add the sum of hidden states of the prompt's tokens from `start` on. A sequence that was
        preempted begins again."""
        self._hidden_sum = hidden_sum if not start else self._hidden_sum + hidden_sum

    def embed(self, last_hidden: np.ndarray) -> None:
        """Make the embedding, once the hidden state of the last token is known, and end; it stays
        None if hidden states are not finite."""
        pooled = last_hidden.astype(np.float32)
        if self.pooling.pooling == "mean":
            pooled = self._hidden_sum / len(self.prompt_token_ids)
        self.embedding = self.pooling.embedding(pooled)
        if self.embedding is not None:
            self.sequence_outputs[0].end("stop")

    def take_deltas(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas = []
        for sequence_output in self.sequence_outputs:
            deltas += sequence_output.delta
            sequence_output.delta.clear()
        return deltas

    def output(self, metrics: RequestMetrics) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.prompt_token_ids),
            outputs=[sequence_output.output() for sequence_output in self.sequence_outputs],
            finished=self.finished,
            metrics=metrics,
            prompt_logprobs=self.prompt_logprobs,
            error=self.error,
            embedding=self.embedding,
        )


def logprob_entry(
    tokenizer: Tokenizer | None,
    token_id: int,
    scores: TokenScores,
    count: int,
    ranked: bool = True,
) -> dict[int, Logprob]:
    """The first `count` tokens of `scores.top` and the sampled one, which may be one of them. The
    most likely ones have their ranks, others, not `ranked`, have none."""

    def text(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token)

    entry = {token_id: Logprob(scores.logprob, scores.rank, text(token_id))}
    for rank, (token, logprob) in enumerate(scores.top[:count], 1):
        entry.setdefault(token, Logprob(logprob, rank if ranked else None, text(token)))
    return entry
