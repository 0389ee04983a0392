"""Buckets: the set of compiled step shapes, and the choice of a step's program.

A program is keyed by (decode rows, prefill tokens). Rows are packed again every step, decodes first
and without holes, so a shrinking batch switches to a smaller program: the paged form of Flover's
memory shuffle (Yao et al. 2023), without any copy. All programs are compiled before the first
request, so switching between them costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import ConfigError, ProgramMissError

_MIN_PREFILL_TOKENS = 32
TOKEN_MULTIPLE = 16
"""Prefill buckets are multiples of this, so that a full one wastes no matmul tile."""


class ProgramKey(NamedTuple):
    """Shape of a step: `width` tokens for each of `rows` decodes, then `prefill_tokens` tokens.

    `ring`: ring attention for a single prefill chunk, whose keys pass around the ranks that share
    its sequence (runtime/programs/forward/context_parallel.py). `width`: the newest token and its
    drafts.
    """

    rows: int
    prefill_tokens: int
    ring: bool = False
    width: int = 1

    @property
    def decode_tokens(self) -> int:
        return self.rows * self.width

    @property
    def num_tokens(self) -> int:
        return self.decode_tokens + self.prefill_tokens

    def __str__(self) -> str:
        rows = str(self.rows) if self.width == 1 else f"{self.rows}x{self.width}"
        return f"{rows}-{self.prefill_tokens}{'-ring' if self.ring else ''}"


class StepShape(NamedTuple):
    """The properties of a step that determine its program.

    `lone_stop` is the position after the step's only prefill chunk; 0 if there is none, or more
    than one, or one whose prompt is scored and must stay in order.
    """

    num_decodes: int = 0
    prefill_tokens: int = 0
    lone_stop: int = 0
    width: int = 1
    """Tokens of the widest decode."""

    def plus(
        self, stop: int, num_tokens: int, *, scored: bool = False, extends: bool = False
    ) -> StepShape:
        """Adds a prefill chunk of `num_tokens` up to position `stop`, whose prompt may be `scored`;
        if it `extends` the last chunk, these tokens are appended to that one."""
        lone = bool(self.lone_stop) if extends else not (self.prefill_tokens or scored)
        return self._replace(
            prefill_tokens=self.prefill_tokens + num_tokens, lone_stop=stop if lone else 0
        )


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes a step is padded to, each tuple ascending.

    rows: decode rows of decode-only steps, which are padded little since they set the time between
        tokens.
    mixed_rows: decode rows of steps with prefill, where a padded row is one token among many: none
        or the maximum.
    prefill_tokens: prefill tokens of steps with prefill.
    widths: tokens of a decode row: one, and with speculation one and as many drafts as a step may
        verify.
    ring_contexts: for each program that also has a ring variant, the longest context of a chunk
        that the ring variant is used for.
    """

    rows: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    widths: tuple[int, ...] = (1,)
    ring_contexts: Mapping[ProgramKey, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_config(
        cls,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        pipelined: bool = False,
        seq: int = 1,
        tiled: bool = False,
        least_rows: int = 1,
        draft_lengths: tuple[int, ...] = (0,),
    ) -> Buckets:
        """Powers of two up to the largest step: `max_num_seqs` rows, and prefill for the rest of
        the token budget. A full step therefore has no padding at all.

        `pipelined`: a program runs one step per stage, so that even a single sequence decodes
        together with the prefill of the next one. `seq`: ranks that prefill tokens are distributed
        over, in equal shares. With both there is one prefill size: a step passes through several
        programs, and its tokens must stay on their ranks. `tiled`: programs compute the tokens of a
        step but not its padding (tiles.py), so that one size of each kind suffices.
        `least_rows`: decode rows of the smallest program, where fewer take more kernels.
        `draft_lengths`: numbers of drafts that a decode may have, ascending from 0.

        Raises ConfigError when the budget leaves less than one multiple of 16 tokens, and of `seq`,
        for prefill.
        """
        multiple = math.lcm(TOKEN_MULTIPLE, seq)
        num_drafts = draft_lengths[-1]
        decode_tokens = max_num_seqs * (1 + num_drafts)
        most = max_num_batched_tokens - decode_tokens
        most -= most % multiple
        if max_num_seqs < 1 or most < multiple:
            raise ConfigError(
                f"max_num_batched_tokens {max_num_batched_tokens} with max_num_seqs "
                f"{max_num_seqs}: the budget must exceed the sequences, at least 1, "
                + (f"with {num_drafts} drafts each, " if num_drafts else "")
                + f"by {multiple} or more"
            )
        least = cdiv(_MIN_PREFILL_TOKENS, multiple) * multiple
        one_prefill_size = tiled or (pipelined and seq > 1)
        return cls(
            rows=(max_num_seqs,) if tiled else _doublings(least_rows, max_num_seqs),
            mixed_rows=(0, max_num_seqs) if max_num_seqs > 1 or pipelined else (0,),
            prefill_tokens=(most,) if one_prefill_size else _doublings(least, most),
            widths=tuple(1 + length for length in draft_lengths),
        )

    @property
    def max_prefill_tokens(self) -> int:
        return self.prefill_tokens[-1]

    def keys(self) -> tuple[ProgramKey, ...]:
        """All programs except ring programs, smallest first."""
        decode = ((rows, 0) for rows in self.rows)
        mixed = ((rows, n) for rows in self.mixed_rows for n in self.prefill_tokens)
        keys = (
            ProgramKey(*sizes, width=width)
            for sizes in (*decode, *mixed)
            for width in self.widths
            if sizes[0] or width == 1
        )
        return tuple(sorted(keys, key=lambda key: (key.num_tokens, key)))

    def ring_keys(self) -> tuple[ProgramKey, ...]:
        """All ring programs."""
        return tuple(key._replace(ring=True) for key in self.ring_contexts)

    def program(self, steps: Iterable[StepShape]) -> ProgramKey:
        """The program of a dispatch of these steps: one step, or in a pipeline one per stage.
        Raises ProgramMissError if no program fits them."""
        num_decodes, prefill_tokens, lone_stop, width = map(max, zip(*steps))
        key = self.pick(num_decodes, prefill_tokens, width)
        return key._replace(ring=0 < lone_stop <= self.ring_contexts.get(key, 0))

    def pick(self, num_decodes: int, num_prefill_tokens: int, width: int = 1) -> ProgramKey:
        """The smallest program that fits a step. Raises ProgramMissError if there is none."""
        if num_prefill_tokens:
            rows = _ceiling(self.mixed_rows, num_decodes)
            tokens = _ceiling(self.prefill_tokens, num_prefill_tokens)
        else:
            rows = _ceiling(self.rows, num_decodes) if num_decodes else None
            tokens = 0
        if rows is None or tokens is None:
            raise ProgramMissError(
                f"no program for {num_decodes} decodes and {num_prefill_tokens} prefill tokens; "
                f"a step has 1 to {self.rows[-1]} decodes, or up to {self.mixed_rows[-1]} with "
                f"1 to {self.max_prefill_tokens} prefill tokens"
            )
        return ProgramKey(rows, tokens, width=_ceiling(self.widths, width) if rows else 1)


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
