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

from jaxserve.engine.plan import StepPlan
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


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Sizes of one program's metadata. A row is a decode or a prefill chunk, decodes first."""

    key: ProgramKey
    max_chunks: int
    max_pages: int
    page_size: int
    sample_rows: int
    trash_slot: int

    @property
    def chunks(self) -> int:
        """Prefill chunks the program has room for."""
        return self.max_chunks if self.key.prefill_tokens else 0

    @property
    def rows(self) -> int:
        return self.key.rows + self.chunks

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

    def pack(self, plan: StepPlan) -> np.ndarray:
        """The vector for `plan`, whose pages are read now: call before the next `schedule`."""
        vector = np.zeros(self.size, np.int32)
        views = {name: vector[place].reshape(shape) for name, (place, shape) in self.fields.items()}
        tables, num_decodes = views["tables"], len(plan.decodes)
        for row, chunk in enumerate(plan.decodes):
            pages = chunk.seq.pages
            tables[row, : len(pages)] = pages
        views["context"][:num_decodes] = [chunk.start + 1 for chunk in plan.decodes]
        views["starts"][: self.key.rows] = np.arange(self.key.rows)
        views["lengths"][: self.key.rows] = 1
        views["slots"][:] = self.trash_slot
        views["slots"][:num_decodes] = [chunk.slot for chunk in plan.decodes]
        sampled = list(range(num_decodes))

        start, ids = self.key.rows, views["prefill_ids"]
        for row, chunk in enumerate(plan.prefills, self.key.rows):
            stop = chunk.start + chunk.num_tokens
            pages = chunk.seq.pages
            tables[row, : len(pages)] = pages
            views["context"][row], views["lengths"][row] = stop, chunk.num_tokens
            views["starts"][row] = start
            first = start - self.key.rows
            ids[first : first + chunk.num_tokens] = chunk.seq.token_ids(chunk.start, stop)
            start += chunk.num_tokens
            if chunk.samples:
                sampled.append(start - 1)
        views["starts"][self.key.rows + len(plan.prefills) :] = start
        views["sampled"][: len(sampled)] = sampled
        return vector

    def unpack(self, vector: jax.Array) -> StepInputs:
        """The inputs that `vector` holds, positions and write addresses worked out."""
        raw = {name: vector[place].reshape(shape) for name, (place, shape) in self.fields.items()}
        batch = RaggedBatch(raw["tables"], raw["context"], raw["starts"], raw["lengths"])
        token = jnp.arange(self.key.num_tokens)
        if self.chunks:
            ends = batch.starts + batch.lengths
            row = jnp.sum(token[:, None] >= ends[None, :], axis=1)
            row = jnp.minimum(row, self.rows - 1)
        else:
            row = token
        position = (batch.context - batch.lengths - batch.starts)[row] + token
        real = (position >= 0) & (position < batch.context[row])
        position = jnp.where(real, position, 0)
        page = batch.tables[row, position // self.page_size]
        return StepInputs(
            slots=raw["slots"],
            prefill_ids=raw["prefill_ids"],
            positions=position,
            sampled=raw["sampled"],
            addresses=Addresses(jnp.where(real, page, 0), position % self.page_size, batch),
        )
