"""Kinds of programs that run the model over a step: all of it at once, or in parts."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxserve.core.model_config import LayerKind
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.kv.layout import KVPlace
from jaxserve.models.parallel import sequence_parallel
from jaxserve.runtime.hardware.arrays import placed, tree_bytes
from jaxserve.runtime.hardware.devices import collective_rates
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.forward import pipeline_step, step
from jaxserve.runtime.programs.forward.dual_batch import in_halves
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.runtime.programs.program_kind import PartKind, ProgramKind, partition_specs
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.programs.shapes.steps import layer_slices
from sharding_rules import SEQ, STAGE

BY_RANK = P((STAGE, SEQ))
"""Activations between programs are concatenated over ranks along their first dimension, whatever
it is: each program takes them apart as the last one put them together."""


class Hidden(NamedTuple):
    """Hidden states to sample from [sample_width, hidden], of the prefill tokens as
    ProgramShapes.prefill_hidden, and those of all tokens that entered the layers which a drafter
    follows; and how many tokens took each expert, int32 [sparse layers, experts], of one run of
    layers after another."""

    sampled: jax.Array
    of_prefills: jax.Array
    kept: Sequence[jax.Array] = ()
    loads: Sequence[jax.Array] = ()

    @classmethod
    def of(cls, *results: Any) -> Hidden:
        """What a program of the whole model returns."""
        *hidden, loads = results
        return cls(*hidden, () if loads is None else (loads,))


class Entered(NamedTuple):
    """A step that has passed the first part of the model, and what it brings to each layer.
    `to_host`: pages to copy to the host before a layer of it runs, as (device, host)."""

    key: ProgramKey
    steps: Sequence[FrozenPlan]
    x: jax.Array
    shared: Any
    slot_mappings: Any
    sampled: Any
    to_host: Sequence[tuple[int, int]] = ()


class _StepKind(ProgramKind[ProgramKey]):
    """A kind with one program for each shape of a step."""

    def keys(self) -> Iterable[ProgramKey]:
        return self.shapes.layouts

    def static(self, key: ProgramKey) -> tuple[Any, ...]:
        return self.shapes.family, self.shapes.local_model, _layout(self.shapes, key)

    def uploads(self, key: ProgramKey) -> tuple[Any, ...]:
        return (self.shapes.int32(self.shapes.layouts[key].size),)


class Forward(_StepKind):
    """The model as one program."""

    title = "forward"
    reads = ("adapted_params", "kv", "tables", "last_tokens", "speculation")
    replaces = ("kv", "tables")
    outputs = (P(), P(SEQ), BY_RANK, P())
    pure = step.forward

    def function(self, key: ProgramKey) -> Callable[..., Any]:
        function = super().function(key)
        if self.shapes.aux_layers:
            function = functools.partial(function, keep=self.shapes.aux_layers)
        return _between_layers(self.shapes, key, function)

    def __call__(self, state: DeviceState, key: ProgramKey, steps: Sequence[FrozenPlan]) -> Hidden:
        """Hidden states of the only one of `steps`."""
        return Hidden.of(*self.run(state, key, *map(self.shapes.layouts[key].pack, steps)))


class PipelineStep(Forward):
    """The model as one program, each of whose stages works on another step."""

    title = "pipeline-step"
    reads = ("adapted_params", "kv", "tables", "carry", "last_tokens", "speculation")
    replaces = ("kv", "tables", "carry")
    outputs = (P(), P(SEQ, STAGE), BY_RANK, P())
    pure = pipeline_step.pipeline_step

    def uploads(self, key: ProgramKey) -> tuple[Any, ...]:
        return (self.shapes.int32(self.shapes.stages, self.shapes.layouts[key].size),)

    def __call__(self, state: DeviceState, key: ProgramKey, steps: Sequence[FrozenPlan]) -> Hidden:
        """Hidden states of the oldest of `steps`, the newest of which is first."""
        packed = np.stack([*map(self.shapes.layouts[key].pack, steps)])
        return Hidden.of(*self.run(state, key, packed))


class LayerByLayer(abc.ABC):
    """The model as several programs, so that steps may share each layer."""

    _first: Embed

    def __call__(self, state: DeviceState, key: ProgramKey, steps: Sequence[FrozenPlan]) -> Hidden:
        """Hidden states of the oldest of `steps`, the newest of which is first."""
        return self.finish(state, [self.enter(state, key, steps)])[0]

    def enter(self, state: DeviceState, key: ProgramKey, steps: Sequence[FrozenPlan]) -> Entered:
        """Runs the first part. Steps enter in the order of their plans."""
        return Entered(key, steps, *self._first(state, key, steps))

    @abc.abstractmethod
    def finish(self, state: DeviceState, block: Sequence[Entered]) -> list[Hidden]:
        """Hidden states of steps that have entered: each layer runs all of them, in order, before
        the next layer is taken."""


class ForwardByLayer(LayerByLayer):
    """The model as several programs: the first part, groups of layers, the last part."""

    def __init__(self, shapes: ProgramShapes) -> None:
        staged = shapes.stages > 1
        self._first = (_EnterStage if staged else Embed)(shapes)
        self._layers = (_StageLayers if staged else _Layers)(shapes, self._first)
        self._last = (_LeaveStage if staged else FinalNorm)(shapes, self._first)

    @property
    def kinds(self) -> tuple[ProgramKind[Any], ...]:
        return self._first, self._layers, self._last

    def finish(self, state: DeviceState, block: Sequence[Entered]) -> list[Hidden]:
        through = self._layers(state, block)
        return [
            Hidden(*self._last.run(state, step.key, x, step.sampled), kept, loads)
            for step, (x, kept, loads) in zip(block, through)
        ]


class Embed(_StepKind):
    """The first part of the model."""

    title = "embed"
    reads = ("outside_layers", "tables", "last_tokens", "speculation")
    replaces = ("tables",)
    outputs = (BY_RANK, BY_RANK, BY_RANK, BY_RANK)
    pure = step.embed

    def __init__(self, shapes: ProgramShapes) -> None:
        super().__init__(shapes)
        self._results: dict[ProgramKey, Any] = {}
        self._tracing = threading.Lock()

    def __call__(self, state: DeviceState, key: ProgramKey, steps: Sequence[FrozenPlan]) -> Any:
        return self.run(state, key, *map(self.shapes.layouts[key].pack, steps))

    def results(self, key: ProgramKey) -> Any:
        """Shapes of its results, which the other parts take."""
        with self._tracing:  # All parts that take them are lowered at once, in threads.
            if key not in self._results:
                place = self.shapes.arrays.sharding(*BY_RANK)
                results = self.spec(key).results()[len(self.replaces) :]
                self._results[key] = jax.tree.map(lambda array: placed(array, place), results)
            return self._results[key]


class _EnterStage(Embed):
    title = "first-stage"
    reads = ("outside_layers", "tables", "carry", "last_tokens", "speculation")
    pure = pipeline_step.enter_stage
    uploads = PipelineStep.uploads

    def __call__(self, state: DeviceState, key: ProgramKey, steps: Sequence[FrozenPlan]) -> Any:
        return self.run(state, key, np.stack([*map(self.shapes.layouts[key].pack, steps)]))


class _LayersKey(NamedTuple):
    """One program serves every slice of layers of the same kinds, with pages at the same places of
    the arrays that it is given."""

    step: ProgramKey
    kinds: tuple[LayerKind, ...]
    places: tuple[KVPlace, ...]
    keep: tuple[int, ...] = ()
    """The layers whose inputs are kept."""

    def __str__(self) -> str:
        """Number and kind of each run of equal layers; and their places, unless in order."""
        runs = (f"{len(list(run))}x{kind}" for kind, run in itertools.groupby(self.kinds))
        name = f"{self.step}-{'+'.join(runs)}"
        if self.keep:
            name += f"-keep-{'.'.join(map(str, self.keep))}"
        if self.places == tuple(KVPlace(0, array) for array in range(len(self.places))):
            return name
        return f"{name}-at-{'+'.join(f'{group}.{array}' for group, array in self.places)}"


class _Slice(NamedTuple):
    """Consecutive layers, the arrays of pages that they use, and their program."""

    layers: slice
    arrays: tuple[int, ...]
    key: _LayersKey


class _Layers(PartKind[_LayersKey]):
    title = "layers"
    pure = functools.partial(step.layers, apart=True)
    donated = (1, 2)

    def __init__(self, shapes: ProgramShapes, first: Embed) -> None:
        super().__init__(shapes)
        self._first = first
        count, streamed = shapes.local_model.num_layers, bool(shapes.placement.streamed)
        self._slices = {
            key: [
                self._slice(key, layers)
                for layers in layer_slices(shapes.config, key, count, streamed)
            ]
            for key in shapes.layouts
        }

    def _slice(self, key: ProgramKey, layers: slice) -> _Slice:
        places = self.shapes.kv_layout.places[layers]
        arrays = tuple(dict.fromkeys(place.array for place in places))
        own = tuple(KVPlace(place.group, arrays.index(place.array)) for place in places)
        kinds = self.shapes.local_model.layer_kinds[layers]
        aux = self.shapes.aux_layers
        keep = tuple(x - layers.start for x in aux if layers.start <= x < layers.stop)
        return _Slice(layers, arrays, _LayersKey(key, tuple(kinds), own, keep))

    def keys(self) -> Iterable[_LayersKey]:
        return dict.fromkeys(part.key for slices in self._slices.values() for part in slices)

    def static(self, key: _LayersKey) -> tuple[Any, ...]:
        shapes = self.shapes
        return shapes.family, shapes.local_model, _layout(shapes, key.step), key.kinds, key.places

    def function(self, key: _LayersKey) -> Callable[..., Any]:
        function = super().function(key)
        if key.keep:
            function = functools.partial(function, keep=key.keep)
        return _between_layers(self.shapes, key.step, function)

    def uploads(self, key: _LayersKey) -> tuple[Any, ...]:
        return tuple(self._first.results(key.step)[:3])

    def of_state(self, key: _LayersKey) -> tuple[Any, ...]:
        state = self.shapes.abstract_state
        layers, arrays, _ = next(part for part in self._slices[key.step] if part.key == key)
        return state.adapted_params["layers"][layers], [state.kv[array] for array in arrays]

    def output_specs(self, key: _LayersKey) -> Any:
        _, kv = self.of_state(key)
        return partition_specs(kv), BY_RANK, BY_RANK, P()

    def __call__(
        self, state: DeviceState, block: Sequence[Entered]
    ) -> list[tuple[jax.Array, list[jax.Array], list[jax.Array]]]:
        """For each step the result of the last layer, the inputs kept of others, and the tokens of
        experts. A layer's pages make each step wait for the one before it, so the last one is ready
        last."""
        kv, kept, loads = state.kv, [[] for _ in block], [[] for _ in block]
        activations = [entered.x for entered in block]
        for parts in zip(*(self._slices[entered.key] for entered in block), strict=True):
            params = state.take_layers(parts[0].layers, activations[-1])
            for number, (entered, (_, arrays, own)) in enumerate(zip(block, parts)):
                pages, x = [kv[array] for array in arrays], activations[number]
                pages, activations[number], more, load = self.call(
                    own, params, pages, x, entered.shared, entered.slot_mappings
                )
                kept[number] += more
                if load is not None:
                    loads[number].append(load)
                for array, written in zip(arrays, pages):
                    kv[array] = written
        state.weights.end_step(activations[-1])
        return [*zip(activations, kept, loads)]


class _StageLayers(_Layers):
    pure = pipeline_step.stage_layers


class FinalNorm(_StepKind):
    """The last part of the model."""

    title = "final-norm"
    reads = ("outside_layers",)
    outputs = (P(), P(SEQ))
    pure = step.final_norm

    def __init__(self, shapes: ProgramShapes, first: Embed) -> None:
        super().__init__(shapes)
        self._first = first

    def uploads(self, key: ProgramKey) -> tuple[Any, ...]:
        x, _, _, sampled = self._first.results(key)
        return x, sampled


class _LeaveStage(FinalNorm):
    title = "last-stage"
    reads = ("outside_layers", "carry")
    replaces = ("carry",)
    outputs = (P(), P(SEQ, STAGE))
    pure = pipeline_step.leave_stage


def block_bytes(shapes: ProgramShapes) -> int:
    """Bytes on one device of what steps that share the reads of weights bring to each layer, and of
    the hidden states that they leave; 0 where each step runs by itself."""
    count = shapes.config.steps_per_weight_read
    if count == 1:
        return 0
    largest = max(shapes.layouts, key=lambda key: key.num_tokens)
    left = [shapes.sampled_hidden, shapes.prefill_hidden(largest)]
    if moe := shapes.model.moe:
        left.append(shapes.int32(sum(moe.sparse_layers), moe.num_experts))
    return count * tree_bytes((Embed(shapes).results(largest), left))


def _layout(shapes: ProgramShapes, key: ProgramKey) -> StepLayout:
    """The layout of a step, whose layers compute it in two halves where that is faster."""
    return dataclasses.replace(shapes.layouts[key], in_halves=in_halves(shapes, key))


def _between_layers(
    shapes: ProgramShapes, key: ProgramKey, function: Callable[..., Any]
) -> Callable[..., Any]:
    """`function` with sequence parallelism over `tensor`, where configured. Decode-only steps have
    few tokens and keep the all-reduce."""
    own_tokens = key.decode_tokens + key.prefill_tokens // shapes.seq
    if not shapes.config.sequence_parallel or not key.prefill_tokens:
        return function
    if shapes.tensor == 1 or own_tokens % shapes.tensor:
        return function
    return sequence_parallel(collective_rates(shapes.device))(function)
