"""Programs of compressed KV on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.core.model_config import LayerKind
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.runtime.hardware.arrays import placed
from jaxserve.runtime.planning.shadow import CHUNK
from jaxserve.runtime.programs.host_kv import shadow_step
from jaxserve.runtime.programs.host_kv.shadow_step import Decodes, ShadowLayer
from jaxserve.runtime.programs.program_kind import PartKind
from jaxserve.runtime.programs.shapes.program import ProgramShapes

FILL_CHUNKS = 256
"""Chunks of values that are copied to the device together, at most."""


class _Kind(PartKind[Any]):
    """A kind of program of compressed KV."""

    def __init__(self, shapes: ProgramShapes) -> None:
        super().__init__(shapes)
        self.sizes = shapes.shadow
        self.layer = shadow_layer(shapes)

    @property
    def model(self) -> Any:
        return self.shapes.local_model

    @property
    def page(self) -> Any:
        return self.shapes.kv.pages_of(self.model, 1)

    def array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return placed(jax.ShapeDtypeStruct(shape, dtype), self.shapes.arrays.sharding())


class _GroupKind(_Kind):
    """A kind that takes a group of host pages, of a kind of layer."""

    def keys(self) -> Iterable[LayerKind]:
        return dict.fromkeys(self.model.layer_kinds)

    def name(self, key: LayerKind) -> str:
        return f"{self.title}-{key}"

    def static(self, key: LayerKind) -> tuple[Any, ...]:
        return self.model, key, self.page

    @property
    def group(self) -> tuple[Any, ...]:
        size = self.shapes.host_group_pages
        int32 = self.shapes.int32
        return self.shapes.kv.staging(size, 1), int32(size), int32(size)


class Survey(_GroupKind):
    title = "shadow-landmarks"
    pure = shadow_step.survey
    donated = (0, 1)

    def uploads(self, key: LayerKind) -> tuple[Any, ...]:
        gram = self.array((self.sizes.width,) * 2, np.float32)
        return gram, self.layer.landmarks, *self.group


class Project(_GroupKind):
    title = "shadow-project-keys"
    pure = shadow_step.project
    donated = (0,)

    def uploads(self, key: LayerKind) -> tuple[Any, ...]:
        return self.layer.low, self.layer.bases, self.shapes.int32(), *self.group


class _SingleKind(_Kind):
    def keys(self) -> Iterable[int]:
        return (0,)


class SetSequence(_SingleKind):
    title = "shadow-set-sequence"
    pure = shadow_step.set_sequence
    donated = (0, 1, 2, 3)

    def uploads(self, key: int) -> tuple[Any, ...]:
        layer = self.layer
        arrays = layer.bases, layer.outlier_keys, layer.outlier_values, layer.outliers
        of_one = (self.array(array.shape[1:], array.dtype) for array in arrays)
        return *arrays, self.shapes.int32(), *of_one


class Fill(_SingleKind):
    title = "shadow-write-chunks"
    pure = shadow_step.fill
    donated = (0,)

    @property
    def count(self) -> int:
        return min(FILL_CHUNKS, self.sizes.kv_heads * self.sizes.recalled)

    def uploads(self, key: int) -> tuple[Any, ...]:
        shape = self.count, CHUNK, self.sizes.head_dim
        values = self.layer.values
        return values, self.shapes.int32(self.count, 3), self.array(shape, values.dtype)


class LayerOfStep(NamedTuple):
    """A shape of steps and a kind of layer."""

    step: ProgramKey
    kind: LayerKind


class _StepKind(_Kind):
    """A kind with programs for the steps that have decodes. `partial` gives the shapes of their
    partial attention."""

    def __init__(self, shapes: ProgramShapes, partial: Any) -> None:
        super().__init__(shapes)
        self.partial = partial

    @property
    def _with_decodes(self) -> list[ProgramKey]:
        return [key for key in self.shapes.layouts if key.rows]

    def keys(self) -> Iterable[Any]:
        return self._with_decodes

    def decodes(self, key: ProgramKey) -> Decodes:
        int32 = self.shapes.int32
        return Decodes(int32(key.rows), int32(key.rows, self.shapes.max_pages), int32(key.rows))


class Choose(_StepKind):
    title = "shadow-select-chunks"
    pure = shadow_step.choose

    def static(self, key: ProgramKey) -> tuple[Any, ...]:
        return self.model, self.sizes.page_chunks, self.sizes.recalled

    def uploads(self, key: ProgramKey) -> tuple[Any, ...]:
        layer = self.layer
        return self.partial(key), layer.landmarks, layer.outliers, self.decodes(key)


class AttendRecalled(_StepKind):
    title = "shadow-attend"
    pure = shadow_step.attend_recalled

    def keys(self) -> Iterable[LayerOfStep]:
        kinds = dict.fromkeys(self.model.layer_kinds)
        return [LayerOfStep(key, kind) for key in self._with_decodes for kind in kinds]

    def name(self, key: LayerOfStep) -> str:
        return f"{self.title}-{key.step}-{key.kind}"

    def static(self, key: LayerOfStep) -> tuple[Any, ...]:
        return self.model, key.kind, self.sizes.page_size

    def uploads(self, key: LayerOfStep) -> tuple[Any, ...]:
        sizes, rows = self.sizes, key.step.rows
        held = self.shapes.int32(rows, sizes.kv_heads, sizes.recalled)
        return self.partial(key.step), self.layer, self.decodes(key.step), held


def shadow_layer(shapes: ProgramShapes) -> ShadowLayer:
    """Shapes of what a layer keeps."""
    sizes, slots, pages = shapes.shadow, shapes.trash_slot + 1, shapes.num_host_pages + 1
    heads, dim, tokens = sizes.kv_heads, sizes.head_dim, sizes.outliers * CHUNK
    place = shapes.arrays.sharding()

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, shapes.dtype, sharding=place)

    return ShadowLayer(
        low=array(pages, sizes.page_size, sizes.rank),
        landmarks=array(pages, sizes.page_chunks, heads, dim),
        bases=array(slots, heads, dim, sizes.rank),
        outlier_keys=array(slots, heads, tokens, dim),
        outlier_values=array(slots, heads, tokens, dim),
        outliers=shapes.int32(slots, sizes.outliers),
        values=array(slots, heads, sizes.recalled, CHUNK, dim),
    )
