"""Programs of an engine whose long sequences have their older pages on the host."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.core.model_config import LayerKind
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.kv.layout import TRANSFER_PAGES
from jaxserve.runtime.hardware.arrays import placed
from jaxserve.runtime.planning.memory import KV_WINDOW
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.forward.forward_programs import (
    BY_RANK,
    Embed,
    Entered,
    FinalNorm,
    Hidden,
    LayerByLayer,
)
from jaxserve.runtime.programs.host_kv import step as host_kv_step
from jaxserve.runtime.programs.host_kv.mean_values import MeanValues
from jaxserve.runtime.programs.host_kv.queries import AttendByQueries
from jaxserve.runtime.programs.host_kv.shadow import Shadow
from jaxserve.runtime.programs.host_kv.step import OF_HEADS, Partial
from jaxserve.runtime.programs.host_kv.store import Group, HostKVStore, batch_on_host, groups_of
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan
from jaxserve.runtime.programs.page_programs import GatherPages
from jaxserve.runtime.programs.program_kind import PartKind, ProgramKind, partition_specs
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from pallas_kernels.paged_attention import RaggedBatch


class _Running(NamedTuple):
    """A step on its way through the layers, and what it attends to on the host in each."""

    entered: Entered
    step: FrozenPlan
    groups: list[list[Group]]
    """Those that it copies, by KV group."""
    on_host: list[RaggedBatch | None]
    """Pages that it sends its queries to, by KV group."""
    means: np.ndarray | None
    """With SparF, the mean values of its decodes, by layer."""
    decodes: Any
    """With compressed keys, its decodes."""


class _Key(NamedTuple):
    step: ProgramKey
    kind: LayerKind

    def __str__(self) -> str:
        return f"{self.step}-{self.kind}"


class _PoolKey(NamedTuple):
    step: ProgramKey
    window: int | None

    def __str__(self) -> str:
        return f"{self.step}" if self.window is None else f"{self.step}-window-{self.window}"


class ForwardWithHostKV(LayerByLayer):
    """The model layer by layer, and each layer in parts: up to its attention, over the pages in the
    pool, over pages on the host, and from there on."""

    def __init__(self, shapes: ProgramShapes, gather: GatherPages) -> None:
        self._shapes, self._gather = shapes, gather
        self._first = Embed(shapes)
        self._enter = _EnterLayer(shapes, self._first)
        self._pool = _AttendInPool(shapes, self._enter)
        self._attend = _AttendGroup(shapes, self._pool)
        self._by_queries = AttendByQueries(shapes, self._pool.partial, lambda: self.store)
        self._leave = _LeaveLayer(shapes, self._pool)
        self._last = FinalNorm(shapes, self._first)
        self.means: MeanValues | None = None
        if shapes.sparf is not None:
            page_size = shapes.config.page_size
            self.means = MeanValues(shapes.sparf, page_size, lambda: self.store)
        self.shadow: Shadow | None = None
        if shapes.shadow is not None:
            self.shadow = Shadow(shapes, lambda: self.store, self._pool.partial)

    @property
    def kinds(self) -> tuple[ProgramKind[Any], ...]:
        own = self._first, self._enter, self._pool, self._attend, *self._by_queries.kinds
        own = *own, self._leave, self._last
        return own + (self.shadow.kinds if self.shadow else ())

    @property
    def counters(self) -> dict[str, Any]:
        """Those fields of RuntimeCounters that are counted here."""
        return {
            "host_kv_copies": self.store.copies,
            "recall_counts": self.shadow and self.shadow.counts,
            "sparse_reads": self.means and self.means.reads,
        }

    def allocate(self) -> None:
        """Takes the memory of what stays on the device beside the pool."""
        _ = self.store
        if self.shadow is not None:
            self.shadow.allocate()

    def free(self) -> None:
        """Gives back what `allocate` took on the device."""
        if self.shadow is not None:
            self.shadow.free()

    @functools.cached_property
    def store(self) -> HostKVStore:
        """Allocated at first use."""
        return HostKVStore(self._shapes)

    def finish(self, state: DeviceState, block: Sequence[Entered]) -> list[Hidden]:
        """As LayerByLayer. At most a window of groups is on the device."""
        running = [self._running(step) for step in block]
        window = collections.deque[jax.Array]()
        activations = [step.x for step in block]
        places = self._shapes.kv_layout.places
        for layer, kind in enumerate(self._shapes.local_model.layer_kinds):
            (params,) = state.take_layers(slice(layer, layer + 1), activations[-1])
            for number, step in enumerate(running):
                self._copy_to_host(state, places[layer].array, block[number].to_host)
                x = activations[number]
                activations[number] = self._layer(state, step, layer, kind, params, x, window)
        state.weights.end_step(activations[-1])
        return [
            Hidden(*self._last.run(state, step.key, x, step.sampled))
            for step, x in zip(block, activations)
        ]

    def _running(self, entered: Entered) -> _Running:
        (step,) = entered.steps
        layout = self._shapes.layouts[entered.key]
        host, size = self._shapes.host_kv, self._shapes.host_group_pages
        to_device, to_host = host.rows_to_device(entered.key), host.rows_to_host(entered.key)
        kv_groups = range(self._shapes.kv_layout.num_full)
        groups = [[*groups_of(layout, step, group, size, to_device)] for group in kv_groups]
        on_host = [batch_on_host(layout, step, group, to_host) for group in kv_groups]
        decodes = means = None
        if self.shadow is not None:
            decodes = self.shadow.begin_step(entered.key, step)
        if self.means is not None:
            means = self.means.begin_step(step, entered.key.rows)
        return _Running(entered, step, groups, on_host, means, decodes)

    def _layer(
        self,
        state: DeviceState,
        running: _Running,
        layer: int,
        kind: LayerKind,
        params: Any,
        x: jax.Array,
        window: collections.deque[jax.Array],
    ) -> jax.Array:
        """A layer of one step. Its attention to the pool is dispatched before that on the host, so
        that both go on at once, and are merged at the end."""
        entered, step, groups, on_host, means, decodes = running
        kv_group, array = self._shapes.kv_layout.places[layer]
        slot_mapping = entered.slot_mappings[kv_group]
        own = _Key(entered.key, kind)
        q = self._enter(state, own, array, params, x, entered.shared, slot_mapping)
        in_pool = _PoolKey(own.step, self._shapes.kv_layout.groups[kv_group].window)
        seen = slot_mapping.batch, entered.shared.since
        partial = Partial(q, *self._pool.call(in_pool, state.kv[array], q, *seen))
        if in_pool.window is not None:
            return self._leave.call(own, params, x, entered.shared, partial)
        for group in groups[kv_group]:
            if len(window) == KV_WINDOW:
                window.popleft().block_until_ready()
            staged = self.store.read(array, group.pages)
            partial = self._attend.call(own.step, partial, slot_mapping.batch, staged, group.tables)
            window.append(partial.lse)
            del staged
        if on_host[kv_group] is not None:
            of_layer = () if means is None else (means[layer],)
            partial = self._by_queries(own.step, array, partial, on_host[kv_group], *of_layer)
        if decodes is not None:
            partial = self.shadow.attend(own.step, layer, partial, step, decodes)
        return self._leave.call(own, params, x, entered.shared, partial)

    def to_host(self, state: DeviceState, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages, given as (device, host), once the steps dispatched so far have run."""
        for array in range(len(state.kv)):
            self._copy_to_host(state, array, pairs)

    def _copy_to_host(
        self, state: DeviceState, array: int, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Copies one array of pages; waits for the device."""
        for first in range(0, len(pairs), TRANSFER_PAGES):
            device, host = zip(*pairs[first : first + TRANSFER_PAGES])
            self.store.write(array, host, self._gather([state.kv[array]], device))


class _PartOfLayer(PartKind[_Key]):
    """A kind with one program for each shape of a step and kind of layer, which takes the
    parameters of such a layer first."""

    def keys(self) -> Iterable[_Key]:
        kinds = dict.fromkeys(self.shapes.local_model.layer_kinds)
        return [_Key(key, kind) for key in self.shapes.layouts for kind in kinds]

    def of_state(self, key: _Key) -> tuple[Any, ...]:
        layer = self.shapes.local_model.layer_kinds.index(key.kind)
        return (self.shapes.abstract_state.adapted_params["layers"][layer],)


class _EnterLayer(_PartOfLayer):
    title = "pre-attention"
    pure = host_kv_step.enter_layer
    donated = (1,)

    def __init__(self, shapes: ProgramShapes, first: Embed) -> None:
        super().__init__(shapes)
        self.first = first
        self._queries: dict[ProgramKey, jax.ShapeDtypeStruct] = {}

    def static(self, key: _Key) -> tuple[Any, ...]:
        return self.shapes.family, self.shapes.local_model, key.kind

    def uploads(self, key: _Key) -> tuple[Any, ...]:
        x, shared, (slot_mapping, *_), _ = self.first.results(key.step)
        return x, shared, slot_mapping

    def of_state(self, key: _Key) -> tuple[Any, ...]:
        return *super().of_state(key), self.shapes.kv.abstract[0]

    def output_specs(self, key: _Key) -> Any:
        return partition_specs(self.shapes.kv.abstract[0]), OF_HEADS

    def queries(self, step: ProgramKey) -> jax.ShapeDtypeStruct:
        """The shape of the queries of such a step."""
        if step not in self._queries:
            key = next(key for key in self.keys() if key.step == step)
            _, q = self.spec(key).results()
            self._queries[step] = placed(q, self.shapes.arrays.sharding(*OF_HEADS))
        return self._queries[step]

    def __call__(
        self, state: DeviceState, key: _Key, array: int, params: Any, *uploads: Any
    ) -> jax.Array:
        """The layer's queries; replaces the array of its pages."""
        pages, q = self.call(key, params, state.kv[array], *uploads)
        state.kv[array] = pages
        return q


class _AttendInPool(PartKind[_PoolKey]):
    title = "attend-in-pool"
    pure = host_kv_step.attend_in_pool

    def __init__(self, shapes: ProgramShapes, enter: _EnterLayer) -> None:
        super().__init__(shapes)
        self.enter = enter
        self._results: dict[ProgramKey, Partial] = {}

    def keys(self) -> Iterable[_PoolKey]:
        windows = dict.fromkeys(group.window for group in self.shapes.kv_layout.groups)
        return [_PoolKey(key, window) for key in self.shapes.layouts for window in windows]

    def static(self, key: _PoolKey) -> tuple[Any, ...]:
        return self.shapes.local_model, self.shapes.layouts[key.step], key.window

    def of_state(self, key: _PoolKey) -> tuple[Any, ...]:
        return (self.shapes.kv.abstract[0],)

    def output_specs(self, key: _PoolKey) -> Any:
        return OF_HEADS, OF_HEADS

    def uploads(self, key: _PoolKey) -> tuple[Any, ...]:
        _, shared, (slot_mapping, *_), _ = self.enter.first.results(key.step)
        return self.enter.queries(key.step), slot_mapping.batch, shared.since

    def partial(self, key: ProgramKey) -> Partial:
        """Shapes of the partial attention of such a step."""
        if key not in self._results:
            place = self.shapes.arrays.sharding(*OF_HEADS)
            spec = self.spec(_PoolKey(key, None))
            results = (placed(array, place) for array in spec.results())
            self._results[key] = Partial(self.enter.queries(key), *results)
        return self._results[key]


class _AttendGroup(PartKind[ProgramKey]):
    title = "attend-group"
    pure = host_kv_step.attend_group

    def __init__(self, shapes: ProgramShapes, pool: _AttendInPool) -> None:
        super().__init__(shapes)
        self._pool = pool

    def keys(self) -> Iterable[ProgramKey]:
        return self.shapes.host_kv.by_pages

    def static(self, key: ProgramKey) -> tuple[Any, ...]:
        shapes = self.shapes
        pages = shapes.kv.pages_of(shapes.local_model, 1 + shapes.host_group_pages)
        return shapes.local_model, shapes.layouts[key], pages

    def output_specs(self, key: ProgramKey) -> Any:
        return OF_HEADS

    def uploads(self, key: ProgramKey) -> tuple[Any, ...]:
        shapes, size = self.shapes, self.shapes.host_group_pages
        _, _, (slot_mapping, *_), _ = self._pool.enter.first.results(key)
        tables = shapes.int32(shapes.layouts[key].rows, size + 1)
        return (
            self._pool.partial(key),
            slot_mapping.batch,
            shapes.kv.staging(size, 1),
            tables,
        )


class _LeaveLayer(_PartOfLayer):
    """Returns the activations after the layer, in place of those before it."""

    title = "post-attention"
    pure = host_kv_step.leave_layer
    donated = (1,)

    def __init__(self, shapes: ProgramShapes, pool: _AttendInPool) -> None:
        super().__init__(shapes)
        self._pool = pool

    def output_specs(self, key: _Key) -> Any:
        return BY_RANK

    def static(self, key: _Key) -> tuple[Any, ...]:
        return self.shapes.family, self.shapes.local_model, key.kind

    def uploads(self, key: _Key) -> tuple[Any, ...]:
        x, shared, _ = self._pool.enter.uploads(key)
        return x, shared, self._pool.partial(key.step)
