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
from jaxserve.models.loading.assemble import TensorSource, assemble, by_slice
from jaxserve.models.loading.checkpoint import Checkpoint, Restorable
from jaxserve.models.quantization import has_groups_of, regrouped, stack
from pallas_kernels.quantized_matmul import Format, QuantizedWeight, quantize

Progress = Callable[[int, int], None]
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
    the first device. Each process reads only the slices its own devices hold, of packed weights
    whole tensors, and the host never holds more than a few parameters at a time.
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
        return jax.device_put(_stored(source, spec), sharding)
    # A process reads its own stages' layers, each whole and once.
    stored = functools.cache(lambda layer: jax.tree.leaves(_stored(source, layers[layer])))
    planes, structure = jax.tree.flatten(spec.abstract(dtype))

    def load(place: int, plane: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
        def block(index: tuple[slice, ...]) -> np.ndarray:
            if not isinstance(spec, Stacked):
                return np.ascontiguousarray(stored(0)[place][index])
            own = range(*index[0].indices(len(layers)))
            return np.stack([stored(layer)[place][index[1:]] for layer in own])

        return by_slice(plane.shape, sharding, block)

    shardings = structure.flatten_up_to(sharding)
    return structure.unflatten(map(load, itertools.count(), planes, shardings))


def _is_stored(source: TensorSource, spec: ParamSpec) -> bool:
    """Whether the source has the values of a packed parameter just as its format keeps them."""
    formats = (source.stored_format(part.tensor, spec.matrix[1]) for part in spec.parts)
    return all(has_groups_of(format, spec.format) for format in formats)


def _stored(source: TensorSource, spec: ParamSpec) -> QuantizedWeight:
    parts = (source.read_quantized(part.tensor) for part in spec.parts)
    return stack(spec, [regrouped(part, spec.format) for part in parts])


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
