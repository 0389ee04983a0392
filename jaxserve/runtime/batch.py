"""One step's metadata: how a plan becomes a single int32 upload, and how a program reads it.

The layout of the vector is fixed by the program's key and stated once, in `StepLayout.fields`;
`pack` fills it on the host and `unpack` slices it on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.plan import Chunk, StepPlan
from jaxserve.runtime.buckets import ProgramKey
from pallas_kernels.paged_attention import RaggedBatch


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


class Row(NamedTuple):
    """One chunk of a plan with what the scheduler may change: its pages, and its tokens unless it
    is a decode, whose one token lies on the device. `stop` is the position after its last."""

    stop: int
    slot: int
    pages: list[int]
    token_ids: list[int]
    samples: bool


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A plan as it is before the next call of `schedule`, decodes first."""

    decodes: tuple[Row, ...] = ()
    prefills: tuple[Row, ...] = ()

    @classmethod
    def of(cls, plan: StepPlan) -> Snapshot:
        return cls(
            tuple(_row(chunk, []) for chunk in plan.decodes),
            tuple(
                _row(chunk, chunk.seq.token_ids(chunk.start, chunk.start + chunk.num_tokens))
                for chunk in plan.prefills
            ),
        )


def _row(chunk: Chunk, token_ids: list[int]) -> Row:
    stop, pages = chunk.start + chunk.num_tokens, chunk.seq.pages.copy()
    return Row(stop, chunk.slot, pages, token_ids, chunk.samples)


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
        shapes = {
            "tables": (self.rows, self.max_pages),
            "context": (self.rows,),
            "starts": (self.rows,),
            "lengths": (self.rows,),
            "slots": (self.key.rows,),
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

    def pack(self, step: Snapshot) -> np.ndarray:
        """The vector for `step`."""
        vector = np.zeros(self.size, np.int32)
        views = {name: vector[place].reshape(shape) for name, (place, shape) in self.fields.items()}
        tables, num_decodes = views["tables"], len(step.decodes)
        for row, decode in enumerate(step.decodes):
            tables[row, : len(decode.pages)] = decode.pages
        views["context"][:num_decodes] = [decode.stop for decode in step.decodes]
        views["starts"][: self.key.rows] = np.arange(self.key.rows)
        views["lengths"][: self.key.rows] = 1
        views["slots"][:] = self.trash_slot
        views["slots"][:num_decodes] = [decode.slot for decode in step.decodes]
        sampled = list(range(num_decodes))

        start, ids = self.key.rows, views["prefill_ids"]
        for row, prefill in enumerate(step.prefills, self.key.rows):
            length = len(prefill.token_ids)
            tables[row, : len(prefill.pages)] = prefill.pages
            views["context"][row], views["lengths"][row] = prefill.stop, length
            views["starts"][row] = start
            first = start - self.key.rows
            ids[first : first + length] = prefill.token_ids
            start += length
            if prefill.samples:
                sampled.append(start - 1)
        views["starts"][self.key.rows + len(step.prefills) :] = start
        views["sampled"][: len(sampled)] = sampled
        return vector

    def unpack(self, vector: jax.Array) -> StepInputs:
        """The inputs that `vector` holds, positions and write addresses worked out."""
        raw = {name: vector[place].reshape(shape) for name, (place, shape) in self.fields.items()}
        batch = RaggedBatch(raw["tables"], raw["context"], raw["starts"], raw["lengths"])
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
        return StepInputs(
            slots=raw["slots"],
            prefill_ids=raw["prefill_ids"],
            positions=position,
            sampled=raw["sampled"],
            addresses=Addresses(jnp.where(real, page, 0), position % self.page_size, batch),
        )
