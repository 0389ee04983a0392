"""Parameters on devices, from any checkpoint."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxserve.core.dtypes import DTYPES
from jaxserve.core.errors import ConfigError
from jaxserve.models.family import AnySpec, Params, ParamSpec, Stacked, planes_of
from jaxserve.models.loading.assemble import Index, TensorSource, assemble, by_slice
from jaxserve.models.loading.checkpoint import Checkpoint, Restorable
from jaxserve.models.loading.packed import assemble_packed
from jaxserve.models.quantization import has_groups_of
from pallas_kernels.quantized_matmul import Format, QuantizedWeight, quantize

Progress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""
# Dequantising and copying release the interpreter lock; each worker holds one parameter at a time.
_WORKERS = 4


def load_params(
    checkpoint: Checkpoint,
    specs: Params,
    *,
    dtype: str,
    shardings: Params | None = None,
    progress: Progress | None = None,
) -> Params:
    """The parameters of `checkpoint` as a pytree of arrays of `dtype`, or QuantizedWeights.

    `specs` are the family's, with formats for parameters to quantize. `shardings` has their
    structure, a Sharding per parameter, or per plane of a split one; without it everything goes to
    the first device. Each process reads only the slices its own devices hold, and the host never
    holds more than a few parameters at a time.
    `progress(loaded_bytes, total_bytes)` is called as they load. Raises ConfigError for an unknown
    dtype or a quantized parameter on several devices that is not split, WeightsError for weights
    that cannot be read.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
    numpy_dtype = np.dtype(jax.numpy.dtype(dtype))
    if shardings is None:
        here = SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda spec: here, specs)
    leaves, structure = jax.tree.flatten(specs)
    for spec, sharding in zip(leaves, structure.flatten_up_to(shardings)):
        if spec.format is None or isinstance(sharding, QuantizedWeight):
            continue
        if len(sharding.device_set) > 1:
            raise ConfigError(
                f"{spec.parts[0].tensor} would be quantized on {len(sharding.device_set)} devices; "
                "leave quantization out, or use one device."
            )
    total_bytes = params_bytes(specs, numpy_dtype)
    if isinstance(checkpoint, Restorable):
        whole = jax.tree.map(lambda spec, sharding: _of_values(sharding), specs, shardings)
        params = checkpoint.restore(specs, numpy_dtype, whole)
        params = jax.tree.map(_quantized_after, specs, params, shardings)
        if progress:
            progress(total_bytes, total_bytes)
        return params

    loaded = []
    loaded_bytes = 0
    with ThreadPoolExecutor(_WORKERS, "load-params") as pool:
        load = functools.partial(_load_param, checkpoint, numpy_dtype)
        for param in pool.map(load, leaves, structure.flatten_up_to(shardings)):
            loaded.append(param)
            loaded_bytes += sum(array.nbytes for array in jax.tree.leaves(param))
            if progress:
                progress(loaded_bytes, total_bytes)
    return structure.unflatten(loaded)


def params_bytes(specs: Params, dtype: np.dtype) -> int:
    """Bytes of all parameters in a model of `dtype`."""
    abstract = jax.tree.map(lambda spec: spec.abstract(dtype), specs)
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(abstract))


def _load_param(
    source: TensorSource, dtype: np.dtype, spec: AnySpec, sharding: Sharding | QuantizedWeight
) -> jax.Array | QuantizedWeight:
    if spec.format is None:
        return _load_array(source, spec.abstract(dtype).dtype, spec, sharding)
    layers = spec.specs if isinstance(spec, Stacked) else (spec,)
    if not all(_is_stored(source, layer) for layer in layers):
        array = _load_array(source, np.dtype(np.float32), spec, _of_values(sharding))
        return _quantized_after(spec, array, sharding)
    if isinstance(sharding, Sharding):
        weight = _stored(source, spec)
        weight = planes_of(weight, spec.rows, spec.orders, lambda plane, to: plane.reshape(to))
        return jax.device_put(weight, sharding)
    # Planes are loaded one after another, and the slices of all of them are read together.
    slices = [_Slices(source, layer) for layer in layers]
    planes, structure = jax.tree.flatten(spec.abstract(dtype))

    def load(place: int, plane: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
        def block(index: Index) -> np.ndarray:
            if not isinstance(spec, Stacked):
                return slices[0].plane(place, plane.shape, index)
            own = slices[index[0]]
            return np.stack([layer.plane(place, plane.shape[1:], index[1:]) for layer in own])

        return by_slice(plane.shape, sharding, block)

    shardings = structure.flatten_up_to(sharding)
    return structure.unflatten(map(load, itertools.count(), planes, shardings))


class _Slices:
    """The slices of a packed parameter that devices of this process have."""

    def __init__(self, source: TensorSource, spec: ParamSpec) -> None:
        self._source, self._spec = source, spec
        self._found: dict[tuple[tuple[int, int], ...], list[np.ndarray]] = {}

    def plane(self, place: int, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """The slice `index` of the plane at `place`, of this shape; that of values, which is the
        first, reads the others with it. A dimension of one entry is of all rows or inputs."""
        scale = self._spec.matrix[1] / shape[-1]
        bounds = [(own.start, own.stop) for own in index]
        bounds[-1] = tuple(round(scale * end) for end in bounds[-1])
        if place == 0 and (key := tuple(bounds)) not in self._found:
            *rows, inputs = (slice(*ends) for ends in bounds)
            weight = assemble_packed(self._source, self._spec, tuple(rows), inputs)
            self._found[key] = jax.tree.leaves(weight)
        return next(
            planes[place]
            for key, planes in self._found.items()
            if all(size == 1 or ends == own for size, ends, own in zip(shape, bounds, key))
        )


def _is_stored(source: TensorSource, spec: ParamSpec) -> bool:
    """Whether the source has the values of a packed parameter just as its format keeps them."""
    formats = (source.stored_format(part.tensor, spec.matrix[1]) for part in spec.parts)
    return all(has_groups_of(format, spec.format) for format in formats)


def _stored(source: TensorSource, spec: ParamSpec) -> QuantizedWeight:
    """A whole packed parameter."""
    rows = tuple(slice(0, size) for size in spec.shape[: -spec.num_inputs])
    return assemble_packed(source, spec, rows, slice(0, spec.matrix[1]))


def _of_values(sharding: Sharding | QuantizedWeight) -> Sharding:
    """The sharding of a parameter before it is packed: its values' dimensions are its own."""
    return sharding.values if isinstance(sharding, QuantizedWeight) else sharding


def _quantized_after(
    spec: AnySpec, array: jax.Array, sharding: Sharding | QuantizedWeight
) -> jax.Array | QuantizedWeight:
    """`array`, quantized if `spec` has a format."""
    if spec.format is None:
        return array
    stages, one = (len(spec.specs), spec.specs[0]) if isinstance(spec, Stacked) else (None, spec)
    return _rounded(stages, one.matrix, one.rows, one.orders, one.format, sharding)(array)


@functools.cache
def _rounded(
    stages: int | None,
    matrix: tuple[int, int],
    rows: tuple[int, ...],
    orders: tuple[int, ...],
    format: Format,
    sharding: Sharding | QuantizedWeight,
) -> Callable[[jax.Array], QuantizedWeight]:
    """One program for all parameters that are held alike, `stages` of them stacked."""

    def rounded(array: jax.Array) -> QuantizedWeight:
        weight = quantize(array.reshape(matrix), format)
        return planes_of(weight, rows, orders, _plane)

    return jax.jit(jax.vmap(rounded) if stages else rounded, out_shardings=sharding)


def _plane(plane: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The plane in this shape; one order as that of every expert."""
    if plane.size == math.prod(shape):
        return plane.reshape(shape)
    return jnp.broadcast_to(plane, shape)


def _load_array(
    source: TensorSource, dtype: np.dtype, spec: AnySpec, sharding: Sharding
) -> jax.Array:
    return by_slice(spec.shape, sharding, lambda index: assemble(source, spec, index, dtype))
