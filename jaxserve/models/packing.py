"""Weights that stay packed on the device: which, and in what format.

A weight is packed as it loads, or is packed already in its GGUF file and stays as it is there, to
the last bit. Norms and biases never are; embeddings and the head only where their file has them
packed, for they are what rounding harms most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.models.family import Params, ParamSpec
from pallas_kernels.quantized_matmul import FP8, GGUF, Format, PackedWeight

AS_STORED = "gguf"
FORMATS = {
    "int8": Format("int8", None),
    "int4": Format("int4", 32, minimum=True, scale_dtype="float16"),
    "fp8": FP8,
}
"""Of weights that are rounded as they load, by the names of `EngineConfig.quantization`."""

_TABLES = ("embed", "lm_head")


def with_formats(
    specs: Params, quantization: str | None, stored_kind: Callable[[str], str | None]
) -> Params:
    """`specs` with the format of every parameter that is to be packed.

    quantization: a key of FORMATS, AS_STORED, or None for none. stored_kind(tensor) is the GGUF
    name of the blocks that a checkpoint's tensor consists of, or None where it has none. Raises
    ConfigError when nothing can be packed, or a layer's inputs are not whole groups.
    """
    if quantization is None:
        return specs
    if quantization == AS_STORED:
        packed = jax.tree.map(lambda spec: _as_stored(spec, stored_kind), specs)
        if not any(spec.format for spec in jax.tree.leaves(packed)):
            raise ConfigError(
                f"quantization is {AS_STORED!r}, but the model has no weights in blocks of "
                f"{', '.join(GGUF)}; give a .gguf file that has, or one of {', '.join(FORMATS)}."
            )
        return packed
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
        raise ConfigError(f"{spec.parts[0].tensor} cannot be packed: {error}") from error
    return dataclasses.replace(spec, format=format)


def stack(spec: ParamSpec, parts: list[PackedWeight]) -> PackedWeight:
    """The parameter of a spec whose parts are these tensors, all packed as `spec.format` says."""

    def plane(*planes: Any) -> np.ndarray:
        apart = [
            array.reshape(*part.shape[: -spec.num_inputs], -1)
            for part, array in zip(spec.parts, planes)
        ]
        return np.concatenate(apart, axis=spec.concat_axis).reshape(spec.matrix[0], -1)

    return jax.tree.map(plane, *parts)
