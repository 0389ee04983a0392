"""Weights that are quantized on devices, and their formats.

A weight is quantized while it loads, or keeps the values of its file, bit for bit: those of a
checkpoint with a `quantization_config` by default. Norms and biases are never quantized; embeddings
and the head only if their file has them quantized, since rounding harms them most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.models.family import Params, ParamSpec
from pallas_kernels.quantized_matmul import FP8, GGUF, MXFP4, Format, QuantizedWeight

STORED = GGUF | {"MXFP4": MXFP4}
"""Formats that have the values of blocks in files exactly, by GGUF's names of these blocks."""
AS_STORED = {"gguf": STORED, "mxfp4": {"MXFP4": MXFP4}}
"""Blocks that are kept as they are, by value of `EngineConfig.quantization`."""
FORMATS = {
    "int8": Format("int8", None),
    "int4": Format("int4", 32, minimum=True, scale_dtype="float16"),
    "fp8": FP8,
}
"""Of weights that are quantized while they load, by value of `EngineConfig.quantization`."""


def with_formats(
    specs: Params,
    quantization: str | None,
    stored_format: Callable[[str, int], Format | None],
    own: str | None = None,
) -> Params:
    """`specs` with the format of every parameter that is to be quantized.

    quantization: a key of FORMATS or of AS_STORED, the checkpoint's own method `own`, or None for
    none. stored_format(tensor, inputs) is the format that has what is stored exactly, None without
    (`Checkpoint.stored_format`). Of its own method, weights that no format has stay unquantized.
    Raises ConfigError for the method of another checkpoint, when nothing can be quantized, or a
    layer's inputs are not whole groups.
    """
    if quantization is None:
        return specs
    if quantization == own:
        return jax.tree.map(lambda spec: _as_stored(spec, stored_format, None), specs)
    if kept := AS_STORED.get(quantization):
        formats = frozenset(kept.values())
        stored = jax.tree.map(lambda spec: _as_stored(spec, stored_format, formats), specs)
        has_blocks = own in (None, *AS_STORED) and any(
            spec.format for spec in jax.tree.leaves(stored)
        )
        if not has_blocks:
            raise ConfigError(
                f"quantization is {quantization!r}, but the model has no weights in blocks of "
                f"{', '.join(kept)}; give a file that has, or one of {', '.join(FORMATS)}."
            )
        return stored
    if quantization not in FORMATS:
        raise ConfigError(
            f"quantization is {quantization!r}, but the weights are stored "
            f"{f'as {own}' if own else 'otherwise'}; leave it out, or give one of "
            f"{', '.join(FORMATS)}."
        )
    layers = jax.tree.map(lambda spec: _rounded(spec, FORMATS[quantization]), specs["layers"])
    return specs | {"layers": layers}


def _as_stored(
    spec: ParamSpec,
    stored_format: Callable[[str, int], Format | None],
    kept: Collection[Format] | None,
) -> ParamSpec:
    """The spec in the format of all its parts, if that is one of `kept` (None: any)."""
    if not spec.num_inputs:
        return spec
    formats = {stored_format(part.tensor, spec.matrix[1]) for part in spec.parts}
    format = formats.pop()
    if formats or (kept is not None and format not in kept):
        return spec
    return dataclasses.replace(spec, format=format)


def _rounded(spec: ParamSpec, format: Format) -> ParamSpec:
    if not spec.num_inputs:
        return spec
    try:
        format.num_groups(spec.matrix[1])
    except ValueError as error:
        raise ConfigError(f"{spec.parts[0].tensor} cannot be quantized: {error}") from error
    return dataclasses.replace(spec, format=format)


def has_groups_of(stored: Format | None, format: Format) -> bool:
    """Whether `format` is the stored one, or it with groups that divide its own."""
    if stored is None or stored == format:
        return stored is not None
    larger, smaller = stored.group_size, format.group_size
    if larger is None or smaller is None or larger % smaller:
        return False
    return dataclasses.replace(stored, group_size=format.group_size) == format


def regrouped(weight: QuantizedWeight, format: Format) -> QuantizedWeight:
    """A weight of numpy arrays in a format whose groups divide its own: each scale several
    times."""
    if weight.format == format:
        return weight
    times = weight.format.group_size // format.group_size
    scales, minima = (
        None if plane is None else np.repeat(plane, times, axis=1)
        for plane in (weight.scales, weight.minima)
    )
    return QuantizedWeight(weight.values, scales, minima, format, weight.order)


def of_inputs(weight: QuantizedWeight, first: int, last: int) -> QuantizedWeight:
    """The columns of a weight of numpy arrays from `first` to `last`: whole groups."""
    num_inputs = weight.shape[1]

    def cut(plane: Any) -> Any:
        columns = plane.shape[1]
        return plane if columns == 1 else plane[:, _part(first, last, columns, num_inputs)]

    return weight if (first, last) == (0, num_inputs) else jax.tree.map(cut, weight)


def _part(first: int, last: int, columns: int, num_inputs: int) -> slice:
    return slice(first * columns // num_inputs, last * columns // num_inputs)
