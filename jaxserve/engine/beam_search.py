"""Beam search: the most likely continuations as whole sequences, not token by token.

Each step of a beam is a request for one token that reports the most likely next ones. Beams of one
prompt share their common prefix through the prefix cache, so such a request computes little more
than one token; without the cache, the whole beam. Selection, scoring and termination are as in
vLLM, except that an ignored end-of-sequence token counts towards the length like any other token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Literal

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxserve.core.requests.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.engine.prompts import Prompt, TokenizedPrompt
from jaxserve.text import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from jaxserve.engine.output_queue import OutputStream

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0

ABORTED = "the search was aborted"


@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """Settings of a beam search; any field out of range raises RequestError.

    A search returns the best `beam_width` sequences of up to `max_tokens` new tokens, within the
    context limit. A larger `length_penalty` favours longer sequences; 0 ranks by probability alone
    (see BeamSearchSequence.score). With `ignore_eos` no token ends a sequence.
    """

    beam_width: int
    max_tokens: int
    _: dataclasses.KW_ONLY
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if type(self.beam_width) is not int or not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise RequestError(
                f"beam_width must be an integer in 1..{MAX_BEAM_WIDTH}, got {self.beam_width!r}: "
                f"every beam is continued by the 2 * beam_width most likely tokens, and a step "
                f"reports at most {MAX_LOGPROBS}."
            )
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise RequestError(
                f"max_tokens must be an integer of 1 or more, got {self.max_tokens!r}."
            )
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, got {self.ignore_eos!r}.")
        penalty, most = self.length_penalty, MAX_LENGTH_PENALTY
        number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not number or not -most <= penalty <= most:
            raise RequestError(
                f"length_penalty must be a number in [{-most:g}, {most:g}], got {penalty!r}."
            )


@dataclasses.dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence that a search found.

    Attributes:
        tokens: prompt and generated tokens, including a final end-of-sequence token.
        logprobs: for each generated token the candidates at its position, by token id.
        cum_logprob: natural log probability of all generated tokens.
        score: `cum_logprob / length ** length_penalty`, where `length` counts the prompt and the
            generated tokens but not a final end-of-sequence token.
        finish_reason: "stop" after an end-of-sequence token, else "length".
        text: text of `tokens`, without special tokens and the final end-of-sequence token.
            Empty in the outputs of `BeamSearch`.
    """

    tokens: tuple[int, ...]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    score: float = 0.0
    finish_reason: Literal["stop", "length"] = "length"
    text: str = ""


@dataclasses.dataclass(frozen=True)
class BeamSearchOutput:
    """The best sequences of one prompt, at most `beam_width` of them, best first.

    If there are none, `error` is the reason.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None


class BeamSearch:
    """The search of one prompt: live beams, best first, and finished sequences.

    A step requests one token after each of `prompts`, with `step_params`; `grow` takes the log
    probabilities that were returned.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        num_logprobs: int = 0,
    ) -> None:
        """`num_logprobs`: candidates to report at each position, if those that continue a beam are
        fewer."""
        self.done = False
        self._num_candidates = 2 * params.beam_width
        self.step_params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=max(self._num_candidates, num_logprobs),
            detokenize=False,
        )
        self._params = params
        self._ends = frozenset() if params.ignore_eos else eos_token_ids
        self._max_model_len = max_model_len
        self._live: list[BeamSearchSequence] = []
        self._ended: list[BeamSearchSequence] = []
        self._steps = 0

    def prompts(self, prompt: Prompt | TokenizedPrompt) -> list[Prompt | TokenizedPrompt]:
        """What the next step continues: the tokens of each live beam, at first `prompt` itself."""
        return [beam.tokens for beam in self._live] or [prompt]

    def grow(
        self, prompt_token_ids: SequenceOf[int], entries: SequenceOf[dict[int, Logprob]]
    ) -> None:
        """Select the best candidates of all beams as live beams, and collect those that end.

        `entries` has the most likely next tokens of each of `prompts`.
        """
        if not self._live:
            self._live = [BeamSearchSequence(tokens=tuple(prompt_token_ids), logprobs=[])]
        candidates = []
        for beam, entry in zip(self._live, entries, strict=True):
            for token_id, scored in entry.items():
                if scored.rank > self._num_candidates:
                    continue
                cum_logprob = beam.cum_logprob + scored.logprob
                length = len(beam.tokens) + (token_id not in self._ends)
                score = cum_logprob / length**self._params.length_penalty
                candidates.append((score, cum_logprob, token_id, entry, beam))
        candidates.sort(key=itemgetter(0), reverse=True)
        self._live = []
        for score, cum_logprob, token_id, entry, beam in candidates:
            ends = token_id in self._ends
            if not ends and len(self._live) == self._params.beam_width:
                continue
            (self._ended if ends else self._live).append(
                BeamSearchSequence(
                    tokens=(*beam.tokens, token_id),
                    logprobs=[*beam.logprobs, entry],
                    cum_logprob=cum_logprob,
                    score=score,
                    finish_reason="stop" if ends else "length",
                )
            )
        self._steps += 1
        self.done = (
            not self._live
            or self._steps == self._params.max_tokens
            or len(self._live[0].tokens) == self._max_model_len
        )

    def best(self) -> list[BeamSearchSequence]:
        """The best of all sequences, whether they ended or reached the limit."""
        found = sorted(self._ended + self._live, key=attrgetter("score"), reverse=True)
        return found[: self._params.beam_width]


async def search_async(
    submit: Callable[
        [SequenceOf[Prompt | TokenizedPrompt], SamplingParams, SequenceOf[str]],
        Awaitable[OutputStream],
    ],
    search: BeamSearch,
    prompt: TokenizedPrompt,
    request_id: str,
) -> tuple[list[BeamSearchSequence], RequestMetrics]:
    """The best sequences of one prompt, and the times of the whole search. `submit` is given the
    prompts, parameters and ids of each step's requests. Cancelling the task aborts them.

    Raises RequestError when the prompt is rejected or a step is aborted or fails.
    """
    metrics: RequestMetrics | None = None
    step = 0
    while not search.done:
        prompts = search.prompts(prompt)
        ids = [f"{request_id}-{step}-{place}" for place in range(len(prompts))]
        outputs: dict[int, RequestOutput] = {}
        async with await submit(prompts, search.step_params, ids) as updates:
            async for place, update in updates:
                if isinstance(update, RequestOutput):
                    outputs[place] = update
        answered = [outputs[place] for place in range(len(prompts))]
        for output in answered:
            if not output.outputs[0].logprobs:
                raise RequestError(output.error or ABORTED)
        search.grow(prompt.token_ids, [output.outputs[0].logprobs[0] for output in answered])
        finish_us = max(output.metrics.finish_us for output in answered)
        metrics = dataclasses.replace(metrics or answered[0].metrics, finish_us=finish_us)
        step += 1
    assert metrics is not None
    return search.best(), metrics


def beam_output(
    request_id: str,
    prompt: TokenizedPrompt,
    params: SamplingParams,
    found: SequenceOf[BeamSearchSequence],
    metrics: RequestMetrics,
    tokenizer: Tokenizer,
) -> RequestOutput:
    """Sequences that a search found, as the outputs of a request with `params`, best first."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=tuple(prompt.token_ids),
        outputs=[
            _completion(index, sequence, prompt.token_ids, params, tokenizer)
            for index, sequence in enumerate(found)
        ],
        finished=True,
        metrics=metrics,
    )


def _completion(
    index: int,
    sequence: BeamSearchSequence,
    prompt_token_ids: SequenceOf[int],
    params: SamplingParams,
    tokenizer: Tokenizer,
) -> CompletionOutput:
    token_ids, logprobs = sequence.tokens[len(prompt_token_ids) :], None
    detokenizer = Detokenizer(
        tokenizer,
        prompt_token_ids=prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
    )
    ended = sequence.finish_reason == "stop"
    text = detokenizer.push(token_ids[:-1] if ended else token_ids) + detokenizer.finish()
    if params.logprobs is not None:
        logprobs = [
            {
                token: scored
                for token, scored in entry.items()
                if token == token_id or scored.rank <= params.logprobs
            }
            for token_id, entry in zip(token_ids, sequence.logprobs, strict=True)
        ]
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=sequence.cum_logprob,
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
    )
