"""Weights that are quantized on the device, and their formats.

A weight is quantized while it loads, or keeps the blocks of its GGUF file, bit for bit. Norms and
biases are never quantized; embeddings and the head only if their file has them quantized, since
rounding harms them most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.models.family import Params, ParamSpec
from pallas_kernels.quantized_matmul import FP8, GGUF, Format, QuantizedWeight

AS_STORED = "gguf"
FORMATS = {
    "int8": Format("int8", None),
    "int4": Format("int4", 32, minimum=True, scale_dtype="float16"),
    "fp8": FP8,
}
"""Of weights that are quantized while they load, by value of `EngineConfig.quantization`."""


def with_formats(
    specs: Params, quantization: str | None, stored_kind: Callable[[str], str | None]
) -> Params:
    """`specs` with the format of every parameter that is to be quantized.

    quantization: a key of FORMATS, AS_STORED, or None for none. stored_kind(tensor) is the GGUF
    name of the block type of a checkpoint's tensor, or None if it has no blocks. Raises ConfigError
    when nothing can be quantized, or a layer's inputs are not whole groups.
    """
    if quantization is None:
        return specs
    if quantization == AS_STORED:
        stored = jax.tree.map(lambda spec: _as_stored(spec, stored_kind), specs)
        if not any(spec.format for spec in jax.tree.leaves(stored)):
            raise ConfigError(
                f"quantization is {AS_STORED!r}, but the model has no weights in blocks of "
                f"{', '.join(GGUF)}; give a .gguf file that has, or one of {', '.join(FORMATS)}."
            )
        return stored
    layers = jax.tree.map(lambda spec: _rounded(spec, FORMATS[quantization]), specs["layers"])
    return specs | {"layers": layers}


def _as_stored(spec: ParamSpec, stored_kind: Callable[[str], str | None]) -> ParamSpec:
    kinds = {stored_kind(part.tensor) for part in spec.parts}
    kind = kinds.pop()
    if kinds or kind not in GGUF or not spec.num_inputs:
        return spec
    return dataclasses.replace(spec, format=GGUF[kind])


def _rounded(spec: ParamSpec, format: Format) -> ParamSpec:
    if not spec.num_inputs:
        return spec
    try:
        format.num_groups(spec.matrix[1])
    except ValueError as error:
        raise ConfigError(f"{spec.parts[0].tensor} cannot be quantized: {error}") from error
    return dataclasses.replace(spec, format=format)


def stack(spec: ParamSpec, parts: list[QuantizedWeight]) -> QuantizedWeight:
    """The parameter of a spec whose parts are these tensors, all in `spec.format`."""

    def plane(*planes: Any) -> np.ndarray:
        apart = [
            array.reshape(*part.shape[: -spec.num_inputs], -1)
            for part, array in zip(spec.parts, planes)
        ]
        return np.concatenate(apart, axis=spec.concat_axis).reshape(spec.matrix[0], -1)

    return jax.tree.map(plane, *parts)
