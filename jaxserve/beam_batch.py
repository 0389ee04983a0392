"""Beam search of a batch of prompts in an engine that the caller steps."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.engine.beam_search import (
    ABORTED,
    BeamSearch,
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
)
from jaxserve.engine.engine import Engine
from jaxserve.engine.prompts import Prompt
from jaxserve.engine.request import Request


def search(
    engine: Engine,
    prompts: SequenceOf[Prompt],
    params: BeamSearchParams,
    request_ids: Iterator[str],
    on_end: Callable[[int], None],
    alone: bool,
    tenant: str | None = None,
    lora_request: LoRARequest | None = None,
) -> list[BeamSearchOutput]:
    """Search for each prompt; outputs are in the order of the prompts. Steps the engine until all
    searches end.

    No search waits for another one's tokens. `on_end` is called when one ends, with the number that
    have ended. A rejected prompt has an output with an `error`, or raises RequestError if `alone`.
    An interrupt aborts all requests.
    """
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params is {params!r:.80}; it must be a BeamSearchParams.")
    searches = [_PromptSearch(engine, prompt, params, tenant, lora_request) for prompt in prompts]
    waiting = collections.deque(searches)
    # Enough to fill the running step and the one planned meanwhile. More would only alternate, and
    # evict each other's pages from the prefix cache.
    most_open = max(1, 2 * engine.plan.config.max_num_seqs // params.beam_width)
    num_open = 0
    asked: dict[str, _PromptSearch] = {}
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


def _answered(engine: Engine, asked: dict[str, _PromptSearch]) -> list[_PromptSearch]:
    """Run one engine step; returns the searches that now have all requested tokens."""
    touched = [request.request_id for request in engine.step()]
    owners = [asked.pop(request_id) for request_id in touched if request_id in asked]
    return [owner for owner in dict.fromkeys(owners) if owner.answered]


class _PromptSearch:
    """The search of one prompt in an engine that the caller steps."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        params: BeamSearchParams,
        tenant: str | None,
        lora_request: LoRARequest | None,
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._tenant = tenant
        self._lora_request = lora_request
        self._search = BeamSearch(params, engine.eos_token_ids, engine.plan.config.max_model_len)
        self._requests: list[Request] = []
        self._error: str | None = None

    @property
    def done(self) -> bool:
        return self._search.done or self._error is not None

    @property
    def answered(self) -> bool:
        """Whether the next tokens of every live beam have arrived."""
        return all(request.finished for request in self._requests)

    def go_on(
        self, request_ids: Iterator[str], asked: dict[str, _PromptSearch], alone: bool
    ) -> None:
        """Extend the beams by the tokens that have arrived, then request the next ones.

        New requests are added to `asked`. Raises RequestError if the engine rejects one and
        `alone` is set.
        """
        if self._requests:
            self._grow()
        if not self.done:
            self._ask(request_ids, asked, alone)

    def output(self) -> BeamSearchOutput:
        if self._error is not None:
            return BeamSearchOutput([], self._error)
        found = self._search.best()
        return BeamSearchOutput(
            [dataclasses.replace(sequence, text=self._text(sequence)) for sequence in found]
        )

    def _ask(
        self, request_ids: Iterator[str], asked: dict[str, _PromptSearch], alone: bool
    ) -> None:
        self._requests = []
        try:
            for prompt in self._search.prompts(self._prompt):
                request_id = next(request_ids)
                asked[request_id] = self  # First, so that an interrupt aborts it.
                request = self._engine.add(
                    request_id,
                    prompt,
                    self._search.step_params,
                    tenant=self._tenant,
                    lora_request=self._lora_request,
                )
                self._requests.append(request)
        except RequestError as error:
            if alone:
                raise
            for request in self._requests:
                self._engine.abort(request.request_id)
            self._error = str(error)

    def _grow(self) -> None:
        entries = []
        for request in self._requests:
            (delta,) = request.take_deltas()
            if delta.logprobs is None:
                self._error = request.error or ABORTED
                return
            entries += delta.logprobs
        self._search.grow(self._requests[0].prompt_token_ids, entries)

    def _text(self, sequence: BeamSearchSequence) -> str:
        ended = sequence.finish_reason == "stop"
        return self._engine.tokenizer.decode(sequence.tokens[:-1] if ended else sequence.tokens)
