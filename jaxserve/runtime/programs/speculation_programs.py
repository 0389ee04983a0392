"""Kinds of programs that tell the device of sequences that speculate, and verify their drafts."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxserve.core.steps.plan import ScheduledChunk
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.program_kind import ProgramKind, padded
from jaxserve.runtime.programs.shapes.program import holding
from jaxserve.sampling.speculation import (
    NO_DRAFT,
    Acceptance,
    force_drafts,
    set_history,
    verify,
)

if TYPE_CHECKING:  # Grammars determine no program (program_sources.py).
    from jaxserve.structured.lookahead import Forced


class VerifyKey(NamedTuple):
    rows: int
    width: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.width}"


class Verify(ProgramKind[VerifyKey]):
    """Accepts the drafts of a step; none without speculation."""

    title = "verify"
    pure = verify
    reads = ("speculation", "last_tokens")
    replaces = ("speculation", "last_tokens")
    outputs = (P(),)

    def keys(self) -> Iterable[VerifyKey]:
        if self.shapes.config.speculative_config is None:
            return ()
        buckets = self.shapes.buckets
        return [VerifyKey(rows, width) for rows in buckets.rows for width in buckets.widths]

    def static(self, key: VerifyKey) -> tuple[Any, ...]:
        return key.width, self.shapes.tree_depth if key.width > 1 else 0

    def uploads(self, key: VerifyKey) -> tuple[Any, ...]:
        int32 = self.shapes.int32
        hidden = () if self.shapes.medusa is None else (self.shapes.sampled_hidden,)
        return int32(self.shapes.sampled(*key)), int32(key.rows), int32(key.rows), *hidden

    def __call__(
        self,
        state: DeviceState,
        token_ids: jax.Array,
        chunks: SequenceOf[ScheduledChunk],
        width: int,
        hidden: jax.Array,
    ) -> Acceptance:
        """What each of `chunks` gained by `token_ids`, `width` of each, sampled from `hidden`."""
        rows = holding(self.shapes.buckets.rows, len(chunks))
        slots = padded([chunk.slot for chunk in chunks], rows, self.shapes.trash_slot)
        counts = padded([1 + chunk.num_drafts for chunk in chunks], rows, 1)
        from_which = () if self.shapes.medusa is None else (hidden,)
        return self.run(state, VerifyKey(rows, width), token_ids, slots, counts, *from_which)


class ForceDrafts(ProgramKind[int]):
    """Puts drafts that the host knows in the place of others; none without speculation."""

    title = "force-drafts"
    pure = force_drafts
    reads = replaces = ("speculation",)

    def keys(self) -> Iterable[int]:
        speculates = self.shapes.config.speculative_config is not None
        return self.shapes.buckets.rows if speculates else ()

    def static(self, key: int) -> tuple[Any, ...]:
        return (self.shapes.tree_depth,)

    def uploads(self, key: int) -> tuple[Any, ...]:
        int32 = self.shapes.int32
        most = self.shapes.config.num_speculative_tokens
        return int32(key), int32(key), int32(key), int32(key), int32(key, most)

    def __call__(self, state: DeviceState, rows: SequenceOf[tuple[ScheduledChunk, Forced]]) -> None:
        """`rows`: decodes that are about to run, with the tokens that must follow."""
        key = holding(self.shapes.buckets.rows, len(rows))
        drafts = np.full((key, self.shapes.config.num_speculative_tokens), NO_DRAFT, np.int32)
        for row, (_, forced) in enumerate(rows):
            drafts[row, : len(forced.token_ids)] = forced.token_ids
        lengths = [chunk.seq.num_prompt + forced.num_tokens for chunk, forced in rows]
        self.run(
            state,
            key,
            padded([chunk.slot for chunk, _ in rows], key, self.shapes.trash_slot),
            padded(lengths, key, 0),
            padded([forced.last for _, forced in rows], key, NO_DRAFT),
            padded([chunk.stop for chunk, _ in rows], key, 0),
            drafts,
        )


class SetHistory(ProgramKind[int]):
    """Tells the device all tokens of a sequence that is about to decode."""

    title = "set-history"
    pure = set_history
    reads = replaces = ("speculation",)

    def keys(self) -> Iterable[int]:
        speculation = self.shapes.abstract_state.speculation
        return () if speculation is None else (speculation.history.shape[1],)

    def uploads(self, key: int) -> tuple[Any, ...]:
        return self.shapes.int32(), self.shapes.int32(key), self.shapes.int32()

    def __call__(self, state: DeviceState, chunk: ScheduledChunk) -> None:
        """`chunk` prefills the last of these tokens."""
        size = state.speculation.history.shape[1]
        tokens = padded(chunk.seq.token_ids(0, chunk.stop), size, 0)
        self.run(state, size, np.int32(chunk.slot), tokens, np.int32(chunk.stop))
