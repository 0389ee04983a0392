"""Weights that are quantized on devices, and their formats.

A weight is quantized while it loads, or keeps the values of its file, bit for bit: those of a
checkpoint with a `quantization_config` by default. Norms and biases are never quantized; embeddings
and the head only if their file has them quantized, since rounding harms them most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from jaxserve.core.errors import ConfigError, WeightsError
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
    if stored.group is None or format.group is None or stored.group % format.group:
        return False
    return dataclasses.replace(stored, group=format.group) == format


def regrouped(weight: QuantizedWeight, format: Format) -> QuantizedWeight:
    """A weight of numpy arrays in a format whose groups divide its own: each scale several
    times."""
    if weight.format == format:
        return weight
    times = weight.format.group // format.group
    scales, minima = (
        None if plane is None else np.repeat(plane, times, axis=1)
        for plane in (weight.scales, weight.minima)
    )
    return QuantizedWeight(weight.values, scales, minima, format, weight.order)


def stack(spec: ParamSpec, parts: list[QuantizedWeight]) -> QuantizedWeight:
    """The parameter of a spec whose parts are of these whole tensors, all in `spec.format`.

    Raises WeightsError for layers with one input in different orders.
    """

    def plane(*planes: Any) -> np.ndarray:
        apart = []
        for part, array in zip(spec.parts, planes):
            outputs = part.shape[: -spec.num_inputs]
            rows = array[part.first : part.first + math.prod(outputs)]
            apart.append(rows.reshape(*outputs, -1))
        return np.concatenate(apart, axis=spec.concat_axis).reshape(*spec.rows, -1)

    weight = jax.tree.map(plane, *(part.unordered for part in parts))
    order = _order(spec, parts) if spec.format.ordered else None
    return dataclasses.replace(weight, format=spec.format, order=order)


def _order(spec: ParamSpec, parts: list[QuantizedWeight]) -> np.ndarray:
    """The order of the inputs of each expert's tensors, or that of all tensors."""
    found: dict[str, tuple[str, np.ndarray]] = {}
    for part, weight in zip(spec.parts, parts):
        module = part.tensor.removesuffix(".weight")
        first, order = found.setdefault(module.rpartition(".")[0], (module, weight.order))
        if (weight.order != order).any():
            raise WeightsError(
                f"{first} and {module} have their inputs in different orders (g_idx), and one "
                "product of both has one; write the model dequantized, by `jaxserve convert`."
            )
    orders = [weight.order for weight in parts][: math.prod(spec.orders)]
    return np.concatenate(orders).reshape(*spec.orders, -1)
