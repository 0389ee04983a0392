"""Beam search: the most likely continuations as whole sequences, not token by token.

Each step of a beam is a request for one token that reports the most likely next ones. Beams of one
prompt share their common prefix through the prefix cache, so such a request computes little more
than one token; without the cache, the whole beam. Selection, scoring and termination are as in
vLLM, except that an ignored end-of-sequence token counts towards the length like any other token.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Literal

from jaxserve.core.errors import RequestError
from jaxserve.core.outputs import Logprob
from jaxserve.core.sampling_params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.prompts import Prompt
    from jaxserve.engine.request import Request

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0


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
                f"every beam is continued by the 2 * beam_width likeliest tokens, and a step "
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


def search(
    engine: Engine,
    prompts: SequenceOf[Prompt],
    params: BeamSearchParams,
    request_ids: Iterator[str],
    on_end: Callable[[int], None],
    alone: bool,
    tenant: str | None = None,
) -> list[BeamSearchOutput]:
    """Search for each prompt; outputs are in the order of the prompts. Steps the engine until all
    searches end.

    No search waits for another one's tokens. `on_end` is called when one ends, with the number that
    have ended. A rejected prompt has an output with an `error`, or raises RequestError if `alone`.
    An interrupt aborts all requests.
    """
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params is {params!r:.80}; it must be a BeamSearchParams.")
    searches = [_Search(engine, prompt, params, tenant) for prompt in prompts]
    waiting = collections.deque(searches)
    # Enough to fill the running step and the one planned meanwhile. More would only alternate, and
    # evict each other's pages from the prefix cache.
    most_open = max(1, 2 * engine.plan.config.max_num_seqs // params.beam_width)
    num_open = 0
    asked: dict[str, _Search] = {}
    try:
        while waiting or num_open:
            ready = [waiting.popleft() for _ in range(min(most_open - num_open, len(waiting)))]
            num_open += len(ready)
            for each in ready or _answered(engine, asked):
                each.go_on(request_ids, asked, alone)
                if each.done:
                    num_open -= 1
                    on_end(len(searches) - len(waiting) - num_open)
    except BaseException:
        for request_id in asked:
            engine.abort(request_id)
        raise
    return [each.output() for each in searches]


def _answered(engine: Engine, asked: dict[str, _Search]) -> list[_Search]:
    """Run one engine step; returns the searches that now have all requested tokens."""
    touched = [request.request_id for request in engine.step()]
    owners = [asked.pop(request_id) for request_id in touched if request_id in asked]
    return [owner for owner in dict.fromkeys(owners) if owner.answered]


class _Search:
    """The search of one prompt: live beams, best first, and finished sequences."""

    def __init__(
        self, engine: Engine, prompt: Prompt, params: BeamSearchParams, tenant: str | None
    ) -> None:
        self.done = False
        self._tenant = tenant
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._ends: frozenset[int] = frozenset()
        if not params.ignore_eos:
            self._ends = engine.eos_token_ids
        self._live: list[BeamSearchSequence] = []
        self._ended: list[BeamSearchSequence] = []
        self._requests: list[Request] = []
        self._steps = 0
        self._error: str | None = None

    @property
    def answered(self) -> bool:
        """Whether the next tokens of every live beam have arrived."""
        return all(request.finished for request in self._requests)

    def go_on(self, request_ids: Iterator[str], asked: dict[str, _Search], alone: bool) -> None:
        """Extend the beams by the tokens that have arrived, then request the next ones.

        New requests are added to `asked`. Raises RequestError if the engine rejects one and
        `alone` is set.
        """
        if self._requests:
            self._grow()
        if not self.done:
            self._ask(request_ids, asked, alone)

    def output(self) -> BeamSearchOutput:
        """The best of all sequences, whether they ended or reached the limit."""
        if self._error is not None:
            return BeamSearchOutput([], self._error)
        best = sorted(self._ended + self._live, key=attrgetter("score"), reverse=True)
        return BeamSearchOutput(
            [
                dataclasses.replace(sequence, text=self._text(sequence))
                for sequence in best[: self._params.beam_width]
            ]
        )

    def _ask(self, request_ids: Iterator[str], asked: dict[str, _Search], alone: bool) -> None:
        """Add one request per live beam, best first. The prompt itself is the first beam."""
        step_params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=2 * self._params.beam_width, detokenize=False
        )
        self._requests = []
        try:
            for prompt in [beam.tokens for beam in self._live] or [self._prompt]:
                request_id = next(request_ids)
                asked[request_id] = self  # First, so that an interrupt aborts it.
                request = self._engine.add(request_id, prompt, step_params, tenant=self._tenant)
                self._requests.append(request)
        except RequestError as error:
            if alone:
                raise
            for request in self._requests:
                self._engine.abort(request.request_id)
            self._fail(str(error))

    def _grow(self) -> None:
        """Select the best candidates of all beams as live beams, and collect those that end."""
        if not self._live:
            prompt = self._requests[0].prompt_token_ids
            self._live = [BeamSearchSequence(tokens=tuple(prompt), logprobs=[])]
        candidates = []
        for beam, request in zip(self._live, self._requests):
            (delta,) = request.take_deltas()
            if delta.logprobs is None:
                self._fail(request.error or "the search was aborted")
                return
            (entry,) = delta.logprobs
            for token_id, scored in entry.items():
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
        context = self._engine.plan.config.max_model_len
        self.done = (
            not self._live
            or self._steps == self._params.max_tokens
            or len(self._live[0].tokens) == context
        )

    def _fail(self, error: str) -> None:
        self._error = error
        self.done = True

    def _text(self, sequence: BeamSearchSequence) -> str:
        ended = sequence.finish_reason == "stop"
        return self._engine.tokenizer.decode(sequence.tokens[:-1] if ended else sequence.tokens)
