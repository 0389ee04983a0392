"""Grammar state of a sequence, and the mask of tokens allowed next."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Protocol

import llguidance
import llguidance.numpy
import numpy as np

from jaxserve.structured.vocabulary import Vocabulary


class TokenMatcher(Protocol):
    """What an engine asks of the state of one sequence whose tokens are constrained.

    The masks of a step and the output of a request follow the same matcher, and each gives it the
    tokens that it sees: whichever comes first has a token consumed, which happens once for a
    position.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens consumed so far."""
        ...

    @property
    def mask(self) -> np.ndarray:
        """int32 [words] with a bit set for each token allowed next."""
        ...

    def waits_for(self, position: int) -> bool:
        """Whether the mask at a position of the output depends on tokens not yet consumed."""
        ...

    def complete(self, num_tokens: int) -> bool:
        """Whether only an end-of-text token may follow the first `num_tokens`, all consumed."""
        ...

    def error(self, num_tokens: int) -> str | None:
        """The error that prevents a mask after the first `num_tokens`, all consumed."""
        ...

    def take(self, position: int, token_id: int) -> Matcher | None:
        """Consumes a token, unless that is done or the text has ended. Returns the grammar's
        matcher that is still to consume it, which `advance` does."""
        ...

    def forced(self, most: int) -> tuple[int, ...]:
        """The tokens that must come next, `most` at most; none where there is a choice."""
        ...

    def copy(self) -> TokenMatcher:
        """A matcher in the same state, independent of this one."""
        ...


class Matcher:
    """The state of one sequence in a grammar, determined by the `num_tokens` tokens consumed so
    far. `mask` int32 [words] has a bit set for each token allowed next.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: llguidance.LLMatcher,
        mask: np.ndarray,
        *,
        ignore_eos: bool,
    ) -> None:
        """`matcher` is not shared and in its initial state; `mask` is what that state allows."""
        self.num_tokens = 0
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._ignore_eos = ignore_eos
        self._ended = self._complete = False
        self._error: str | None = None
        text_mask = mask & vocabulary.text_mask
        self._allow(mask, text_mask, bool(text_mask.any()))

    def complete(self, num_tokens: int) -> bool:
        """Whether only an end-of-text token may follow the first `num_tokens`, all consumed."""
        return self._complete and num_tokens == self.num_tokens

    def error(self, num_tokens: int) -> str | None:
        """The error that prevents a mask after the first `num_tokens`, all consumed: the grammar
        has exceeded its limits."""
        return self._error if num_tokens == self.num_tokens else None

    @property
    def text_mask(self) -> np.ndarray:
        """The mask of all tokens except those that end the text."""
        return self._vocabulary.text_mask

    def waits_for(self, position: int) -> bool:
        """Whether the mask at a position of the output depends on tokens not yet consumed."""
        return self.num_tokens < position

    def take(self, position: int, token_id: int) -> Matcher | None:
        """This matcher, if the token at this position is new and does not end the text: then
        `advance` consumes it."""
        if position != self.num_tokens or self._ended:
            return None
        self._ended = token_id in self._vocabulary.eos_token_ids
        return None if self._ended else self

    def forced(self, most: int) -> tuple[int, ...]:
        """The tokens that must come next, `most` at most; none where there is a choice."""
        return () if self._ended else tuple(self._matcher.compute_ff_tokens()[:most])

    def copy(self) -> Matcher:
        """A matcher in the same state, independent of this one."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def _consumed(self, mask: np.ndarray, text_mask: np.ndarray, goes_on: bool) -> None:
        self.num_tokens += 1
        self._allow(mask, text_mask, goes_on)

    def _allow(self, mask: np.ndarray, text_mask: np.ndarray, goes_on: bool) -> None:
        """Sets the mask. `text_mask` is the mask without end-of-text tokens, and `goes_on` is
        whether it has any token."""
        self.mask = text_mask if self._ignore_eos else mask
        if self._matcher.is_error():
            self._error = error_of(self._matcher)
        self._complete = self._error is None and not goes_on
        self._ended = self._error is not None or self._complete


def advance(taken: Iterable[tuple[TokenMatcher, int, int]]) -> None:
    """Advances matchers of one vocabulary by tokens: each a matcher, the token's position in the
    output, and its id. Matchers that have consumed it already, or have ended, are not changed.

    Masks are computed on several threads without the GIL.
    """
    takers = ((matcher.take(position, token), token) for matcher, position, token in taken)
    news = [(matcher, token) for matcher, token in takers if matcher is not None]
    if not news:
        return
    executor, vocabulary = _executor(), news[0][0]._vocabulary
    executor.consume_token_par([(matcher._matcher, token) for matcher, token in news])
    masks = np.zeros((len(news), vocabulary.words), np.int32)
    llguidance.numpy.fill_next_token_bitmask_par(
        executor, [(matcher._matcher, row) for row, (matcher, _) in enumerate(news)], masks
    )
    text_masks = masks & vocabulary.text_mask
    goes_on = text_masks.any(axis=1).tolist()
    for (matcher, _), *allowed in zip(news, masks, text_masks, goes_on):
        matcher._consumed(*allowed)


def error_of(matcher: llguidance.LLMatcher) -> str:
    """llguidance's error message, without its source excerpts."""
    first, *others = matcher.get_error().splitlines()
    if first.startswith("NoExtension"):
        return "no text fits it"
    return " ".join([first, *(line for line in others if line.startswith("error: "))]).rstrip(".")


@functools.cache
def _executor() -> llguidance.LLExecutor:
    """The process-wide thread pool for masks."""
    return llguidance.LLExecutor()
