"""Compressed KV of the sequences of an engine: their bases and outliers, which the host finds, and
whose values are on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.core.model_config import LayerKind
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.counters import RecallCounts
from jaxserve.runtime.planning.shadow import CHUNK, ShadowSizes
from jaxserve.runtime.programs.device_state import filled
from jaxserve.runtime.programs.host_kv.shadow_programs import (
    AttendRecalled,
    Choose,
    Fill,
    LayerOfStep,
    Project,
    SetSequence,
    Survey,
    shadow_layer,
)
from jaxserve.runtime.programs.host_kv.shadow_step import NO_CHUNK, Decodes, ShadowLayer
from jaxserve.runtime.programs.host_kv.step import Partial
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan
from jaxserve.runtime.programs.program_kind import ProgramKind, padded
from jaxserve.runtime.programs.shapes.program import ProgramShapes


@dataclasses.dataclass
class _Compressed:
    """Host pages of a sequence that are compressed, and how many its basis is of."""

    pages: int
    of_basis: int


class Shadow:
    """The compressed KV of all sequences, by their slots."""

    def __init__(self, shapes: ProgramShapes, store: Any, partial: Any) -> None:
        """`store()` has the host's pages."""
        self._shapes, self._store = shapes, store
        self._survey, self._project = Survey(shapes), Project(shapes)
        self._set, self._fill = SetSequence(shapes), Fill(shapes)
        self._choose, self._attend = Choose(shapes, partial), AttendRecalled(shapes, partial)
        self._layers: list[ShadowLayer] = []
        self._compressed: dict[int, _Compressed] = {}
        sizes = self.sizes
        shape = len(self._kinds_of_layers), shapes.trash_slot, sizes.kv_heads, sizes.recalled
        self._held = np.full(shape, NO_CHUNK, np.int32)
        self.counts = RecallCounts(sizes.chunk_bytes)

    @property
    def sizes(self) -> ShadowSizes:
        return self._shapes.shadow

    @property
    def kinds(self) -> tuple[ProgramKind[Any], ...]:
        return self._survey, self._project, self._set, self._fill, self._choose, self._attend

    @property
    def _kinds_of_layers(self) -> tuple[LayerKind, ...]:
        return self._shapes.local_model.layer_kinds

    def allocate(self) -> None:
        """Takes the memory, which nothing is in yet."""
        shapes = shadow_layer(self._shapes)
        self._layers = [
            ShadowLayer(*(filled(shape, 0) for shape in shapes)) for _ in self._kinds_of_layers
        ]
        self._compressed.clear()

    def free(self) -> None:
        for array in jax.tree.leaves(self._layers):
            array.delete()
        self._layers = []

    def begin_step(self, key: ProgramKey, step: FrozenPlan) -> Decodes | None:
        """The decodes whose older pages are compressed, once they are; None without any. A prompt
        is attended to exactly, and makes what was in its slot invalid."""
        for prefill in step.prefills:
            self._compressed.pop(prefill.slot, None)
        shape = key.rows, self._shapes.max_pages
        decodes = Decodes(
            padded(step.slots, key.rows, self._shapes.trash_slot),
            np.full(shape, self._shapes.num_host_pages, np.int32),
            np.zeros(key.rows, np.int32),
        )
        for row, (slot, pages) in enumerate(zip(step.slots, step.pages_on_host(0))):
            if pages:
                self._compress(slot, pages)
                decodes.tables[row, : len(pages)] = pages
                decodes.counts[row] = len(pages)
        return decodes if decodes.counts.any() else None

    def _compress(self, slot: int, pages: Sequence[int]) -> None:
        """Compresses the host pages of a sequence that are not yet. Its first ones are of its
        prompt; when they have doubled since, it gets another basis and other outliers."""
        known = self._compressed.get(slot)
        if known is None or len(pages) >= 2 * known.of_basis:
            for layer in range(len(self._layers)):
                self._begin(layer, slot, pages)
            self._compressed[slot] = _Compressed(len(pages), len(pages))
            return
        if len(pages) > known.pages:
            for layer, kind in enumerate(self._kinds_of_layers):
                gram = self._no_gram()
                for group in self._groups(layer, pages, known.pages):
                    gram, _ = self._look(layer, kind, gram, group)
                    self._write_low(layer, kind, slot, group)
            known.pages = len(pages)

    def _begin(self, layer: int, slot: int, pages: Sequence[int]) -> None:
        """Finds a sequence's basis and outliers in a layer, and writes all that is kept there."""
        sizes, kind = self.sizes, self._kinds_of_layers[layer]
        gram, cosines = self._no_gram(), []
        for group in self._groups(layer, pages, 0):
            gram, least = self._look(layer, kind, gram, group)
            cosines.append(np.asarray(least)[: group.count])
        _, vectors = np.linalg.eigh(np.asarray(gram, np.float64))
        basis = vectors[:, ::-1][:, : sizes.rank]  # The largest eigenvalues come last.
        least = np.concatenate(cosines).reshape(-1)
        chunks = np.sort(np.argsort(least, kind="stable")[: sizes.outliers])
        outliers = np.full(sizes.outliers, NO_CHUNK, np.int32)
        outliers[: len(chunks)] = chunks
        own, dtype = self._layers[layer], self._shapes.dtype
        shape = sizes.kv_heads, sizes.outliers * CHUNK, sizes.head_dim
        keys, values = np.zeros(shape, dtype), np.zeros(shape, dtype)
        for place, chunk in enumerate(chunks):
            page, part = divmod(int(chunk), sizes.page_chunks)
            k, v = self._store().page(layer, pages[page])
            tokens = slice(part * CHUNK, (part + 1) * CHUNK)
            at = slice(place * CHUNK, (place + 1) * CHUNK)
            keys[:, at], values[:, at] = k[:, :, tokens].swapaxes(1, 2), v[:, tokens]
        basis = basis.reshape(sizes.kv_heads, sizes.head_dim, sizes.rank).astype(dtype)
        written = self._set.call(
            0,
            *(own.bases, own.outlier_keys, own.outlier_values, own.outliers),
            np.int32(slot),
            *(basis, keys, values, outliers),
        )
        names = "bases", "outlier_keys", "outlier_values", "outliers"
        self._layers[layer] = own._replace(**dict(zip(names, written)))
        for group in self._groups(layer, pages, 0):
            self._write_low(layer, kind, slot, group)
        self._held[layer, slot] = NO_CHUNK

    def attend(
        self, key: ProgramKey, layer: int, partial: Partial, step: FrozenPlan, decodes: Decodes
    ) -> Partial:
        """Merges the attention of decodes to their compressed pages into `partial`."""
        own, kind = self._layers[layer], self._kinds_of_layers[layer]
        chosen = np.asarray(self._choose.call(key, partial, own.landmarks, own.outliers, decodes))
        held = np.full_like(chosen, NO_CHUNK)
        places: list[tuple[int, int, int]] = []
        chunks: list[np.ndarray] = []
        for row, slot in enumerate(step.slots):
            if decodes.counts[row]:
                for head in range(self.sizes.kv_heads):
                    there, new = self._recall(self._held[layer, slot, head], chosen[row, head])
                    held[row, head] = there
                    for place in new:
                        places.append((slot, head, place))
                        pages = decodes.tables[row]
                        chunks.append(self._values(layer, pages, head, int(there[place])))
                self._held[layer, slot] = held[row]
        values = own.values
        for first in range(0, len(places), self._fill.count):
            some = places[first : first + self._fill.count]
            at = np.full((self._fill.count, 3), (self._shapes.trash_slot, 0, 0), np.int32)
            at[: len(some)] = some
            staged = np.zeros((len(at), CHUNK, self.sizes.head_dim), values.dtype)
            staged[: len(some)] = chunks[first : first + len(some)]
            values = self._fill.call(0, values, at, staged)
        self.counts.attended += int((held != NO_CHUNK).sum())
        self.counts.copied += len(places)
        self._layers[layer] = own = own._replace(values=values)
        return self._attend.call(LayerOfStep(key, kind), partial, own, decodes, held)

    @staticmethod
    def _recall(held: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Which chunk is in each place of a head: those that are held already stay where they are.
        Also the places that get another."""
        stays = np.isin(held, chosen) & (held != NO_CHUNK)
        there = np.where(stays, held, NO_CHUNK)
        new = chosen[(chosen != NO_CHUNK) & ~np.isin(chosen, there)]
        places = np.flatnonzero(~stays)[: len(new)]
        there[places] = new
        return there, places.tolist()

    def _values(self, layer: int, pages: np.ndarray, head: int, chunk: int) -> np.ndarray:
        page, part = divmod(chunk, self.sizes.page_chunks)
        _, values = self._store().page(layer, int(pages[page]))
        return values[head, part * CHUNK : (part + 1) * CHUNK]

    def _no_gram(self) -> jax.Array:
        gram, *_ = self._survey.uploads(self._kinds_of_layers[0])
        return filled(gram, 0)

    def _groups(self, layer: int, pages: Sequence[int], first: int) -> Iterator[_Group]:
        """The host pages of a sequence from index `first` on, in groups on the device."""
        size = self._shapes.host_group_pages
        for start in range(first, len(pages), size):
            some = pages[start : start + size]
            index = padded(range(start, start + len(some)), size, 0)
            targets = padded(some, size, self._shapes.num_host_pages)
            yield _Group(len(some), self._store().read(layer, some), index, targets)

    def _look(self, layer: int, kind: LayerKind, gram: Any, group: _Group) -> tuple[Any, Any]:
        own = self._layers[layer]
        gram, landmarks, least = self._survey.call(
            kind, gram, own.landmarks, group.staged, group.index, group.targets
        )
        self._layers[layer] = own._replace(landmarks=landmarks)
        return gram, least

    def _write_low(self, layer: int, kind: LayerKind, slot: int, group: _Group) -> None:
        own = self._layers[layer]
        low = self._project.call(
            kind, own.low, own.bases, np.int32(slot), group.staged, group.index, group.targets
        )
        self._layers[layer] = own._replace(low=low)


class _Group(NamedTuple):
    """Host pages on the device, how many they are, their places in the sequence, and their ids."""

    count: int
    staged: jax.Array
    index: np.ndarray
    targets: np.ndarray
