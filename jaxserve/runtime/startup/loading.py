"""Loads a model's weights to where its placement says."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from jaxserve.core.version import __version__
from jaxserve.models.family import AnySpec, Params, Rearranged, Stacked
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.drafters.medusa import MedusaCheckpoint
from jaxserve.models.loading.params import Progress, load_params, params_bytes
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.weights.layer_layout import LayerLayout
from jaxserve.runtime.weights.placement import WINDOW
from jaxserve.runtime.weights.source import ResidentWeights, WeightSource
from jaxserve.runtime.weights.stores import HostLayerStore, LayerFile
from jaxserve.runtime.weights.streamed import StreamedWeights


def load_weights(checkpoint: Checkpoint, shapes: ProgramShapes, progress: Progress) -> WeightSource:
    """The weights of `checkpoint` as programs of these shapes take them.

    `progress(loaded_bytes, total_bytes)` is called as they load. Raises as `load_params`, and
    WeightsError when the host has no memory for streamed layers, or their file cannot be written.
    """
    if not shapes.placement.streamed:
        params = load_params(
            checkpoint,
            shapes.specs,
            dtype=shapes.config.dtype,
            shardings=shapes.params.shardings,
            progress=progress,
        )
        return ResidentWeights(params)
    # Opened for this alone: the pages of its files that were read leave memory with it.
    config = shapes.config
    own = open_checkpoint(checkpoint.path, config.load_format, seed=config.seed)
    return _Loading(own, shapes, progress).load()


def load_draft_params(
    checkpoint: Checkpoint | MedusaCheckpoint | None, shapes: ProgramShapes, progress: Progress
) -> Params | None:
    """The parameters of a draft model or of heads; None without either.

    `progress` and errors are those of `load_params`.
    """
    if checkpoint is None or shapes.draft_params.specs is None:
        return None
    return load_params(
        checkpoint,
        shapes.draft_params.specs,
        dtype=shapes.config.dtype,
        shardings=shapes.draft_params.shardings,
        progress=progress,
    )


def layer_file(checkpoint: Checkpoint, shapes: ProgramShapes) -> LayerFile:
    """The file that the layers are streamed from with `weights_on="disk"`. Its name tells apart all
    that determines its bytes."""
    specs, layouts = jax.tree.map(_described, shapes.specs["layers"]), _layouts(shapes)
    contents = [layout.content for layout in layouts]
    parts = (__version__, checkpoint.fingerprint, shapes.config.dtype, specs, contents)
    return LayerFile.of(repr(parts), layouts)


def _layouts(shapes: ProgramShapes) -> list[LayerLayout]:
    return [LayerLayout(params) for params in shapes.params.abstract["layers"]]


def _described(spec: AnySpec) -> str:
    """Text that tells apart the values of two parameters from one checkpoint."""
    match spec:
        case Stacked():
            return repr([*map(_described, spec.specs)])
        case Rearranged():
            rows = spec.rows
            return repr((spec.source, spec.first, rows.shape, rows.astype(np.int64).tobytes()))
    return repr(spec)


def _apart(params: Params) -> Params:
    """The same arrays, none of which is a view of the checkpoint's files, as on CPUs it may be: it
    would keep all that was read of these in memory."""

    def copied(array: jax.Array) -> jax.Array:
        if next(iter(array.devices())).platform != "cpu":
            return array
        return jax.device_put(array, array.sharding, may_alias=False)

    return jax.block_until_ready(jax.tree.map(copied, params))


class _Loading:
    """Loads the layers one by one, so that the devices never hold more than one beside what stays
    there."""

    def __init__(self, checkpoint: Checkpoint, shapes: ProgramShapes, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._shapes = shapes
        self._progress = progress
        self._dtype = np.dtype(shapes.dtype)
        self._total_bytes = params_bytes(shapes.specs, self._dtype)
        self._loaded_bytes = 0

    def load(self) -> StreamedWeights:
        placement = self._shapes.placement
        names = [name for name in self._shapes.specs if name != "layers"]
        specs, places = self._shapes.specs, self._shapes.params.shardings
        outside = {name: _apart(self._params(specs[name], places[name])) for name in names}
        if placement.tier == "disk":
            file = layer_file(self._checkpoint, self._shapes)
            if not file.complete:
                file.write(params for _, params in self._layers())
            store = file.open(WINDOW)
            count = len(placement.layer_bytes)
            others = sorted({*range(count)}.difference(placement.streamed))
            staying = {layer: store.load_to_stay(layer) for layer in others}
        else:
            store, staying = HostLayerStore(_layouts(self._shapes)), {}
            for layer, params in self._layers():
                if layer in placement.streamed:
                    store.put(layer, params)
                else:
                    staying[layer] = _apart(params)
        self._progress(self._total_bytes, self._total_bytes)
        return StreamedWeights(outside, staying, placement.streamed, store, placement.tier)

    def _layers(self) -> Iterator[tuple[int, Params]]:
        specs, shardings = self._shapes.specs["layers"], self._shapes.params.shardings["layers"]
        for layer, (spec, sharding) in enumerate(zip(specs, shardings, strict=True)):
            yield layer, self._params(spec, sharding)

    def _params(self, specs: Params, shardings: Params) -> Params:
        before = self._loaded_bytes
        params = load_params(
            self._checkpoint,
            specs,
            dtype=self._shapes.config.dtype,
            shardings=shardings,
            progress=lambda loaded, _: self._progress(before + loaded, self._total_bytes),
        )
        self._loaded_bytes += params_bytes(specs, self._dtype)
        return params
