"""Programs of steps that send their queries to the pages on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.runtime.hardware.arrays import placed
from jaxserve.runtime.programs.compilation.executables import ProgramSpec
from jaxserve.runtime.programs.host_kv import step as host_kv_step
from jaxserve.runtime.programs.host_kv.step import OF_HEADS, Partial
from jaxserve.runtime.programs.host_kv.store import HostKVStore
from jaxserve.runtime.programs.program_kind import PartKind, ProgramKind
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from pallas_kernels.paged_attention import RaggedBatch

PartialOf = Callable[[ProgramKey], Partial]
"""Shapes of the partial attention of such a step."""


class AttendByQueries:
    """Attention to pages on the host, computed there."""

    def __init__(
        self, shapes: ProgramShapes, partial: PartialOf, store: Callable[[], HostKVStore]
    ) -> None:
        """`store()` has the host's pages."""
        self._attend = _AttendOnHost(shapes, partial)
        self._merge = _MergeFromHost(shapes, self._attend)
        self._store, self._place = store, shapes.arrays.sharding(*OF_HEADS)
        self._host = shapes.host_kv.host

    @property
    def kinds(self) -> tuple[ProgramKind[Any], ...]:
        return self._attend, self._merge

    def __call__(
        self, key: ProgramKey, array: int, partial: Partial, batch: RaggedBatch, *means: np.ndarray
    ) -> Partial:
        """Merges attention to the host's pages of `batch` into `partial`; with SparF, `means` has
        the mean values of decodes in this layer. The host needs the queries of `partial` alone, and
        does not wait for the rest of it."""
        store = self._store()
        q = jax.device_put(partial.q, self._host)
        results = self._attend.call(key, q, store.on_host(array), batch, *means)
        store.copies.query_bytes += sum(array.nbytes for array in (q, *results))
        return self._merge.call(key, partial, *jax.device_put(results, self._place))


class _Kind(PartKind[ProgramKey]):
    def keys(self) -> Iterable[ProgramKey]:
        return self.shapes.host_kv.by_queries if self.shapes.host_kv.host else ()


class _AttendOnHost(_Kind):
    """Runs on the host's CPU, for the heads of all devices."""

    title = "attend-on-host"
    pure = host_kv_step.attend_on_host

    def __init__(self, shapes: ProgramShapes, partial: PartialOf) -> None:
        super().__init__(shapes)
        self.partial = partial

    def static(self, key: ProgramKey) -> tuple[Any, ...]:
        return self.shapes.model, self.shapes.layouts[key], self.shapes.sparf

    def uploads(self, key: ProgramKey) -> tuple[Any, ...]:
        layout, int32 = self.shapes.layouts[key], self.shapes.int32
        rows = layout.rows
        batch = RaggedBatch(int32(rows, layout.max_pages), int32(rows), int32(rows), int32(rows))
        arrays = self.partial(key).q, self.shapes.host_kv.pages.shapes, batch
        if (sparf := self.shapes.sparf) is not None:
            shape = key.rows, sparf.kv_heads, sparf.head_dim
            arrays = *arrays, jax.ShapeDtypeStruct(shape, np.float32)
        place = SingleDeviceSharding(self.shapes.host_kv.host)
        return jax.tree.map(lambda array: placed(array, place), arrays)

    def spec(self, key: ProgramKey) -> ProgramSpec:
        shapes, host = self.shapes, self.shapes.host_kv.host
        elsewhere = None if shapes.mesh is None and shapes.device == host else host
        return dataclasses.replace(super().spec(key), elsewhere=elsewhere)


class _MergeFromHost(_Kind):
    title = "merge-from-host"
    pure = host_kv_step.merge_from_host

    def output_specs(self, key: ProgramKey) -> Any:
        return OF_HEADS

    def __init__(self, shapes: ProgramShapes, attend: _AttendOnHost) -> None:
        super().__init__(shapes)
        self._attend = attend

    def uploads(self, key: ProgramKey) -> tuple[Any, ...]:
        place = self.shapes.arrays.sharding(*OF_HEADS)
        results = self._attend.spec(key).results()
        return self._attend.partial(key), *(placed(array, place) for array in results)
