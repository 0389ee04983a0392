"""The enumerated set of step shapes, and which of them a step runs in.

A program is keyed by (decode rows, prefill tokens). Rows are packed afresh every step, decodes
first and without holes, so a batch that shrinks moves to the smaller program by itself: the paged
form of Flover's memory shuffle (Yao et al. 2023), in which nothing is copied. All programs are
compiled before the first request, so going back and forth between two costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxserve.errors import ConfigError, ProgramMissError

TOKEN_MULTIPLE = 16
"""Prefill buckets are multiples of this, so that a full one wastes no matmul tile."""


class ProgramKey(NamedTuple):
    """Shape of a step: one token for each of `rows` decodes, then `prefill_tokens` tokens.

    `ring`: of one chunk, whose keys travel around the ranks that share its sequence
    (runtime/sequence.py).
    """

    rows: int
    prefill_tokens: int
    ring: bool = False

    @property
    def num_tokens(self) -> int:
        return self.rows + self.prefill_tokens


class StepShape(NamedTuple):
    """What of a step decides which program it runs in.

    `lone_stop` is the position after the step's only prefill chunk; 0 where there is none, or more
    than one, or one whose prompt is scored and must stay in order.
    """

    num_decodes: int = 0
    prefill_tokens: int = 0
    lone_stop: int = 0

    def plus(
        self, stop: int, num_tokens: int, *, scored: bool = False, extends: bool = False
    ) -> StepShape:
        """With one more prefill chunk, of `num_tokens` up to position `stop`, whose prompt may be
        `scored`; or, if it `extends` the last one, with that longer by these."""
        lone = bool(self.lone_stop) if extends else not (self.prefill_tokens or scored)
        return self._replace(
            prefill_tokens=self.prefill_tokens + num_tokens, lone_stop=stop if lone else 0
        )


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes a step is padded to, each tuple ascending.

    rows: of steps that only decode; every such step is as small as it can be, for it is the one
        that sets the time between tokens.
    mixed_rows: of steps that also prefill, where a padded row is one token among many: none, or as
        many as there could be.
    prefill_tokens: of steps that prefill.
    ring_contexts: for each program that there is a ring program beside, the longest context of the
        chunk that the ring program is for.
    """

    rows: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    ring_contexts: Mapping[ProgramKey, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_config(
        cls,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        min_prefill_tokens: int = 32,
        *,
        pipelined: bool = False,
        seq: int = 1,
        tiled: bool = False,
    ) -> Buckets:
        """Powers of two up to the largest step: `max_num_seqs` rows, and prefill for the rest of
        the token budget. A full step therefore has no padding at all.

        `pipelined`: a program holds a step of each stage, so that even a lone sequence decodes
        beside the prefill of its successor. `seq`: ranks that prefill tokens are dealt to, in
        equal shares. With both there is one size of prefills: a step goes from program to program,
        and its tokens must stay with those they were dealt to. `tiled`: programs compute the tokens
        that a step has and not their padding (tiles.py), so that one size of each kind will do.

        Raises ConfigError when the budget leaves less than one multiple of 16 tokens, and of `seq`,
        to prefill.
        """
        multiple = math.lcm(TOKEN_MULTIPLE, seq)
        most = max_num_batched_tokens - max_num_seqs
        most -= most % multiple
        if max_num_seqs < 1 or most < multiple:
            raise ConfigError(
                f"max_num_batched_tokens {max_num_batched_tokens} with max_num_seqs "
                f"{max_num_seqs}: the budget must exceed the sequences, at least 1, by "
                f"{multiple} or more"
            )
        least = -(-min_prefill_tokens // multiple) * multiple
        one_prefill_size = tiled or (pipelined and seq > 1)
        return cls(
            rows=(max_num_seqs,) if tiled else _doublings(1, max_num_seqs),
            mixed_rows=(0, max_num_seqs) if max_num_seqs > 1 or pipelined else (0,),
            prefill_tokens=(most,) if one_prefill_size else _doublings(least, most),
        )

    @property
    def max_prefill_tokens(self) -> int:
        return self.prefill_tokens[-1]

    def keys(self) -> tuple[ProgramKey, ...]:
        """Every program there is but for ring programs, smallest first."""
        decode = (ProgramKey(rows, 0) for rows in self.rows)
        mixed = (ProgramKey(rows, n) for rows in self.mixed_rows for n in self.prefill_tokens)
        return tuple(sorted((*decode, *mixed), key=lambda key: (key.num_tokens, key)))

    def ring_keys(self) -> tuple[ProgramKey, ...]:
        """Every ring program."""
        return tuple(key._replace(ring=True) for key in self.ring_contexts)

    def program(self, steps: Iterable[StepShape]) -> ProgramKey:
        """The program that a dispatch runs, which works on all of these steps: one, or in a
        pipeline one for each stage. Raises ProgramMissError if none holds them."""
        num_decodes, prefill_tokens, lone_stop = map(max, zip(*steps))
        key = self.pick(num_decodes, prefill_tokens)
        return key._replace(ring=0 < lone_stop <= self.ring_contexts.get(key, 0))

    def pick(self, num_decodes: int, num_prefill_tokens: int) -> ProgramKey:
        """The smallest program that holds a step. Raises ProgramMissError if there is none."""
        if num_prefill_tokens:
            rows = _ceiling(self.mixed_rows, num_decodes)
            tokens = _ceiling(self.prefill_tokens, num_prefill_tokens)
        else:
            rows = _ceiling(self.rows, num_decodes) if num_decodes else None
            tokens = 0
        if rows is None or tokens is None:
            raise ProgramMissError(
                f"no program for {num_decodes} decodes and {num_prefill_tokens} prefill tokens; "
                f"a step has 1 to {self.rows[-1]} decodes, or up to {self.mixed_rows[-1]} beside "
                f"1 to {self.max_prefill_tokens} prefill tokens"
            )
        return ProgramKey(rows, tokens)


def _doublings(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first and so on below `last`, then `last` itself."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def _ceiling(sizes: tuple[int, ...], size: int) -> int | None:
    """The smallest of ascending `sizes` that is at least `size`."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None
