"""Slices of packed parameters from checkpoint tensors: each plane's, read together and once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxserve.core.errors import WeightsError
from jaxserve.models.family import ParamSpec, TensorPart, planes_of
from jaxserve.models.loading.assemble import Index, TensorSource, aligned_empty
from pallas_kernels.quantized_matmul import QuantizedWeight, abstract_weight

_VALUES_AT_ONCE = 1 << 20
"""Unpacked, they take a few bytes each until they are packed again."""


def assemble_packed(
    source: TensorSource, spec: ParamSpec, rows: Index, inputs: slice
) -> QuantizedWeight:
    """The slice of a packed parameter whose format the source has: its outputs `rows`, a slice for
    each dimension, and whole groups of its inputs, in the order of its columns. Planes are [*rows,
    columns], an order [*orders, columns]. Beside the planes only a few rows are in memory.

    Raises WeightsError for layers with one input in different orders.
    """
    sizes = tuple(bounds.stop - bounds.start for bounds in rows)
    orders = tuple(size if axis == "experts" else 1 for size, axis in zip(sizes, spec.axes))
    like = abstract_weight(1, inputs.stop - inputs.start, spec.format)
    whole = planes_of(like, sizes, orders, lambda plane, shape: aligned_empty(shape, plane.dtype))
    axis, begin = spec.concat_axis, 0
    found: dict[str, tuple[str, np.ndarray]] = {}
    for part in spec.parts:
        end = begin + part.shape[axis]
        start, stop = max(rows[axis].start, begin), min(rows[axis].stop, end)
        if start < stop:
            inside = (*rows[:axis], slice(start - begin, stop - begin), *rows[axis + 1 :])
            at = slice(start - rows[axis].start, stop - rows[axis].start)
            place = (*[slice(None)] * axis, at)
            for own, piece in _pieces(source, spec, part, inside, inputs):
                whole.values[place][own] = piece.values
                whole.scales[place][own] = piece.scales
                if piece.minima is not None:
                    whole.minima[place][own] = piece.minima
            if spec.format.ordered:
                _check_order(found, part, piece)
                whole.order[place if orders[axis] > 1 else ...] = piece.order
        begin = end
    return whole


def _pieces(
    source: TensorSource, spec: ParamSpec, part: TensorPart, inside: Index, inputs: slice
) -> Iterator[tuple[Index, QuantizedWeight]]:
    """Some rows after others of a part's slice `inside`, and where in the slice they are."""
    shape, base = part.shape[: -spec.num_inputs], part.first
    if part.axis is not None:
        shape = (*shape[: part.axis], part.rows, *shape[part.axis + 1 :])
        own = inside[part.axis]
        own = slice(own.start + base, own.stop + base)
        inside, base = (*inside[: part.axis], own, *inside[part.axis + 1 :]), 0
    *outer, last = inside
    # A word may have eight rows' zero points.
    step = max(1, _VALUES_AT_ONCE // spec.matrix[1] // 8) * 8
    for at in np.ndindex(*(bounds.stop - bounds.start for bounds in outer)):
        place = (*(bounds.start + entry for bounds, entry in zip(outer, at)), last.start)
        first = base + int(np.ravel_multi_index(place, shape))
        stop, begin = first + last.stop - last.start, first
        while begin < stop:
            end = min(stop, (begin // step + 1) * step)
            rows = slice(begin, end)
            piece = source.read_quantized(part.tensor, rows, inputs, spec.format)
            yield (*at, slice(begin - first, end - first)), piece
            begin = end


def _check_order(
    found: dict[str, tuple[str, np.ndarray]], part: TensorPart, piece: QuantizedWeight
) -> None:
    module = part.tensor.removesuffix(".weight")
    first, order = found.setdefault(module.rpartition(".")[0], (module, piece.order))
    if (piece.order != order).any():
        raise WeightsError(
            f"{first} and {module} have their inputs in different orders (g_idx), and one product "
            "of both has one; write the model dequantized, by `jaxserve convert`."
        )
