"""Parameters on devices, from any checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxserve.config import DTYPES
from jaxserve.errors import ConfigError
from jaxserve.models.family import Family, Params, ParamSpec
from jaxserve.models.loading.assemble import TensorSource, assemble
from jaxserve.models.loading.checkpoint import Checkpoint, Restorable

Progress = Callable[[int, int], None]
# Dequantising and copying release the interpreter lock; each worker holds one parameter at a time.
_WORKERS = 4


def load_params(
    checkpoint: Checkpoint,
    family: Family,
    *,
    dtype: str,
    shardings: Params | None = None,
    progress: Progress | None = None,
) -> Params:
    """The parameters of `checkpoint` as a pytree of arrays of `dtype`.

    `shardings` has the structure of `family.param_specs(...)`, a Sharding per parameter; without
    it everything goes to the first device. Each process reads only the slices its own devices
    hold, and the host never keeps more than a few parameters at a time. `progress(loaded_bytes,
    total_bytes)` is called as they arrive. Raises ConfigError for an unknown dtype, WeightsError
    for weights that cannot be read.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
    numpy_dtype = np.dtype(jax.numpy.dtype(dtype))
    specs = family.param_specs(checkpoint.config)
    if shardings is None:
        here = SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda spec: here, specs)
    leaves, structure = jax.tree.flatten(specs)
    total_bytes = sum(spec.size for spec in leaves) * numpy_dtype.itemsize
    if isinstance(checkpoint, Restorable):
        params = checkpoint.restore(specs, numpy_dtype, shardings)
        if progress:
            progress(total_bytes, total_bytes)
        return params

    arrays = []
    loaded_bytes = 0
    with ThreadPoolExecutor(_WORKERS, "load-params") as pool:
        load = functools.partial(_load_param, checkpoint, numpy_dtype)
        for array in pool.map(load, leaves, structure.flatten_up_to(shardings)):
            arrays.append(array)
            loaded_bytes += array.nbytes
            if progress:
                progress(loaded_bytes, total_bytes)
    return structure.unflatten(arrays)


def _load_param(
    source: TensorSource, dtype: np.dtype, spec: ParamSpec, sharding: Sharding
) -> jax.Array:
    blocks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def block(index: tuple[slice, ...]) -> np.ndarray:
        """Devices that hold the same slice share one reading of it."""
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, spec.shape))
        if bounds not in blocks:
            blocks[bounds] = assemble(source, spec, tuple(slice(*b) for b in bounds), dtype)
        return blocks[bounds]

    return jax.make_array_from_callback(spec.shape, sharding, block)
