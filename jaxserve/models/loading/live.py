"""Parameters in arrays, such as a trainer's: checked, and moved to an engine's devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxserve.core.errors import WeightsError
from jaxserve.core.model_config import ModelConfig
from jaxserve.models.family import AnySpec, Params, ParamSpec, TensorPart
from jaxserve.models.loading.assemble import Index, aligned_empty, by_slice, cut
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import param_specs

_NOT_COMPUTED = (
    *("name", "bos_token_id", "eos_token_ids", "pad_token_id", "default_sampling"),
    "num_mtp_layers",
)
"""Fields of a ModelConfig that the forward pass does not read."""


def load_weights(model: str | Path, *, dtype: str = "float32") -> Params:
    """The weights of a checkpoint as the pytree that `LLM.update_weights` takes, on the first
    device: for a trainer to begin with. `model` is as for LLM. Raises ModelError."""
    checkpoint = open_checkpoint(model)
    return load_params(checkpoint, param_specs(checkpoint.config), dtype=dtype)


def check_same_model(config: ModelConfig, served: ModelConfig, where: str) -> None:
    """Raises WeightsError, naming the first field, if a checkpoint's forward pass is not that of
    the served model."""
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(served, field.name), getattr(config, field.name)
        if field.name not in _NOT_COMPUTED and ours != theirs:
            raise WeightsError(
                f"{where} has {field.name} {theirs!r:.80}, and the served model {ours!r:.80}; "
                "give a checkpoint of the same model, or load this one in a new engine."
            )


def check_params(params: Mapping[str, Any], specs: Params, dtype: np.dtype) -> None:
    """Raises WeightsError unless `params` are arrays of the shapes of `specs`, a family's, and of
    `dtype`; it names the first leaf that differs."""
    given, wanted = _by_name(params), _by_name(specs)
    for name, spec in wanted.items():
        if name not in given:
            raise WeightsError(f"{name} is missing; it has shape {list(spec.shape)}.")
        array = given[name]
        if not isinstance(array, jax.Array | np.ndarray):
            raise WeightsError(f"{name} is a {type(array).__name__}; it must be a jax.Array.")
        if isinstance(array, jax.Array) and array.is_deleted():
            raise WeightsError(
                f"{name} was deleted, perhaps donated to a program; give the arrays after that."
            )
        if array.shape != spec.shape:
            raise WeightsError(
                f"{name} has shape {list(array.shape)}; it must be {list(spec.shape)}."
            )
        if array.dtype != (own := spec.dtype or dtype):
            raise WeightsError(
                f"{name} is {array.dtype} and the engine's weights are {own}; convert them, or "
                f"load the engine with that dtype."
            )
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise WeightsError(f"{name} has shards in another process; give whole arrays.")
    if unknown := [name for name in given if name not in wanted]:
        raise WeightsError(f"{unknown[0]} is not a parameter of the model; leave it out.")


def moved(
    params: Mapping[str, Any], stated: Params, specs: Params, shardings: Params
) -> Iterator[jax.Array]:
    """Copies of `params` for the leaves of `specs`, in order, each made when it is asked for.

    `params` have the names of `stated`, the family's specs, in containers of any kind and order;
    `specs` may be partitioned for a mesh (models/partition.py). A slice that is a shard of the
    source goes from device to device, any other one over the host. Nothing is compiled.
    """
    leaves, structure = jax.tree.flatten(specs)
    arrays = _by_name(params)
    sources = {spec.parts: _Source(arrays[name]) for name, spec in _by_name(stated).items()}
    for spec, sharding in zip(leaves, structure.flatten_up_to(shardings), strict=True):
        yield _moved(sources, spec, sharding)


def _moved(
    sources: Mapping[tuple[TensorPart, ...], _Source], spec: AnySpec, sharding: Sharding
) -> jax.Array:
    if isinstance(spec, ParamSpec):
        indices = sharding.addressable_devices_indices_map(spec.shape)
        shards = [sources[spec.parts].copied(*placed) for placed in indices.items()]
        if all(shard is not None for shard in shards):
            return jax.make_array_from_single_device_arrays(spec.shape, sharding, shards)

    def block(index: Index) -> np.ndarray:
        return cut(lambda plain, inside: sources[plain.parts].read(inside), spec, index)

    return by_slice(spec.shape, sharding, block)


class _Source:
    """Slices of an array, from its shards where they lie."""

    def __init__(self, array: jax.Array | np.ndarray) -> None:
        self._shape, self._dtype = array.shape, array.dtype
        self._shards: dict[tuple[tuple[int, int], ...], dict[Any, Any]] = {}
        if isinstance(array, jax.Array):
            for shard in array.addressable_shards:
                self._shards.setdefault(self._bounds(shard.index), {})[shard.device] = shard.data
        else:
            self._shards[tuple((0, size) for size in array.shape)] = {None: array}

    def _bounds(self, index: Index) -> tuple[tuple[int, int], ...]:
        return tuple(part.indices(size)[:2] for part, size in zip(index, self._shape))

    def copied(self, device: jax.Device, index: Index) -> jax.Array | None:
        """A copy on `device` of the shard with this index; None if there is none."""
        copies = self._shards.get(self._bounds(index))
        if copies is None:
            return None
        nearest = copies.get(device, next(iter(copies.values())))
        return jax.device_put(nearest, device, may_alias=False)

    def read(self, index: Index) -> np.ndarray:
        """A copy of the slice on the host."""
        wanted = self._bounds(index)
        out = aligned_empty(tuple(stop - start for start, stop in wanted), self._dtype)
        for bounds, copies in self._shards.items():
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, bounds)]
            if all(start < stop for start, stop in common):
                inside = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, bounds))
                there = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, wanted))
                out[there] = np.asarray(next(iter(copies.values())))[inside]
        return out


def _by_name(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by their paths, such as `layers.3.qkv`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
