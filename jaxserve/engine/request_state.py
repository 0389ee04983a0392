"""A request as plain data: what the host knows of it, from which another engine can go on.

Nothing of the device is in it. Tokens that were sampled and not yet read are left out and sampled
again, the same ones, for sampling is keyed by a request's seed and the position. Text, stop strings
held back and penalties are made again from the tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.engine.agreed_log import Addition
from jaxserve.engine.kv_limit import kv_limit
from jaxserve.engine.request import Generation, Request
from jaxserve.engine.sequence import Sequence, Status
from jaxserve.errors import CheckpointError, RequestError
from jaxserve.kv.pages import PagePool
from jaxserve.outputs import FinishReason, Logprob
from jaxserve.text import Tokenizer

Entry = list[tuple[int, float, int]]
"""Token id, logprob and rank of the tokens listed for one position."""


@dataclasses.dataclass(frozen=True)
class GenerationState:
    """One sequence of a request. `kv_limit` as in Sequence; `admitted`: it has run before."""

    token_ids: list[int]
    logprobs: list[Entry] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    kv_limit: int
    admitted: bool


@dataclasses.dataclass(frozen=True)
class RequestState:
    """A request, as it was accepted (`added`) and what has come of it since.

    `waited_us`: how long ago it arrived.
    """

    added: Addition
    waited_us: int
    generations: list[GenerationState]
    prompt_logprobs: list[Entry | None] | None
    error: str | None

    @classmethod
    def of(cls, request: Request, prefix: tuple[int, int] | None, now_us: int) -> RequestState:
        """The state of a request that was accepted; `prefix` is as in Addition."""
        sequences = [generation.seq for generation in request.generations]
        first = sequences[0]
        live = next((seq for seq in sequences if not seq.finished), first)
        added = Addition(
            request_id=request.request_id,
            prompt=request.prompt,
            token_ids=request.prompt_token_ids,
            params=request.params,
            priority=live.priority,
            tenant=first.tenant,
            seed=request.seed,
            first_seq_id=first.seq_id,
            prefix=prefix,
            cache_salt=first.cache_salt,
        )
        scores = request.prompt_logprobs
        return cls(
            added,
            now_us - first.arrival_us,
            [_generation_state(generation) for generation in request.generations],
            None if scores is None else [entry and _entry(entry) for entry in scores],
            request.error,
        )

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        _, added = self.added.to_json()
        generations = [dataclasses.asdict(generation) for generation in self.generations]
        return fields | {"added": added, "generations": generations}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RequestState:
        added = Addition.from_json(fields["added"])
        generations = [GenerationState(**generation) for generation in fields["generations"]]
        return cls(**fields | {"added": added, "generations": generations})

    def apply(
        self,
        request: Request,
        tokenizer: Tokenizer,
        now_us: int,
        max_model_len: int,
        pool: PagePool,
    ) -> None:
        """Has a request that was made of `added` be where this one was.

        Raises CheckpointError when it has grown beyond what this engine has room for.
        """
        for generation, state in zip(request.generations, self.generations, strict=True):
            seq = generation.seq
            seq.arrival_us = now_us - self.waited_us
            seq.set_priority(seq.priority)
            seq.kv_limit = state.kv_limit
            if state.finish_reason is None:
                self._check_room(seq, len(state.token_ids), max_model_len, pool)
            logprobs = state.logprobs and [_logprobs(tokenizer, entry) for entry in state.logprobs]
            generation.replay(state.token_ids, logprobs)
            seq.num_preemptions = int(state.admitted)
            if state.finish_reason is not None:
                if state.finish_reason in ("abort", "error"):
                    generation.end(state.finish_reason)
                seq.status = Status.FINISHED
                seq.finish_reason, seq.stop_reason = state.finish_reason, state.stop_reason
        request.error = self.error
        if self.prompt_logprobs is not None:
            scores = [entry and _logprobs(tokenizer, entry) for entry in self.prompt_logprobs]
            request.prompt_logprobs[:] = scores
            # A token's hidden state scores the next one: only from the last that did need others
            # be computed.
            seq = request.generations[0].seq
            missing = next((i for i, entry in enumerate(scores) if i and entry is None), None)
            seq.num_prefilled = seq.num_tokens if missing is None else missing - 1

    def _check_room(
        self, seq: Sequence, num_output: int, max_model_len: int, pool: PagePool
    ) -> None:
        what = f"request {seq.request_id!r} of the checkpoint"
        try:
            limit = kv_limit(seq, max_model_len, pool)
        except RequestError as error:
            raise CheckpointError(f"{what} does not fit this engine: {error}.") from error
        if seq.num_prompt + num_output > limit:
            raise CheckpointError(
                f"{what} has {seq.num_prompt + num_output} tokens and goes on, and this engine has "
                f"room for {limit}; raise max_model_len, or the KV pool."
            )


def _generation_state(generation: Generation) -> GenerationState:
    seq, output = generation.seq, generation.output()
    scores = output.logprobs
    return GenerationState(
        token_ids=list(output.token_ids),
        logprobs=None if scores is None else [_entry(entry) for entry in scores],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        kv_limit=seq.kv_limit,
        admitted=seq.num_preemptions > 0 or seq.status is Status.RUNNING,
    )


def _entry(entry: dict[int, Logprob]) -> Entry:
    return [(token, scored.logprob, scored.rank) for token, scored in entry.items()]


def _logprobs(tokenizer: Tokenizer, entry: Entry) -> dict[int, Logprob]:
    return {
        token: Logprob(logprob, rank, tokenizer.token_text(token)) for token, logprob, rank in entry
    }
