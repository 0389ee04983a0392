"""Metadata of one step: the host packs a plan into one int32 vector, the program unpacks it.

The layout of the vector is fixed by the program's key and defined once, in `StepLayout.fields`;
`pack` fills it on the host and `unpack` slices it on the device.

Page tables stay on the device, int32 [slots + 1, max_pages] for each KV group, one below the other:
one row per slot and one for padding. A step uploads the entries of its rows that changed since
their last step, and `unpack` applies them first. Larger changes, such as a sequence admitted with a
long prompt, are written as whole rows by a separate program before the step (`SetTables`).
Programs run in dispatch order, so a table and its slot can be reassigned to another sequence as
soon as a step is packed. In a pipeline each stage has its own tables and applies a step's changes
when that step reaches it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.kv.layout import KVLayout
from jaxserve.kv.pages import TRASH_PAGE
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan, table_updates
from jaxserve.runtime.programs.layout.step_inputs import (
    DecodeRows,
    SlotMapping,
    StepInputs,
    VisibleTrees,
)
from jaxserve.sampling.speculation import SpeculationState
from jaxserve.sampling.trees import Trees, trees_of
from pallas_kernels.paged_attention import DecodeGroups, Paths, RaggedBatch


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Sizes of one program's metadata. A row is a decode or a prefill chunk, decodes first.

    With speculation the device knows the lengths of sequences: the uploaded `context` of a decode
    is the position after the last that it may write, and `lengths` its number of tokens. Each of
    these attends like a decode of its own.
    """

    key: ProgramKey
    max_seqs: int
    max_pages: int
    kv: KVLayout
    seq: int = 1
    """Context-parallel ranks: each holds `page_size / seq` tokens of each page."""
    ring_pages: int = 0
    """Maximum pages of a chunk's context under ring attention."""
    ring_scheme: str = "pass_kv"
    max_width: int = 1
    """Most tokens of a decode in any program."""
    max_prefill_tokens: int = 0
    """Most prefill tokens of any program."""
    tree_depth: int = 0
    """Most drafts on a path of a decode's tree; 0 where each follows the one before."""
    tile: int | None = None
    """Tokens per tile with `batch_invariant` (tiles.py); None for no tiling."""
    lora: bool = False
    """Whether rows have LoRA adapters."""
    host_kv: bool = False
    """Whether the first pages of rows may be on the host."""
    shares_prefixes: bool = False
    """Whether decodes may read pages that they share together, in the first KV group."""
    num_slots: int | None = None
    """Slots of sequences; as many as `max_seqs`, which a step may have, unless others run beside
    it."""
    in_halves: bool = False
    """Whether layers compute the tokens in two halves (dual_batch.py)."""

    @property
    def page_size(self) -> int:
        return self.kv.page_size

    @property
    def num_tokens(self) -> int:
        """Tokens that the program computes: the key's, rounded up to whole tiles."""
        return self.key.num_tokens + (-self.key.num_tokens % self.tile if self.tile else 0)

    @property
    def chunks(self) -> int:
        """Prefill chunks the program has room for: at most one per prefill token and one per
        sequence; one with ring attention."""
        return 1 if self.key.ring else min(self.max_seqs, self.key.prefill_tokens)

    @property
    def rows(self) -> int:
        return self.key.rows + self.chunks

    @property
    def num_decode_groups(self) -> int:
        """Groups of decodes that the program has room for."""
        return self.key.rows // 2 if self.shares_prefixes else 0

    @property
    def sample_rows(self) -> int:
        """Rows that can be sampled from: one per sequence."""
        return min(self.rows, self.max_seqs)

    @property
    def sample_width(self) -> int:
        """Hidden states that every program passes to sampling, padding included."""
        most = self.max_seqs * self.max_width
        return most + (-most % self.tile if self.tile else 0)

    @property
    def trash_slot(self) -> int:
        """The row of per-sequence device state that padding uses; real slots come before it."""
        return self.max_seqs if self.num_slots is None else self.num_slots

    @functools.cached_property
    def fields(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Slice of the vector and shape of each field, by name."""
        updates = table_updates(self.key.rows, self.chunks, self.key.prefill_tokens, self.page_size)
        shapes = {
            "updates": (len(self.kv.groups) * updates, 3),
            "context": (self.rows,),
            "starts": (self.rows,),
            "lengths": (self.rows,),
            "slots": (self.rows,),
            "prefill_ids": (self.key.prefill_tokens,),
            "sampled": (self.sample_rows, self.key.width),
            **({"adapters": (self.rows,)} if self.lora else {}),
            **({"since": (self.rows,)} if self.host_kv else {}),
            **({"decode_groups": (self.num_decode_groups, 3)} if self.num_decode_groups else {}),
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
        starts = np.arange(self.rows) * self.key.width
        views["starts"][:] = np.minimum(starts, self.key.decode_tokens)
        views["lengths"][: self.key.rows] = 1
        views["slots"][:] = self.trash_slot
        if self.num_decode_groups:
            views["decode_groups"][:, 0] = self.key.decode_tokens
        return vector

    def _views(self, vector: Any) -> dict[str, Any]:
        return {name: vector[place].reshape(shape) for name, (place, shape) in self.fields.items()}

    def pack(self, step: FrozenPlan) -> np.ndarray:
        """The vector for `step`."""
        vector = self._padding.copy()
        views = self._views(vector)
        if step.updates:
            views["updates"][: len(step.updates)] = step.updates
        num_decodes = len(step.slots)
        views["context"][:num_decodes] = step.stops
        views["slots"][:num_decodes] = step.slots
        views["lengths"][:num_decodes] = step.counts
        if self.lora:
            adapters = [prefill.adapter for prefill in step.prefills]
            views["adapters"][:num_decodes] = step.adapters
            views["adapters"][self.key.rows : self.key.rows + len(adapters)] = adapters
        if self.host_kv:
            for row, pages in self.rows_on_host(step):
                views["since"][row] = len(pages) * self.page_size
        if step.decode_groups:
            width = self.key.width
            groups = np.array(step.decode_groups) * (width, width, 1)
            views["decode_groups"][: len(groups)] = groups
        places = np.arange(self.key.width)
        decodes = np.arange(num_decodes)[:, None] * self.key.width + places
        views["sampled"][:num_decodes] = decodes

        num_sampled = num_decodes
        start, ids = self.key.decode_tokens, views["prefill_ids"]
        for row, prefill in enumerate(step.prefills, self.key.rows):
            length = len(prefill.token_ids)
            views["context"][row], views["lengths"][row] = prefill.stop, length
            views["starts"][row], views["slots"][row] = start, prefill.slot
            first = start - self.key.decode_tokens
            ids[first : first + length] = prefill.token_ids
            start += length
            if prefill.samples:
                views["sampled"][num_sampled] = start - 1
                num_sampled += 1
        views["starts"][self.key.rows + len(step.prefills) :] = start
        return vector

    def places(self, step: FrozenPlan) -> tuple[np.ndarray, np.ndarray]:
        """The first token of each row, and their numbers, int32 [rows] each."""
        views = self._views(self.pack(step))
        return views["starts"], views["lengths"]

    def rows_on_host(
        self, step: FrozenPlan, group: int = 0
    ) -> Iterator[tuple[int, SequenceOf[int]]]:
        """The rows of `step` whose first pages are on the host, with those of a KV group without a
        window, of which all have as many."""
        num_decodes = len(step.slots)
        for place, pages in enumerate(step.pages_on_host(group)):
            if pages:
                row = place if place < num_decodes else self.key.rows + place - num_decodes
                yield row, pages

    def unpack(
        self, tables: jax.Array, vector: jax.Array, speculation: SpeculationState | None = None
    ) -> tuple[jax.Array, StepInputs]:
        """`tables` int32 [groups * (slots + 1), max_pages] with the changes of `vector`, and its
        inputs, with positions and slot mappings computed."""
        raw = self._views(vector)
        tables = _updated(tables, raw)
        slots = raw["slots"][: self.key.rows]
        if speculation is None:
            return tables, self._inputs(tables, raw, slots)
        first = speculation.lengths[slots] - 1
        inputs = self._inputs(tables, self._by_token(raw, first), slots)
        if self.tree_depth:
            parents = speculation.parents[slots, : self.key.width - 1]
            trees = trees_of(parents, self.tree_depth)
            inputs = self._as_trees(tables, raw, first, trees, inputs)
        return tables, inputs

    def _as_trees(
        self,
        tables: jax.Array,
        raw: dict[str, Any],
        first: jax.Array,
        trees: Trees,
        inputs: StepInputs,
    ) -> StepInputs:
        """`inputs` of decodes that are trees. KV is written in the order of nodes, from the
        positions `first` int32 [decode rows] on, and a token's position is that of its depth."""
        rows, decodes = self.key.rows, self.key.decode_tokens
        room = raw["context"][:rows] - first
        count = jnp.where(first < 0, 0, jnp.clip(room, 0, raw["lengths"][:rows]))
        until = jnp.where(count > 0, first, 0)
        own = {"context": until + count, "lengths": count}
        own = {name: raw[name][:rows] for name in ("starts", "slots")} | own
        depths = jnp.where(count[:, None] > 0, first[:, None] + trees.depths, 0)
        positions = inputs.positions.at[:decodes].set(depths.reshape(-1))
        mask = trees.mask.reshape(decodes, self.key.width)
        mask = jnp.pad(mask, ((0, len(positions) - decodes), (0, 0)))
        mappings = []
        for group, mapping in enumerate(inputs.slot_mappings):
            batch = self._batch(tables, own, group)
            # The first token of a row sees the earliest positions, whatever its place.
            of_tokens = jnp.repeat(batch.tables, self.key.width, axis=0)
            by_token = mapping.batch._replace(
                tables=mapping.batch.tables.at[:decodes].set(of_tokens)
            )
            sees = jnp.where(mapping.page_ids != TRASH_PAGE, positions + 1, 0)
            paths = self._paths(trees, until, mapping)
            if self.tile:
                visible = VisibleTrees(positions, sees, paths, None, None)
            else:
                visible = VisibleTrees(positions, sees, paths, mask, batch)
            mappings.append(mapping._replace(batch=by_token, trees=visible))
        return inputs._replace(positions=positions, slot_mappings=tuple(mappings))

    def _paths(self, trees: Trees, first: jax.Array, mapping: SlotMapping) -> Paths:
        """Where the tokens on the way to each token of decodes are, which are written from the
        positions `first` int32 [decode rows] on; in tiles of all tokens."""
        rows, width, decodes = self.key.rows, self.key.width, self.key.decode_tokens

        def along(slots: jax.Array) -> jax.Array:
            of_rows = slots[:decodes].reshape(rows, 1, width)
            return jnp.take_along_axis(of_rows, trees.paths, axis=2).reshape(decodes, -1)

        first = jnp.repeat(first, width)
        paths = Paths(first, along(mapping.page_ids), along(mapping.offsets))
        if not self.tile:
            return paths
        others = self.num_tokens - decodes
        beyond = jnp.full(others, self.max_pages * self.page_size, jnp.int32)
        page_ids, offsets = (jnp.pad(array, ((0, others), (0, 0))) for array in paths[1:])
        return Paths(jnp.concatenate([first, beyond]), page_ids, offsets)

    def unpack_decodes(self, tables: jax.Array, vector: jax.Array) -> DecodeRows:
        """The decodes of `vector`, a step without prefill, and `tables` with its changes."""
        raw = self._views(vector)
        rows = slice(self.key.rows)
        return DecodeRows(_updated(tables, raw), raw["slots"][rows], raw["context"][rows])

    def decodes_at(self, rows: DecodeRows, positions: jax.Array) -> StepInputs:
        """Inputs of a step that computes `width` tokens of each decode, from `positions` int32
        [rows] on; those before position 0 or beyond what the decode may write are padding."""
        count, empty = self.key.rows, jnp.zeros(0, jnp.int32)
        raw = {
            "context": rows.stops,
            "starts": empty,
            "lengths": jnp.full(count, self.key.width),
            "slots": rows.slots,
            "prefill_ids": empty,
            "sampled": empty,
        }
        raw = {name: jnp.asarray(array, jnp.int32) for name, array in raw.items()}
        return self._inputs(rows.tables, self._by_token(raw, positions), rows.slots)

    def _inputs(self, tables: jax.Array, raw: dict[str, Any], slots: jax.Array) -> StepInputs:
        batches = [self._batch(tables, raw, group) for group in range(len(self.kv.groups))]
        batch = batches[0]
        token = jnp.arange(self.num_tokens)
        if self.chunks:
            ends = batch.starts + batch.lengths
            row = jnp.sum(token[:, None] >= ends[None, :], axis=1)
            row = jnp.minimum(row, len(batch.starts) - 1)
        else:
            row = jnp.minimum(token, len(batch.starts) - 1)
        position = (batch.context - batch.lengths - batch.starts)[row] + token
        real = (position >= 0) & (position < batch.context[row]) & (token < self.key.num_tokens)
        position = jnp.where(real, position, 0)
        index, offset = position // self.page_size, position % self.page_size
        return StepInputs(
            slots=slots,
            prefill_ids=raw["prefill_ids"],
            positions=position,
            sampled=raw["sampled"].reshape(-1),
            slot_mappings=tuple(
                SlotMapping(
                    jnp.where(real, batch.tables[row, index], TRASH_PAGE),
                    offset,
                    batch,
                    decode_groups=DecodeGroups(*raw["decode_groups"].T)
                    if "decode_groups" in raw and not group
                    else None,
                )
                for group, batch in enumerate(batches)
            ),
            adapters=raw["adapters"][row] if "adapters" in raw else None,
            since=raw["since"][row] if "since" in raw else None,
            real=real,
        )

    def _batch(self, tables: jax.Array, raw: dict[str, jax.Array], group: int) -> RaggedBatch:
        """The rows of a step, with the pages of one KV group."""
        context, lengths, slots = raw["context"], raw["lengths"], raw["slots"]
        # Beyond its pages a slot's row holds stale entries of longer sequences, and before its
        # window pages that were given back.
        index = jnp.arange(self.max_pages)
        used = index < -(-context // self.page_size)[:, None]
        window = self.kv.groups[group].window
        if window is not None:
            first = jnp.maximum(context - lengths + 1 - window, 0) // self.page_size
            used &= index >= first[:, None]
        if group:
            slots += group * (self.trash_slot + 1)
        return RaggedBatch(
            jnp.where(used, tables[slots], TRASH_PAGE), context, raw["starts"], lengths
        )

    def _by_token(self, raw: dict[str, Any], first: jax.Array) -> dict[str, Any]:
        """The fields of rows, with one row for each token of a decode, whose tokens are at the
        positions from `first` int32 [decode rows] on."""
        rows, width = self.key.rows, self.key.width
        place = jnp.arange(width)
        position = first[:, None] + place
        exists = place < raw["lengths"][:rows, None]
        exists &= (position >= 0) & (position < raw["context"][:rows, None])
        of_decodes = {
            "context": jnp.where(exists, position + 1, 0).reshape(-1),
            "starts": jnp.arange(rows * width),
            "lengths": jnp.ones(rows * width, jnp.int32),
            "slots": jnp.repeat(raw["slots"][:rows], width),
        }
        if "adapters" in raw:
            of_decodes["adapters"] = jnp.repeat(raw["adapters"][:rows], width)
        return raw | {
            name: jnp.concatenate([array, raw[name][rows:]]) for name, array in of_decodes.items()
        }


def _updated(tables: jax.Array, raw: dict[str, jax.Array]) -> jax.Array:
    """`tables` with the changes that a step uploads."""
    row, index, page = raw["updates"].T
    return tables.at[row, index].set(page)
