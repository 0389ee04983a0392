"""The plan of one step as plain data: the scheduler's output and the executor's input."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import StepShape


class ScheduledChunk(NamedTuple):
    """Consecutive tokens of one sequence, computed in one step.

    Positions `start .. start + num_tokens - 1`. A decode is a chunk of one token whose value is on
    the device, in row `slot` of the last sampled tokens; a prefill chunk's tokens are known to the
    host. `slot` is a copy: by the time the step's tokens are read, the sequence may have lost it.
    `pages` are the sequence's pages in order, of which the device's page table already has the
    first `num_uploaded`; they may change after the next call of `Scheduler.schedule`. `others` are
    the same two of the other KV groups. `host_pages` have the KV of its first pages in each group,
    where it is longer than the pool; these are no longer in the pool. `seq` may be None where only
    the time of a step matters.
    """

    seq: Sequence | None
    start: int
    num_tokens: int
    samples: bool
    """Whether it reaches the sequence's last token, so that the step samples the next one."""
    output_index: int
    """Output index of the token that it samples, or that its prefill will lead to."""
    slot: int
    pages: SequenceOf[int] = ()
    num_uploaded: int = 0
    num_drafts: int = 0
    """Drafts that a decode verifies, at most: the device knows how many there are, and that its
    first token is further by the drafts accepted in steps not yet read."""
    num_lookahead_tokens: int = 0
    """KV entries beyond its tokens that it may write, for these drafts and those in flight."""
    others: tuple[tuple[SequenceOf[int], int], ...] = ()
    host_pages: SequenceOf[SequenceOf[int]] = ()

    @property
    def stop(self) -> int:
        """Position after the last that it may write."""
        return self.start + self.num_tokens + self.num_lookahead_tokens

    @property
    def scored(self) -> bool:
        """Whether its sequence's prompt is."""
        return self.seq is not None and self.seq.scored


class DecodeGroup(NamedTuple):
    """Neighbouring decodes of a plan, from number `first` on, whose page tables begin with the same
    `num_pages` pages. Each is full of tokens before the newest of all of them."""

    first: int
    num_decodes: int
    num_pages: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: decodes first, longest context first within a group and of those in none, then
    prefill chunks.

    Pack it before the next call of `Scheduler.schedule`, which may reuse pages that this step was
    the last to need. `admitted`, `resumed` and `preempted` are changes since the previous plan: the
    first chunks of new sequences, sequences that run again after a preemption, and sequences that
    lost their pages after they had run.
    """

    decodes: tuple[ScheduledChunk, ...] = ()
    prefills: tuple[ScheduledChunk, ...] = ()
    admitted: tuple[ScheduledChunk, ...] = ()
    resumed: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    decode_groups: tuple[DecodeGroup, ...] = ()
    """Decodes that read their first pages together, each in at most one group."""

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefills)

    @property
    def num_decode_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_drafts for chunk in self.decodes)

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def sampled(self) -> tuple[ScheduledChunk, ...]:
        """The chunks after which tokens are sampled: decodes first, as in the step."""
        return (*self.decodes, *(chunk for chunk in self.prefills if chunk.samples))

    @property
    def width(self) -> int:
        """Tokens of the widest decode."""
        return 1 + max((chunk.num_drafts for chunk in self.decodes), default=0)

    @property
    def prefix_page_reads(self) -> tuple[int, int]:
        """Pages of groups that a layer reads, each once a group, and how many it would read if
        every token of a decode did so for itself."""
        tokens = [1 + chunk.num_drafts for chunk in self.decodes] if self.decode_groups else []
        alone = sum(
            sum(tokens[first : first + count]) * num_pages
            for first, count, num_pages in self.decode_groups
        )
        return sum(group.num_pages for group in self.decode_groups), alone

    @property
    def shape(self) -> StepShape:
        """The shape that determines the step's program."""
        shape = StepShape(len(self.decodes), width=self.width)
        for chunk in self.prefills:
            shape = shape.plus(chunk.stop, chunk.num_tokens, scored=chunk.scored)
        return shape

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.prefills
