"""One step's metadata: how a plan becomes a single int32 upload, and how a program reads it.

The layout of the vector is fixed by the program's key and stated once, in `StepLayout.fields`;
`pack` fills it on the host and `unpack` slices it on the device.

Page tables stay on the device, int32 [slots + 1, max_pages], a row for each slot and one for
padding. A step uploads what has changed in the tables of its rows since their last step, and
`unpack` applies that first. Changes beyond the few pages that a step usually adds, as when a
sequence is admitted with a long prompt, are whole rows that a program of its own writes before the
step (`set_tables`). Programs run in the order they were dispatched, so a table, and a slot, may be
given to another sequence as soon as a step is packed. In a pipeline each stage has its own tables
and applies a step's changes when that step reaches it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.engine.plan import Chunk, StepPlan
from jaxserve.kv.pages import TRASH_PAGE
from jaxserve.runtime.buckets import ProgramKey
from pallas_kernels.paged_attention import RaggedBatch
from sharding_rules import STAGE


class Addresses(NamedTuple):
    """Where a step's keys and values go and are read: for token t, page `page_ids[t]` at
    `offsets[t]`, int32 [tokens] each, and each row's pages in `batch`."""

    page_ids: jax.Array
    offsets: jax.Array
    batch: RaggedBatch


class StepInputs(NamedTuple):
    """What a step reads beside the model, all int32.

    Token i < rows is a decode whose id lies on the device in `slots[i]`; the others are
    `prefill_ids`. `sampled [sample_rows]` are indices of the tokens whose hidden states go on to
    sampling.
    """

    slots: jax.Array
    prefill_ids: jax.Array
    positions: jax.Array
    sampled: jax.Array
    addresses: Addresses


class Prefill(NamedTuple):
    """One prefill chunk of a plan. `stop` is the position after its last token."""

    stop: int
    slot: int
    token_ids: list[int]
    samples: bool


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A plan as it is before the next call of `schedule`.

    `stops` and `slots` are of its decodes. `updates` are the entries of page tables to change, as
    (slot, index, page), and `tables` the pages of slots of which too many change for that. Taking
    a snapshot counts both as uploaded: its step must be dispatched.
    """

    stops: SequenceOf[int] = ()
    slots: SequenceOf[int] = ()
    prefills: SequenceOf[Prefill] = ()
    updates: SequenceOf[tuple[int, int, int]] = ()
    tables: SequenceOf[tuple[int, list[int]]] = ()

    @classmethod
    def of(cls, plan: StepPlan, page_size: int) -> Snapshot:
        updates, tables = [], []
        room = table_updates(
            len(plan.decodes), len(plan.prefills), plan.num_prefill_tokens, page_size
        )
        for chunk in (*plan.decodes, *plan.prefills):
            table = chunk.seq.table
            if table.num_uploaded == len(table.pages):
                continue
            first, pages = table.take_changes()
            if len(updates) + len(pages) <= room:
                updates += [(chunk.slot, index, page) for index, page in enumerate(pages, first)]
            else:
                tables.append((chunk.slot, table.pages.copy()))
        return cls(
            [chunk.start + 1 for chunk in plan.decodes],
            [chunk.slot for chunk in plan.decodes],
            [_prefill(chunk) for chunk in plan.prefills],
            updates,
            tables,
        )


def _prefill(chunk: Chunk) -> Prefill:
    stop = chunk.start + chunk.num_tokens
    return Prefill(stop, chunk.slot, chunk.seq.token_ids(chunk.start, stop), chunk.samples)


def table_updates(decodes: int, chunks: int, prefill_tokens: int, page_size: int) -> int:
    """Entries of page tables that a step can change: a page for each decode, and those that its
    chunks fill. It grows with each of the sizes, so what fits a step fits every program that
    holds the step."""
    return decodes + chunks + prefill_tokens // page_size


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Sizes of one program's metadata. A row is a decode or a prefill chunk, decodes first."""

    key: ProgramKey
    max_seqs: int
    max_pages: int
    page_size: int
    seq: int = 1
    """Ranks that share each sequence: a rank has `page_size / seq` tokens of each page."""
    ring_pages: int = 0
    """Pages that a chunk's context has at most where keys travel around a ring."""
    ring_scheme: str = "pass_kv"
    tile: int | None = None
    """Tokens that are computed together, always as many (tiles.py); None for all of a step's."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the program computes: the key's, rounded up to whole tiles."""
        return self.key.num_tokens + (-self.key.num_tokens % self.tile if self.tile else 0)

    @property
    def chunks(self) -> int:
        """Prefill chunks the program has room for: as many as its tokens could be of, since a
        chunk has at least one, and no more than sequences that run."""
        return 1 if self.key.ring else min(self.max_seqs, self.key.prefill_tokens)

    @property
    def rows(self) -> int:
        return self.key.rows + self.chunks

    @property
    def sample_rows(self) -> int:
        """Tokens that can be sampled from: one of each sequence."""
        return min(self.rows, self.max_seqs)

    @property
    def sample_width(self) -> int:
        """Hidden states that every program hands to sampling, some of them padding."""
        return self.max_seqs + (-self.max_seqs % self.tile if self.tile else 0)

    @property
    def trash_slot(self) -> int:
        """The row of per-sequence device state that padding uses; real slots come before it."""
        return self.max_seqs

    @functools.cached_property
    def fields(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Name of each field with its place in the vector and its shape."""
        updates = table_updates(self.key.rows, self.chunks, self.key.prefill_tokens, self.page_size)
        shapes = {
            "updates": (updates, 3),
            "context": (self.rows,),
            "starts": (self.rows,),
            "lengths": (self.rows,),
            "slots": (self.rows,),
            "prefill_ids": (self.key.prefill_tokens,),
            "sampled": (self.sample_rows,),
        }
        places, start = {}, 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            places[name] = (slice(start, start + size), shape)
            start += size
        return places

    @functools.cached_property
    def size(self) -> int:
        """Length of the vector in int32 elements."""
        return max(place.stop for place, _ in self.fields.values())

    @functools.cached_property
    def _padding(self) -> np.ndarray:
        """The vector of a step without tokens."""
        vector = np.zeros(self.size, np.int32)
        views = self._views(vector)
        views["updates"][:, 0] = self.trash_slot
        views["starts"][:] = np.minimum(np.arange(self.rows), self.key.rows)
        views["lengths"][: self.key.rows] = 1
        views["slots"][:] = self.trash_slot
        return vector

    def _views(self, vector: Any) -> dict[str, Any]:
        return {name: vector[place].reshape(shape) for name, (place, shape) in self.fields.items()}

    def pack(self, step: Snapshot) -> np.ndarray:
        """The vector for `step`."""
        vector = self._padding.copy()
        views = self._views(vector)
        if step.updates:
            views["updates"][: len(step.updates)] = step.updates
        num_decodes = len(step.slots)
        views["context"][:num_decodes] = step.stops
        views["slots"][:num_decodes] = step.slots
        sampled = list(range(num_decodes))

        start, ids = self.key.rows, views["prefill_ids"]
        for row, prefill in enumerate(step.prefills, self.key.rows):
            length = len(prefill.token_ids)
            views["context"][row], views["lengths"][row] = prefill.stop, length
            views["starts"][row], views["slots"][row] = start, prefill.slot
            first = start - self.key.rows
            ids[first : first + length] = prefill.token_ids
            start += length
            if prefill.samples:
                sampled.append(start - 1)
        views["starts"][self.key.rows + len(step.prefills) :] = start
        views["sampled"][: len(sampled)] = sampled
        return vector

    def unpack(self, tables: jax.Array, vector: jax.Array) -> tuple[jax.Array, StepInputs]:
        """`tables` int32 [slots + 1, max_pages] with the changes of `vector`, and the inputs that
        it holds, positions and write addresses worked out."""
        raw = self._views(vector)
        slot, index, page = raw["updates"].T
        tables = tables.at[slot, index].set(page)
        # A slot's row has leftovers of longer sequences behind its pages.
        num_pages = -(-raw["context"] // self.page_size)
        used = jnp.arange(self.max_pages) < num_pages[:, None]
        batch = RaggedBatch(
            jnp.where(used, tables[raw["slots"]], TRASH_PAGE),
            raw["context"],
            raw["starts"],
            raw["lengths"],
        )
        token = jnp.arange(self.num_tokens)
        if self.chunks:
            ends = batch.starts + batch.lengths
            row = jnp.sum(token[:, None] >= ends[None, :], axis=1)
            row = jnp.minimum(row, self.rows - 1)
        else:
            row = jnp.minimum(token, self.rows - 1)
        position = (batch.context - batch.lengths - batch.starts)[row] + token
        real = (position >= 0) & (position < batch.context[row]) & (token < self.key.num_tokens)
        position = jnp.where(real, position, 0)
        page = batch.tables[row, position // self.page_size]
        return tables, StepInputs(
            slots=raw["slots"][: self.key.rows],
            prefill_ids=raw["prefill_ids"],
            positions=position,
            sampled=raw["sampled"],
            addresses=Addresses(jnp.where(real, page, 0), position % self.page_size, batch),
        )


def set_tables(stages: int, tables: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """`tables` int32 [slots + 1, max_pages] with one row replaced: in stage s of a pipeline, that
    of `slots[s]` by `rows[s]`, int32 [stages, max_pages]."""
    stage = lax.axis_index(STAGE) if stages > 1 else 0
    return tables.at[slots[stage]].set(rows[stage])
