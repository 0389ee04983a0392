"""One request of a router: what its client has received, and how another replica resumes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxserve.cluster.policies.dispatch import Demand
from jaxserve.core.commands import AddRequest
from jaxserve.core.requests.outputs import Delta, FinishReason
from jaxserve.engine.snapshot.requests import (
    RequestSnapshot,
    SavedLogprobs,
    SequenceSnapshot,
    scored_entry,
)


class ReceivedSequence:
    """What has been received of one sequence, from however many replicas."""

    def __init__(self, scored: bool) -> None:
        """`scored`: whether its tokens have logprobs."""
        self._token_ids: list[int] = []
        self._logprobs: list[SavedLogprobs] | None = [] if scored else None
        self._num_chars = 0
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._tokens_to_skip = 0
        self._chars_to_skip = 0

    @property
    def token_ids(self) -> list[int]:
        return self._token_ids

    @property
    def finished(self) -> bool:
        return self._finish_reason is not None

    def rewind(self) -> None:
        """The next replica streams the sequence from its first token again."""
        self._tokens_to_skip, self._chars_to_skip = len(self._token_ids), self._num_chars

    def receive(self, delta: Delta) -> Delta | None:
        """What of a delta is new. A sequence's text is a function of its tokens, so that what was
        received before is as long in text as in tokens."""
        if self.finished:
            return None
        num_tokens = min(self._tokens_to_skip, len(delta.token_ids))
        num_chars = min(self._chars_to_skip, len(delta.text))
        new = delta
        if num_tokens or num_chars:
            self._tokens_to_skip -= num_tokens
            self._chars_to_skip -= num_chars
            logprobs = delta.logprobs and delta.logprobs[num_tokens:]
            new = delta._replace(
                text=delta.text[num_chars:],
                token_ids=delta.token_ids[num_tokens:],
                logprobs=logprobs or None,
            )
        if not new.token_ids and not new.text and new.finish_reason is None:
            return None
        self._token_ids += new.token_ids
        self._num_chars += len(new.text)
        if self._logprobs is not None:
            self._logprobs += [scored_entry(entry) for entry in new.logprobs or ()]
        self._finish_reason, self._stop_reason = new.finish_reason, new.stop_reason
        return new

    def snapshot(self) -> SequenceSnapshot:
        return SequenceSnapshot(
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            kv_limit=0,
            admitted=bool(self._token_ids),
        )


class RoutedRequest:
    """A request of a router, with the tokens that its client has received.

    Attributes:
        num_losses: replicas that were lost with it, since it has had a new token.
        aborted: its client wants no more of it.
    """

    def __init__(self, added: AddRequest, demand: Demand) -> None:
        """`added.seed` is the seed of its sampling, with which any replica draws the same.
        `demand`: what its prompt takes of a replica."""
        self.added = added
        self._prompt_demand = demand
        self.num_losses = 0
        self.aborted = False
        scored = added.params.logprobs is not None
        self.sequences = [ReceivedSequence(scored) for _ in range(added.params.n)]

    @property
    def begun(self) -> bool:
        """Whether any token has been received."""
        return any(sequence.token_ids for sequence in self.sequences)

    @property
    def num_unfinished(self) -> int:
        """Sequences that are not known to have ended."""
        return sum(not sequence.finished for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt and of its longest sequence."""
        longest = max(len(sequence.token_ids) for sequence in self.sequences)
        return len(self.added.token_ids) + longest

    @property
    def demand(self) -> Demand:
        """What it takes of a replica now."""
        return self._prompt_demand.grown(sum(len(each.token_ids) for each in self.sequences))

    def receive(self, deltas: Iterable[Delta]) -> list[Delta]:
        """What of these deltas is new."""
        received = (self.sequences[delta.index].receive(delta) for delta in deltas)
        new = [delta for delta in received if delta is not None]
        if new:
            self.num_losses = 0
        return new

    def lose(self) -> None:
        """Its replica is lost."""
        self.num_losses += 1
        self.rewind()

    def rewind(self) -> None:
        """The next replica streams it from the first token again."""
        for sequence in self.sequences:
            sequence.rewind()

    def to_send(self, request_id: str) -> AddRequest | RequestSnapshot:
        """The request under another id: as it came, or with the tokens that it has."""
        return self.to_resume(request_id) if self.begun else self._named(request_id)

    def to_resume(self, request_id: str) -> RequestSnapshot:
        """The request under another id, with the tokens that it has."""
        added = self._named(request_id)
        scores = added.params.prompt_logprobs
        return RequestSnapshot(
            added,
            prefix=None,
            waited_us=0,
            sequence_outputs=[sequence.snapshot() for sequence in self.sequences],
            prompt_logprobs=None if scores is None else [None] * len(added.token_ids),
            error=None,
        )

    def _named(self, request_id: str) -> AddRequest:
        return dataclasses.replace(self.added, request_id=request_id)
