"""A finite set of texts, and what of it can be said by listing it: the oracle of grammars."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class FiniteLanguage:
    """Texts as bytes. Whatever llguidance says of a grammar that means them must agree."""

    texts: frozenset[bytes]

    @classmethod
    def of(cls, texts: Iterable[str]) -> FiniteLanguage:
        return cls(frozenset(text.encode() for text in texts))

    @classmethod
    def words(cls, letters: str, shortest: int, longest: int) -> FiniteLanguage:
        """All texts of these letters: what the regex `[letters]{shortest,longest}` means."""
        lengths = range(shortest, longest + 1)
        spelled = (itertools.product(letters, repeat=length) for length in lengths)
        return cls.of("".join(word) for words in spelled for word in words)

    def goes_on(self, start: bytes) -> bool:
        """Whether some longer text begins so."""
        return any(text.startswith(start) and text != start for text in self.texts)

    def forced(self, start: bytes) -> bool:
        """Whether there is but one byte that may follow, and one must."""
        following = {
            text[len(start) : len(start) + 1] for text in self.texts if text.startswith(start)
        }
        return len(following) == 1 and following != {b""}

    def allowed(
        self, start: bytes, tokens: list[bytes], eos: Iterable[int], *, ignore_eos: bool = False
    ) -> set[int]:
        """Ids of `tokens` that may come after `start`, those of `eos` where a text is whole."""
        eos = set(eos)
        rests = {text[len(start) :] for text in self.texts if text.startswith(start)}
        prefixes = {rest[:end] for rest in rests for end in range(1, len(rest) + 1)}
        ids = {token for token, spelled in enumerate(tokens) if spelled in prefixes} - eos
        return ids | eos if start in self.texts and not ignore_eos else ids


def ids_of(mask: np.ndarray) -> set[int]:
    """The tokens that have a bit in a mask."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
