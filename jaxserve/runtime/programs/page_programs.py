"""Kinds of programs that move KV pages and change page tables."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.core.steps.plan import ScheduledChunk
from jaxserve.kv.layout import TRANSFER_PAGES, TRANSFER_SIZES, KVLayout
from jaxserve.runtime.hardware.arrays import placed
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan
from jaxserve.runtime.programs.program_kind import (
    PartKind,
    ProgramKind,
    padded,
    partition_specs,
)
from jaxserve.runtime.programs.shapes.program import ProgramShapes, holding
from jaxserve.sampling.speculation import Acceptance, SpeculationState
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.paged_attention import Pages, move_kv
from sharding_rules import SEQ, STAGE, TENSOR

COPY_PAGES = 8
"""Pages per call of the copy program."""
_NO_PAGE = -1
"""Programs skip it."""


def set_tables(stages: int, tables: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """`tables` int32 [groups * (slots + 1), max_pages] with one row replaced: in pipeline stage s,
    row `slots[s]` by `rows[s]`, int32 [stages, max_pages]."""
    stage = lax.axis_index(STAGE) if stages > 1 else 0
    return tables.at[slots[stage]].set(rows[stage])


class SetTables(ProgramKind[int]):
    """Writes whole page tables: those with too many changes for a step's metadata."""

    title = "set-tables"
    pure = set_tables
    reads = replaces = ("tables",)

    def keys(self) -> Iterable[int]:
        return (self.shapes.max_pages,)

    def static(self, key: int) -> tuple[int]:
        return (self.shapes.stages,)

    def uploads(self, key: int) -> tuple[Any, ...]:
        stages = self.shapes.stages
        return self.shapes.int32(stages), self.shapes.int32(stages, key)

    def __call__(self, state: DeviceState, steps: Sequence[FrozenPlan]) -> None:
        """Writes the tables of each stage's step, on that stage."""
        stages, width = self.shapes.stages, self.shapes.max_pages
        for tables in itertools.zip_longest(*(step.tables for step in steps)):
            slots = np.full(stages, self.shapes.trash_slot, np.int32)
            rows = np.zeros((stages, width), np.int32)
            for stage, table in enumerate(tables):
                if table is not None:
                    slots[stage], pages = table
                    rows[stage, : len(pages)] = pages
            self.run(state, width, slots, rows)


def compact(
    layout: KVLayout,
    kv: list[Pages],
    tables: jax.Array,
    speculation: SpeculationState,
    slots: jax.Array,
    acceptance: Acceptance,
) -> list[Pages]:
    """The pages with the accepted tokens of trees at consecutive positions: a step writes the KV of
    a tree in the order of its nodes, and most of them are not.

    The rows of `acceptance` are of the sequences in `slots` int32 [rows], whose lengths count what
    they gained."""
    gained, path = acceptance.num_tokens[:, None], acceptance.path
    first = speculation.lengths[slots][:, None] - gained - 1
    place = jnp.arange(path.shape[1])
    moves = (place < gained) & (path != place)
    num_slots, size = len(speculation.lengths), layout.page_size
    sides = []
    for position in (first + path, first + place):
        position = jnp.where(moves, position, 0)
        page_ids = [
            jnp.take_along_axis(tables[group * num_slots + slots], position // size, axis=1)
            for group in range(len(layout.groups))
        ]
        offsets = jnp.broadcast_to(position % size, (len(page_ids), *position.shape))
        sides.append((jnp.stack(page_ids), offsets))
    (sources, from_offsets), (targets, offsets) = sides
    targets = jnp.where(moves, targets, _NO_PAGE)
    flat = [array.reshape(-1) for array in (sources, from_offsets, targets, offsets)]
    count = layout.layers_per_page
    moved = [move_kv(pages, (flat[0], flat[1]), (flat[2], flat[3])) for pages in kv[:count]]
    return [*moved, *kv[count:]]


class CompactAccepted(ProgramKind[int]):
    """Moves the KV of what trees of drafts gained; none where drafts are no trees."""

    title = "compact"
    pure = compact
    reads = ("kv", "tables", "speculation")
    replaces = ("kv",)

    def keys(self) -> Iterable[int]:
        return self.shapes.buckets.rows if self.shapes.tree_depth else ()

    def static(self, key: int) -> tuple[Any, ...]:
        return (self.shapes.kv_layout,)

    def uploads(self, key: int) -> tuple[Any, ...]:
        int32 = self.shapes.int32
        path = int32(key, 1 + self.shapes.tree_depth)
        return int32(key), Acceptance(int32(key), int32(key), path)

    def __call__(
        self, state: DeviceState, chunks: Sequence[ScheduledChunk], acceptance: Acceptance
    ) -> None:
        """`acceptance` is what `chunks` gained in the step that was verified last."""
        key = holding(self.shapes.buckets.rows, len(chunks))
        slots = padded([chunk.slot for chunk in chunks], key, self.shapes.trash_slot)
        self.run(state, key, slots, acceptance._replace(drafts=None))


class CopyPages(PartKind[int]):
    """Copies pages within the pool: all layers in one program; or, with programs of layers, one
    layer after another, each by the program of the first layer with such pages. A key is the first
    layer of its program."""

    title = "copy"
    pure = copy_pages
    donated = (0,)

    def __init__(self, shapes: ProgramShapes) -> None:
        super().__init__(shapes)
        by_layer, alike = shapes.config.program_scope == "layer", shapes.kv.alike
        self._keys = alike if by_layer else [0]
        self._layers = 1 if by_layer else len(alike)

    def keys(self) -> Iterable[int]:
        return dict.fromkeys(self._keys)

    def uploads(self, key: int) -> tuple[Any, ...]:
        return (self.shapes.int32(COPY_PAGES),) * 2

    def of_state(self, key: int) -> tuple[Any, ...]:
        return (self.shapes.kv.abstract[key : key + self._layers],)

    def output_specs(self, key: int) -> Any:
        return partition_specs(*self.of_state(key))

    def __call__(self, state: DeviceState, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, target) pages; every source is read before a later pair overwrites it."""
        for first in range(0, len(pairs), COPY_PAGES):
            sides = zip(*pairs[first : first + COPY_PAGES])
            pages = [padded(side, COPY_PAGES, _NO_PAGE) for side in sides]
            for layer, key in enumerate(self._keys):
                layers = slice(layer, layer + self._layers)
                state.kv[layers] = self.call(key, state.kv[layers], *pages)


class _TransferKey(NamedTuple):
    pages: int
    layers: int
    first: int = 0

    def __str__(self) -> str:
        own = f"-from-{self.first}" if self.first else ""
        return f"{self.pages}-of-{self.layers}-layers{own}"


class _TransferKind(PartKind[_TransferKey]):
    """A kind that moves pages of all layers, or of one: rare transfers use the programs of a single
    layer, which all layers with such pages share and which are quick to compile."""

    def keys(self) -> Iterable[_TransferKey]:
        keys = [_TransferKey(TRANSFER_PAGES, 1, first) for first in self.shapes.kv.alike]
        if self.shapes.transfers_pages:
            layers = len(self.shapes.kv.abstract)
            keys += [_TransferKey(count, layers) for count in TRANSFER_SIZES]
        return dict.fromkeys(keys)

    @abc.abstractmethod
    def results(self, key: _TransferKey) -> Any:
        """Shapes of its results."""

    def of_state(self, key: _TransferKey) -> tuple[Any, ...]:
        return (self.shapes.kv.abstract[key.first :][: key.layers],)

    def output_specs(self, key: _TransferKey) -> Any:
        return partition_specs(self.results(key))


def _of_all(gather: Callable[..., jax.Array], *arguments: Any) -> jax.Array:
    """What `gather` returns on each device, put together on all of them."""
    return lax.all_gather(gather(*arguments), (STAGE, SEQ, TENSOR), axis=1, tiled=True)


class GatherPages(_TransferKind):
    """Copies pages to a staging array; where several hosts have the devices, all of it to each."""

    title = "gather"
    pure = gather_pages

    def name(self, key: _TransferKey) -> str:
        return super().name(key) + ("-to-all" if self.shapes.across_hosts else "")

    def function(self, key: _TransferKey) -> Callable[..., Any]:
        function = super().function(key)
        return functools.partial(_of_all, function) if self.shapes.across_hosts else function

    def uploads(self, key: _TransferKey) -> tuple[Any, ...]:
        return (self.shapes.int32(key.pages),)

    def results(self, key: _TransferKey) -> Any:
        staging = self.shapes.kv.staging(*key)
        if not self.shapes.across_hosts:
            return staging
        return placed(staging, self.shapes.arrays.sharding())

    def __call__(self, layers: Sequence[Pages], pages: Sequence[int], first: int = 0) -> jax.Array:
        """A staging array [at least pages, elements] of up to TRANSFER_PAGES pages, all layers or
        one, which is like the layer `first`."""
        sizes = (key.pages for key in self.keys() if key.layers == len(layers))
        key = _TransferKey(holding(sizes, len(pages)), len(layers), first)
        return self.call(key, layers, padded(pages, key.pages, _NO_PAGE))


class ScatterPages(_TransferKind):
    """Writes the rows of a staging array to pages."""

    title = "scatter"
    pure = scatter_pages
    donated = (0,)

    def uploads(self, key: _TransferKey) -> tuple[Any, ...]:
        return self.shapes.int32(key.pages), self.shapes.kv.staging(*key)

    def results(self, key: _TransferKey) -> Any:
        (layers,) = self.of_state(key)
        return layers

    def __call__(
        self, layers: list[Pages], pages: Sequence[int], staging: jax.Array, first: int = 0
    ) -> list[Pages]:
        """The layers, all or one like the layer `first`, with the first rows of `staging` in these
        pages."""
        key = _TransferKey(staging.shape[0], len(layers), first)
        return self.call(key, layers, padded(pages, key.pages, _NO_PAGE), staging)
