"""In which stages the KV of a request is copied to another replica, while it runs on.

Each stage copies the KV computed since the one before, as in the live migration of Llumnix (Sun et
al., OSDI 2024); what little is left when the request moves, its new replica computes. Where
replicas only prefill, as in DistServe (Zhong et al., OSDI 2024), the full pages of a prompt's first
chunks are copied while later chunks are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.core.arithmetic import cdiv

LAST_TOKENS = 32
"""When so few tokens were generated since the last stage of a copy, the request moves: its new
replica computes them in one step."""

KEPT_SHARE = 1 / 2
"""The share of a machine's memory, with Ray of its object store, for KV that is kept while a
process is replaced; the rest is for requests that move, and for others."""

MAX_STAGES = 3
"""A request that generates faster than its KV is copied moves after so many stages."""


@dataclasses.dataclass
class CopyCounts:
    """Tokens of all requests that were copied.

    Attributes:
        copied: whose KV was copied to another replica.
        during_prefill: of those, whose KV was copied while later ones of their prompt were
            computed.
        left: of requests that moved, those whose KV the new replica has to compute.
    """

    copied: int = 0
    during_prefill: int = 0
    left: int = 0


class Span(NamedTuple):
    """KV of tokens start .. stop - 1 of each sequence of a request, of so many pages at most."""

    start: int
    stop: int
    num_pages: int

    @classmethod
    def of(
        cls, start: int, stop: int, num_prompt: int, page_size: int, num_sequences: int = 1
    ) -> Span:
        """The pages from that of token `start` on, up to that of the last one: only full ones
        while these tokens are not all of the prompt. Sequences share the full pages of their
        prompt."""
        last = cdiv(stop, page_size) if stop >= num_prompt else stop // page_size
        first, shared = start // page_size, num_prompt // page_size
        own = max(0, last - max(first, shared))
        return cls(start, stop, max(0, min(last, shared) - first) + num_sequences * own)


def pieces(
    num_prompt: int, num_tokens: int, page_size: int, num_sequences: int, max_pages: int
) -> Iterator[Span]:
    """All KV of a request whose longest sequence has `num_tokens`, in pieces of `max_pages` at most
    where that is a page of each sequence or more."""
    size = max(1, max_pages // max(1, num_sequences)) * page_size
    for start in range(0, num_tokens, size):
        stop = min(start + size, num_tokens)
        yield Span.of(start, stop, num_prompt, page_size, num_sequences)


class CopyStages:
    """The stages of the copy of one request: which are done, and whether another follows.

    Attributes:
        during_prefill: whether its replica only prefills, and its prompt has no first token yet.
            Who copies sets it to False once it has.
        num_staged: tokens whose KV has been copied.
        wanted: during prefill, how many tokens of the prompt must have KV before the next stage;
            None when no stage follows before the first token.
    """

    def __init__(
        self, num_prompt: int, page_size: int, counts: CopyCounts, during_prefill: bool
    ) -> None:
        self.during_prefill = during_prefill
        self.num_staged = 0
        self.wanted: int | None = min(page_size, num_prompt)
        self._num_prompt = num_prompt
        self._page_size = page_size
        self._counts = counts
        self._num_stages = 0

    def next(self, stop: int, num_sequences: int = 1) -> Span:
        """A stage that brings the KV of tokens before `stop`: the last page of the stage before
        again, unless it was full."""
        return Span.of(self.num_staged, stop, self._num_prompt, self._page_size, num_sequences)

    def goes_on(self, num_left: int) -> bool:
        """Whether there is another stage before the request moves, after prefill. `num_left`: its
        tokens with KV that is not copied."""
        is_last = self.num_staged and num_left <= LAST_TOKENS
        return self._num_stages < MAX_STAGES and not is_last

    def staged(self, num_tokens: int) -> None:
        """A stage has ended; the KV of the first `num_tokens` is copied now. If these are no more
        than before, there was no room."""
        num_copied = max(0, num_tokens - self.num_staged)
        self.num_staged = num_tokens
        self._counts.copied += num_copied
        if not self.during_prefill:
            self._num_stages = self._num_stages + 1 if num_copied else MAX_STAGES
            return
        if num_tokens < self._num_prompt:
            self._counts.during_prefill += num_copied
        if self.wanted == self._num_prompt or num_tokens >= self._num_prompt:
            self.wanted = None
        else:  # Where there is no room for more, the rest comes when all of it is computed.
            wanted = num_tokens + self._page_size if num_copied else self._num_prompt
            self.wanted = min(wanted, self._num_prompt)
