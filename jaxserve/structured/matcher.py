"""Where an output stands in its grammar, and which tokens may come next."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import llguidance
import llguidance.numpy
import numpy as np

from jaxserve.structured.vocabulary import Vocabulary


class Matcher:
    """One sequence's place in a grammar: a function of the tokens it has taken in, `num_tokens`,
    and of them alone. `mask` int32 [words] has a bit for each token that may come next.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: llguidance.LLMatcher,
        mask: np.ndarray,
        *,
        ignore_eos: bool,
    ) -> None:
        """`matcher` is nobody else's, and has taken in nothing; `mask` is what it then allows."""
        self.num_tokens = 0
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._ignore_eos = ignore_eos
        self._ended = self._complete = False
        self._error: str | None = None
        text_mask = mask & vocabulary.text_mask
        self._allow(mask, text_mask, bool(text_mask.any()))

    def complete(self, num_tokens: int) -> bool:
        """Whether nothing but the end may follow the first `num_tokens`, which it has taken in."""
        return self._complete and num_tokens == self.num_tokens

    def error(self, num_tokens: int) -> str | None:
        """Why there is no telling what may follow the first `num_tokens`, which it has taken in:
        the grammar has grown too large."""
        return self._error if num_tokens == self.num_tokens else None

    def _takes(self, place: int, token_id: int) -> bool:
        """Whether the token at a place of the output is news, and goes on with the text."""
        if place != self.num_tokens or self._ended:
            return False
        self._ended = token_id in self._vocabulary.eos_token_ids
        return not self._ended

    def _took(self, mask: np.ndarray, text_mask: np.ndarray, goes_on: bool) -> None:
        self.num_tokens += 1
        self._allow(mask, text_mask, goes_on)

    def _allow(self, mask: np.ndarray, text_mask: np.ndarray, goes_on: bool) -> None:
        """Takes over a mask. `text_mask` is the part of it that does not end the text, and
        `goes_on` says whether there is any."""
        self.mask = text_mask if self._ignore_eos else mask
        if self._matcher.is_error():
            self._error = error_of(self._matcher)
        self._complete = self._error is None and not goes_on
        self._ended = self._error is not None or self._complete


def advance(taken: Iterable[tuple[Matcher, int, int]]) -> None:
    """Have matchers of one vocabulary take in tokens: each a matcher, the token's place in the
    output, and its id. Those that have it already, or want no more, are left as they are.

    Masks are computed on several threads, none of which holds Python's lock.
    """
    news = [(matcher, token) for matcher, place, token in taken if matcher._takes(place, token)]
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
        matcher._took(*allowed)


def error_of(matcher: llguidance.LLMatcher) -> str:
    """What llguidance says is wrong, without its drawings of where."""
    first, *others = matcher.get_error().splitlines()
    if first.startswith("NoExtension"):
        return "no text fits it"
    return " ".join([first, *(line for line in others if line.startswith("error: "))]).rstrip(".")


@functools.cache
def _executor() -> llguidance.LLExecutor:
    """The threads of this process on which masks are computed."""
    return llguidance.LLExecutor()
