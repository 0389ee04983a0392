"""A seeded acceptance distribution of drafts, in place of the text, which a simulation lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from jaxserve.core.errors import ConfigError
from jaxserve.core.sequence import Sequence

_MASK = 2**64 - 1


class Verified(NamedTuple):
    """What a decode verified: how many drafts there were, and how many of them it accepted."""

    num_drafts: int
    num_accepted: int


class AcceptanceModel(Protocol):
    """Decides what becomes of drafts."""

    def verified(self, seq: Sequence, output_index: int, num_drafts: int) -> Verified:
        """The drafts of a decode that samples the output `output_index` of a sequence, and verifies
        at most `num_drafts` guesses of that one and those after it."""


@dataclasses.dataclass(frozen=True)
class DraftAcceptance:
    """Each draft is accepted with a probability of its own, given that those before it are.

    A draft of an output is right or wrong whatever the other requests do and however many are
    verified together, as it is for a text: the same number, drawn for that output, decides in every
    schedule. So two settings are compared on the same luck.

    Attributes:
        rates: probabilities, from 0 to 1: of the first draft of a step, the second and so on, the
            last of all further ones. One number is the alpha of Leviathan et al. 2023.
        seed: of the draws.
        depth: most drafts that follow one another, where they form a tree; 0 where all do.
    """

    rates: tuple[float, ...]
    seed: int = 0
    depth: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the value and the range."""
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise ConfigError(
                f"draft_acceptance is {','.join(map(str, self.rates))!r}; it must be shares of "
                "drafts that are accepted, each from 0 to 1, such as 0.7 or 0.8,0.7,0.6."
            )

    def verified(self, seq: Sequence, output_index: int, num_drafts: int) -> Verified:
        most = min(num_drafts, self.depth) if self.depth else num_drafts
        for place in range(most):
            rate = self.rates[min(place, len(self.rates) - 1)]
            if self._drawn(seq, output_index + place) >= rate:
                return Verified(num_drafts, place)
        return Verified(num_drafts, most)

    def _drawn(self, seq: Sequence, output_index: int) -> float:
        """A number from 0 to 1, the same for the same output of the same request."""
        return _mixed((self.seed, seq.seq_id, output_index)) / 2**64


def _mixed(numbers: SequenceOf[int]) -> int:
    """Numbers as one of 64 bits that looks random: the finaliser of SplitMix64 (Steele et al.
    2014)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state
