"""Synthetic prompts of given lengths: random words, or random tokens.

Requests with equal block ids get equal prefixes, so that a server's prefix cache gets the same hits
as in the traced service.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxserve.loadgen.trace import TraceRequest

_REST = 1 << 30
"""Token ids from here on are of no block."""

Unit = TypeVar("Unit", str, int)

_WORDS = """
the of and to in that was his he it with is for as had you not be her on at by which have or from
this him but all she they were my are me one their so an said them we who would been will no when
there if more out up into do any your what has man could other than our some very time upon about
may its only now like little then can made should did us such great before must two these see know
over much down after first good men own never most old shall day where those came come himself way
work life without go make well through
"""
WORDS = tuple(f" {word}" for word in _WORDS.split())
"""Frequent English words, each a single token in most tokenizers."""


@dataclass(frozen=True)
class TextLength:
    """Tokens a server counts in a text of WORDS: `fixed` plus `per_word` for each word."""

    fixed: float = 0.0
    per_word: float = 1.0

    @classmethod
    def measured(cls, counts: Sequence[tuple[int, int]]) -> TextLength:
        """From (words, tokens) of two texts. One token per word if the counts are invalid."""
        (few, few_tokens), (many, many_tokens) = counts
        per_word = (many_tokens - few_tokens) / (many - few)
        return cls(few_tokens - few * per_word, per_word) if per_word > 0 else cls()

    def words(self, num_tokens: int) -> int:
        """Number of words for a text of about `num_tokens` tokens, at least one."""
        return max(1, round((num_tokens - self.fixed) / self.per_word))

    def block_words(self, block_tokens: int) -> int:
        """Number of words for a block within a text."""
        return max(1, round(block_tokens / self.per_word))


class PromptMaker(Generic[Unit]):
    """Draws prompts from `vocabulary`, words or token ids; deterministic for a seed."""

    def __init__(
        self,
        vocabulary: Sequence[Unit],
        seed: int,
        length: TextLength = TextLength(),
    ) -> None:
        self._vocabulary = vocabulary
        self._seed = seed
        self._length = length
        # Prompts that share blocks mostly arrive close together.
        self._block = functools.lru_cache(maxsize=4096)(self._draw)

    def units(self, index: int, request: TraceRequest) -> list[Unit]:
        """The words or token ids of a request's prompt; `index` identifies the request."""
        wanted = self._length.words(request.prompt_tokens)
        block_words = self._length.block_words(request.block_tokens)
        units: list[Unit] = []
        for block in request.block_ids:
            if len(units) >= wanted:
                break
            units += self._block(f"block {block}", block_words)
        units += self._draw(f"request {index}", max(0, wanted - len(units)))
        return units[:wanted]

    def _draw(self, name: str, count: int) -> list[Unit]:
        return random.Random(f"{self._seed} {name}").choices(self._vocabulary, k=count)


def plain_token_ids(index: int, request: TraceRequest) -> list[int]:
    """The prompt of a request as token ids that mean nothing, for simulations: every token of a
    block is the block's id, and the rest is like that of no other request."""
    tokens: list[int] = []
    for block in request.block_ids:
        if len(tokens) >= request.prompt_tokens:
            break
        tokens += [block] * request.block_tokens
    tokens += [_REST + index] * (request.prompt_tokens - len(tokens))
    return tokens[: request.prompt_tokens]


def prompt_maker(
    seed: int, token_ids: Sequence[int] | None, length: TextLength
) -> Callable[[int, TraceRequest], str | list[int]]:
    """Makes prompts of ids from `token_ids`, or of text if that is None."""
    if token_ids is not None:
        return PromptMaker(token_ids, seed).units
    words = PromptMaker(WORDS, seed, length)
    return lambda index, request: "".join(words.units(index, request)).lstrip()
