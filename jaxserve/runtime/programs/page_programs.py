"""Kinds of programs that move KV pages and change page tables."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jaxserve.kv.offload.transfers import MOVE_PAGES, MOVE_SIZES
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.executables import ProgramSpec
from jaxserve.runtime.programs.program_kind import (
    ProgramKind,
    padded,
    partition_specs,
)
from jaxserve.runtime.programs.shapes.program import ProgramShapes, holding
from jaxserve.runtime.programs.step_layout import FrozenPlan, set_tables
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.paged_attention import Pages

COPY_PAGES = 8
"""Pages per call of the copy program."""
_NO_PAGE = -1
"""Programs skip it."""


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


class CopyPages(ProgramKind[int]):
    """Copies pages within the pool: all layers in one program; or, with programs of layers, one
    layer after another, each by the program of the first layer with such pages. A key is the first
    layer of its program."""

    title = "copy"
    pure = copy_pages

    def __init__(self, shapes: ProgramShapes) -> None:
        super().__init__(shapes)
        kv = shapes.kv.abstract
        by_layer = shapes.config.program_scope == "layer"
        self._keys = [kv.index(layer) for layer in kv] if by_layer else [0]
        self._layers = 1 if by_layer else len(kv)

    def keys(self) -> Iterable[int]:
        return dict.fromkeys(self._keys)

    def uploads(self, key: int) -> tuple[Any, ...]:
        return (self.shapes.int32(COPY_PAGES),) * 2

    def spec(self, key: int) -> ProgramSpec:
        layers = self.shapes.kv.abstract[key : key + self._layers]
        return ProgramSpec(
            self.name(key),
            self.function(key),
            (layers, *self.uploads(key)),
            donated=(0,),
            outputs=partition_specs(layers),
        )

    def __call__(self, state: DeviceState, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, target) pages; every source is read before a later pair overwrites it."""
        for first in range(0, len(pairs), COPY_PAGES):
            sides = zip(*pairs[first : first + COPY_PAGES])
            pages = [padded(side, COPY_PAGES, _NO_PAGE) for side in sides]
            for layer, key in enumerate(self._keys):
                layers = slice(layer, layer + self._layers)
                state.kv[layers] = self._executables[key](state.kv[layers], *pages)


class _MoveKey(NamedTuple):
    pages: int
    layers: int

    def __str__(self) -> str:
        return f"{self.pages}-of-{self.layers}-layers"


class _Move(ProgramKind[_MoveKey]):
    """A kind that moves pages of all layers, or of one: rare transfers use the programs of a single
    layer, which all layers share and which are quick to compile."""

    donated: ClassVar[tuple[int, ...]]

    def keys(self) -> Iterable[_MoveKey]:
        keys = [_MoveKey(MOVE_PAGES, 1)]
        if self.shapes.moves_pages:
            layers = len(self.shapes.kv.abstract)
            keys += [_MoveKey(count, layers) for count in MOVE_SIZES]
        return dict.fromkeys(keys)

    @abc.abstractmethod
    def results(self, key: _MoveKey) -> Any:
        """Shapes of its results."""

    def spec(self, key: _MoveKey) -> ProgramSpec:
        layers = self.shapes.abstract_state.kv[: key.layers]
        return ProgramSpec(
            self.name(key),
            self.function(key),
            (layers, *self.uploads(key)),
            donated=self.donated,
            outputs=partition_specs(self.results(key)),
        )


class GatherPages(_Move):
    """Copies pages to a staging array."""

    title = "gather"
    pure = gather_pages
    donated = ()

    def uploads(self, key: _MoveKey) -> tuple[Any, ...]:
        return (self.shapes.int32(key.pages),)

    def results(self, key: _MoveKey) -> Any:
        return self.shapes.kv.staging(*key)

    def __call__(self, layers: Sequence[Pages], pages: Sequence[int]) -> jax.Array:
        """A staging array [at least pages, elements] of up to MOVE_PAGES pages, all layers or
        one."""
        sizes = (key.pages for key in self.keys() if key.layers == len(layers))
        key = _MoveKey(holding(sizes, len(pages)), len(layers))
        return self._executables[key](layers, padded(pages, key.pages, _NO_PAGE))


class ScatterPages(_Move):
    """Writes the rows of a staging array to pages."""

    title = "scatter"
    pure = scatter_pages
    donated = (0,)

    def uploads(self, key: _MoveKey) -> tuple[Any, ...]:
        return self.shapes.int32(key.pages), self.shapes.kv.staging(*key)

    def results(self, key: _MoveKey) -> Any:
        return self.shapes.abstract_state.kv[: key.layers]

    def __call__(
        self, layers: list[Pages], pages: Sequence[int], staging: jax.Array
    ) -> list[Pages]:
        """The layers, all or one, with the first rows of `staging` in these pages."""
        key = _MoveKey(staging.shape[0], len(layers))
        return self._executables[key](layers, padded(pages, key.pages, _NO_PAGE), staging)
