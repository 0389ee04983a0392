"""How a step's room for prefill tokens is divided among sequences."""

from __future__ import annotations

from typing import Literal

from jaxserve.engine.sequence import Sequence


class Shares:
    """Gives room to sequences in turn, by the chunk rule of a policy (`policies.py`)."""

    def __init__(
        self,
        rule: Literal["whole", "budget", "exact"],
        room: int,
        max_chunks: int,
        min_chunk_tokens: int,
    ) -> None:
        """`room` tokens for at most `max_chunks` sequences, none of them with a piece of its prompt
        below `min_chunk_tokens`, the last one excepted."""
        self.taken: list[tuple[Sequence, int]] = []
        self._rule = rule
        self._room = room
        self._max_chunks = max_chunks
        self._min_chunk_tokens = min_chunk_tokens

    @property
    def full(self) -> bool:
        return not self._room or len(self.taken) == self._max_chunks

    def take(self, seq: Sequence, left: int) -> bool:
        """Gives a sequence with `left` tokens to prefill its share; False if it gets none."""
        if self._rule == "exact" and self.taken:
            self._take_back(min(left, self._min_chunk_tokens) - self._room)
        share = self._share(left)
        if share:
            self.taken.append((seq, share))
            self._room -= share
        return bool(share)

    def _share(self, left: int) -> int:
        room = self._room
        if left <= room or not self.taken or self._rule == "exact":
            return min(left, room)
        if self._rule == "whole" or room < self._min_chunk_tokens:
            return 0
        return room

    def _take_back(self, wanted: int) -> None:
        """Shortens the last share by up to `wanted` tokens, not below the floor."""
        seq, share = self.taken[-1]
        taken = max(0, min(wanted, share - self._min_chunk_tokens))
        self.taken[-1] = seq, share - taken
        self._room += taken
