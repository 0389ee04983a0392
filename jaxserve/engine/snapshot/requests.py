"""A request as plain data: its host state, from which another engine can resume it.

It has no device state. Tokens sampled but not yet read are left out and sampled again, with the
same result, because sampling is keyed by the request's seed and the position. Text, stop strings
held back and penalties are rebuilt from the tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.core.commands import AddRequest
from jaxserve.core.errors import RequestError, SnapshotError
from jaxserve.core.requests.outputs import FinishReason, Logprob
from jaxserve.core.sequence import Sequence, SequenceState
from jaxserve.engine.request import Request, SequenceOutput
from jaxserve.kv.manager import KVManager
from jaxserve.scheduler.admission import kv_limit
from jaxserve.text import Tokenizer

SavedLogprobs = list[tuple[int, float, int | None]]
"""Token id, logprob and rank of the tokens listed for one position."""


@dataclasses.dataclass(frozen=True)
class SequenceSnapshot:
    """One sequence of a request. `kv_limit` as in Sequence, or 0 for that of the resuming engine,
    if it is as large as the one before; `admitted`: it has run before."""

    token_ids: list[int]
    logprobs: list[SavedLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    kv_limit: int
    admitted: bool


@dataclasses.dataclass(frozen=True)
class RequestSnapshot:
    """A request as added, and its progress since.

    `waited_us`: time since arrival. `prefix`: the shared prefix of its prompt, as its number and
    length in tokens. `adapter_digest`: of the contents of its LoRA adapter, None if that is unknown
    or there is none.
    """

    added: AddRequest
    prefix: tuple[int, int] | None
    waited_us: int
    sequence_outputs: list[SequenceSnapshot]
    prompt_logprobs: list[SavedLogprobs | None] | None
    error: str | None
    embedding: list[float] | None = None
    adapter_digest: str | None = None

    @classmethod
    def of(cls, request: Request, prefix: tuple[int, int] | None, now_us: int) -> RequestSnapshot:
        """A request's snapshot."""
        sequences = [sequence_output.seq for sequence_output in request.sequence_outputs]
        first = sequences[0]
        live = next((seq for seq in sequences if not seq.finished), first)
        added = AddRequest(
            request_id=request.request_id,
            prompt=request.prompt,
            token_ids=request.prompt_token_ids,
            params=request.params,
            priority=live.priority,
            tenant=first.tenant,
            cache_salt=first.cache_salt,
            seed=request.seed,
            first_seq_id=first.seq_id,
            pooling=request.pooling,
            lora_request=request.lora_request,
        )
        scores = request.prompt_logprobs
        return cls(
            added,
            prefix,
            now_us - first.arrival_us,
            [_sequence_snapshot(sequence_output) for sequence_output in request.sequence_outputs],
            None if scores is None else [entry and scored_entry(entry) for entry in scores],
            request.error,
            request.embedding,
            None if first.adapter is None else first.adapter.digest,
        )

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        added = self.added.to_json(self.prefix)
        sequence_outputs = [dataclasses.asdict(output) for output in self.sequence_outputs]
        return fields | {"added": added, "sequence_outputs": sequence_outputs}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RequestSnapshot:
        added = AddRequest.from_json(fields["added"], None)
        sequence_outputs = [SequenceSnapshot(**output) for output in fields["sequence_outputs"]]
        return cls(**fields | {"added": added, "sequence_outputs": sequence_outputs})

    def apply(
        self,
        request: Request,
        tokenizer: Tokenizer,
        now_us: int,
        max_model_len: int,
        kv: KVManager,
    ) -> None:
        """Restores progress to a request built from `added`.

        Raises SnapshotError when the request has outgrown this engine's limits.
        """
        states = zip(request.sequence_outputs, self.sequence_outputs, strict=True)
        for sequence_output, state in states:
            seq = sequence_output.seq
            seq.arrival_us = now_us - self.waited_us
            seq.set_priority(seq.priority)
            seq.kv_limit = state.kv_limit
            if state.finish_reason is None or not seq.kv_limit:
                limit = self._limit(seq, max_model_len, kv)
                if state.finish_reason is None:
                    self._check_room(seq, len(state.token_ids), limit)
                seq.kv_limit = seq.kv_limit or limit
            logprobs = state.logprobs and [_logprobs(tokenizer, entry) for entry in state.logprobs]
            sequence_output.replay(state.token_ids, logprobs)
            seq.started = state.admitted
            if state.finish_reason is not None:
                if state.finish_reason in ("abort", "error"):
                    sequence_output.end(state.finish_reason)
                seq.transition(SequenceState.FINISHED)
                seq.finish_reason, seq.stop_reason = state.finish_reason, state.stop_reason
        request.error = self.error
        request.embedding = self.embedding
        if self.prompt_logprobs is not None:
            scores = [entry and _logprobs(tokenizer, entry) for entry in self.prompt_logprobs]
            request.prompt_logprobs[:] = scores
            # A token's hidden state scores the next one: prefill from the token before the first
            # missing score.
            seq = request.sequence_outputs[0].seq
            missing = next((i for i, entry in enumerate(scores) if i and entry is None), None)
            seq.num_prefilled = seq.num_tokens if missing is None else missing - 1

    def _limit(self, seq: Sequence, max_model_len: int, kv: KVManager) -> int:
        """Its `kv_limit` in this engine. Raises SnapshotError when its prompt does not fit."""
        try:
            return kv_limit(seq, max_model_len, kv.pool.capacity, kv.layout, kv.host_limits)
        except RequestError as error:
            raise SnapshotError(
                f"request {seq.request_id!r} of the snapshot does not fit this engine: {error}."
            ) from error

    def _check_room(self, seq: Sequence, num_output: int, limit: int) -> None:
        if seq.num_prompt + num_output > limit:
            raise SnapshotError(
                f"request {seq.request_id!r} of the snapshot is unfinished with "
                f"{seq.num_prompt + num_output} tokens, but this engine has room for {limit}; "
                "raise max_model_len, or the KV pool."
            )


def _sequence_snapshot(sequence_output: SequenceOutput) -> SequenceSnapshot:
    seq, output = sequence_output.seq, sequence_output.output()
    scores = output.logprobs
    return SequenceSnapshot(
        token_ids=list(output.token_ids),
        logprobs=None if scores is None else [scored_entry(entry) for entry in scores],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        kv_limit=seq.kv_limit,
        admitted=seq.started or seq.active,
    )


def scored_entry(entry: dict[int, Logprob]) -> SavedLogprobs:
    """The tokens listed for one position, as plain data."""
    return [(token, scored.logprob, scored.rank) for token, scored in entry.items()]


def _logprobs(tokenizer: Tokenizer, entry: SavedLogprobs) -> dict[int, Logprob]:
    return {
        token: Logprob(logprob, rank, tokenizer.token_text(token)) for token, logprob, rank in entry
    }
