"""A plan as a step is dispatched with it, whatever the scheduler does next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.kv.layout import KVLayout


class Prefill(NamedTuple):
    """One prefill chunk of a plan. `stop` is the position after its last token, `adapter` the slot
    of its LoRA adapter."""

    stop: int
    slot: int
    token_ids: list[int]
    samples: bool
    adapter: int


@dataclasses.dataclass(frozen=True)
class FrozenPlan:
    """Immutable copy of a plan, taken before the next call of `schedule`.

    `stops`, `slots`, `counts` and `adapters` are of its decodes: the position after the last that
    each may write, its number of tokens, and the slot of its LoRA adapter. `updates` are page table
    entries to change, as (row, index, page); `tables` are rows with too many changes for that. The
    row of a slot is below those of all slots of the KV groups before. Both already count as
    uploaded, so the step must be dispatched. `host_pages` have the first pages of each decode, then
    of each prefill, whose sequence is longer than the pool, for each KV group. `decode_groups` are
    decodes that read their first pages together, as (first, decodes, tokens).
    """

    stops: SequenceOf[int] = ()
    slots: SequenceOf[int] = ()
    counts: SequenceOf[int] = ()
    adapters: SequenceOf[int] = ()
    prefills: SequenceOf[Prefill] = ()
    updates: SequenceOf[tuple[int, int, int]] = ()
    tables: SequenceOf[tuple[int, list[int]]] = ()
    host_pages: SequenceOf[SequenceOf[SequenceOf[int]]] = ()
    decode_groups: SequenceOf[tuple[int, int, int]] = ()

    @classmethod
    def of(cls, plan: StepPlan, kv: KVLayout, num_slots: int) -> FrozenPlan:
        updates, tables = [], []
        room = len(kv.groups) * table_updates(
            len(plan.decodes), len(plan.prefills), plan.num_prefill_tokens, kv.page_size
        )
        changes = [
            (chunk.slot, chunk.pages, chunk.num_uploaded)
            for chunk in (*plan.decodes, *plan.prefills)
            if chunk.num_uploaded < len(chunk.pages)
        ]
        if len(kv.groups) > 1:
            changes += [
                (chunk.slot + group * (num_slots + 1), pages, first)
                for chunk in (*plan.decodes, *plan.prefills)
                for group, (pages, first) in enumerate(chunk.others, 1)
                if first < len(pages)
            ]
        for row, pages, first in changes:
            if len(updates) + len(pages) - first <= room:
                updates += [(row, i, pages[i]) for i in range(first, len(pages))]
            else:
                tables.append((row, list(pages)))
        return cls(
            [chunk.stop for chunk in plan.decodes],
            [chunk.slot for chunk in plan.decodes],
            [1 + chunk.num_drafts for chunk in plan.decodes],
            [chunk.seq.lora_slot for chunk in plan.decodes],
            [_prefill(chunk) for chunk in plan.prefills],
            updates,
            tables,
            [chunk.host_pages for chunk in (*plan.decodes, *plan.prefills)],
            [(first, count, pages * kv.page_size) for first, count, pages in plan.decode_groups],
        )

    def pages_on_host(self, group: int) -> list[SequenceOf[int]]:
        """`host_pages` of one KV group, none of sequences that are in the pool."""
        return [groups[group] if groups else () for groups in self.host_pages]


def _prefill(chunk: ScheduledChunk) -> Prefill:
    token_ids = chunk.seq.token_ids(chunk.start, chunk.stop)
    return Prefill(chunk.stop, chunk.slot, token_ids, chunk.samples, chunk.seq.lora_slot)


def table_updates(decodes: int, chunks: int, prefill_tokens: int, page_size: int) -> int:
    """Page table entries that a step can change: one per decode, and the pages that its chunks
    fill. Monotonic in each size, so updates that fit the step fit every program that holds it."""
    return decodes + chunks + prefill_tokens // page_size
