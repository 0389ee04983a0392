"""Slices of parameters from checkpoint tensors.

A parameter is several tensors, reshaped and concatenated; a device holds a slice of it. Only the
part of each tensor that the slice covers is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from jaxserve.core.errors import WeightsError
from jaxserve.models.family import AnySpec, Params, ParamSpec, Rearranged, Stacked, TensorPart
from pallas_kernels.quantized_matmul import Format, QuantizedWeight

Index = tuple[slice, ...]
_LISTED, _LISTED_CHARS = 5, 500
CPU_ALIGNMENT_BYTES = 64


class TensorSource(Protocol):
    """Tensors under their Hugging Face names, readable by slice."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, or None if there is no such tensor."""

    def read(self, name: str, index: Index) -> np.ndarray:
        """The slice of a tensor, in any floating dtype that holds its values exactly."""

    def stored_format(self, name: str, num_inputs: int) -> Format | None:
        """The format in which devices can keep a weight just as it is stored; None without."""

    def read_quantized(
        self, name: str, rows: slice, inputs: slice, format: Format
    ) -> QuantizedWeight:
        """Rows of a tensor [out, in] in `format`, its `stored_format` or one whose groups divide
        those, and of them whole groups of inputs: in an ordered format, by the order of the
        columns."""

    def unclaimed(self, names: set[str]) -> list[str]:
        """Tensors not in `names` that a model must not ignore."""


def check_tensors(
    source: TensorSource, specs: Params, where: str, other_tensors: tuple[str, ...] = ()
) -> int:
    """The number of tensors whose name starts with one of `other_tensors`: the specs need none.

    Raises WeightsError unless all others are exactly those that the specs need.
    """
    parts = [part for spec in jax.tree.leaves(specs) for part in spec.parts]
    problems = [problem for part in parts if (problem := _mismatch(source, part))]
    unclaimed = source.unclaimed({part.tensor for part in parts})
    unknown = [name for name in unclaimed if not name.startswith(other_tensors)]
    problems += [f"{name} is not used by the model" for name in unknown]
    if problems:
        rest = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise WeightsError(
            f"the tensors of {where} do not match its config:\n  "
            + "\n  ".join(problem[:_LISTED_CHARS] for problem in problems[:_LISTED])
            + rest
        )
    return len(unclaimed) - len(unknown)


def assemble(source: TensorSource, spec: AnySpec, index: Index, dtype: np.dtype) -> np.ndarray:
    """The slice `index` of a parameter, in `dtype`. Slices have a start, a stop and no step."""
    return cut(lambda plain, inside: _concatenated(source, plain, inside, dtype), spec, index)


def cut(read: Callable[[ParamSpec, Index], np.ndarray], spec: AnySpec, index: Index) -> np.ndarray:
    """The slice `index` of a parameter partitioned for a mesh; `read` gives slices of the parameter
    as its family defines it."""
    match spec:
        case Stacked():
            layers = spec.specs[index[0]]
            return np.stack([cut(read, layer, index[1:]) for layer in layers])
        case Rearranged():
            return _rearranged(read, spec, index)
        case ParamSpec():
            return read(spec, index)


def _rearranged(
    read: Callable[[ParamSpec, Index], np.ndarray], spec: Rearranged, index: Index
) -> np.ndarray:
    """Reads the range of the outermost dimension that holds every requested row."""
    first, after = spec.first, spec.first + spec.rows.ndim
    rows = spec.rows[index[first:after]]
    sizes = spec.source.shape[first:after]
    stride = math.prod(sizes[1:])
    real = rows >= 0
    start, stop = 0, 1
    if real.any():
        start, stop = int(rows[real].min()) // stride, int(rows[real].max()) // stride + 1
    inner = (slice(0, size) for size in sizes[1:])
    block = read(spec.source, (*index[:first], slice(start, stop), *inner, *index[after:]))
    block = block.reshape(*block.shape[:first], -1, *block.shape[after:])
    taken = np.take(block, np.where(real, rows - start * stride, 0), axis=first)
    taken[(*[slice(None)] * first, ~real)] = 0
    return taken


def _concatenated(
    source: TensorSource, spec: ParamSpec, index: Index, dtype: np.dtype
) -> np.ndarray:
    """The slice of a parameter as its family defines it: its parts, concatenated."""
    axis, begin = spec.concat_axis, 0
    window = index[axis]
    pieces = []
    for part in spec.parts:
        end = begin + part.shape[axis]
        start, stop = max(window.start, begin), min(window.stop, end)
        if start < stop:
            inside = _with(index, axis, slice(start - begin, stop - begin))
            pieces.append(_read_part(source, part, inside))
        begin = end
    if len(pieces) == 1 and pieces[0].dtype == dtype:
        return pieces[0]
    # Concatenating into `out` also casts.
    out = aligned_empty(tuple(bounds.stop - bounds.start for bounds in index), dtype)
    return np.concatenate(pieces, axis=axis, out=out, casting="unsafe")


def by_slice(
    shape: tuple[int, ...], sharding: Sharding, block: Callable[[Index], np.ndarray]
) -> jax.Array:
    """An array of the slices `block(index)`; devices that hold the same slice share it."""
    blocks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def shared(index: Index) -> np.ndarray:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape))
        if bounds not in blocks:
            blocks[bounds] = block(tuple(slice(*ends) for ends in bounds))
        return blocks[bounds]

    return jax.make_array_from_callback(shape, sharding, shared)


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """Uninitialised memory that JAX's CPU devices use without copying it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + CPU_ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % CPU_ALIGNMENT_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)


def _read_part(source: TensorSource, part: TensorPart, index: Index) -> np.ndarray:
    """The slice `index` of a tensor seen as `part.shape`.

    Each tensor dimension is split into some of the part's. The slice's range of the outermost of
    those becomes a range of the tensor's rows or columns; the others are sliced after reading.
    """
    if part.axis is not None:
        bounds = index[part.axis]
        own = slice(part.first + bounds.start, part.first + bounds.stop)
        return _read_part(source, _whole(part), _with(index, part.axis, own))
    groups = _split(_rows_of(part, source.shape(part.tensor)), part.shape)
    ranges, shape, rest = [], list(part.shape), list(index)
    for group in groups:
        outermost = next((d for d in group if part.shape[d] > 1), None)
        if outermost is None:
            ranges.append(slice(0, 1))
            continue
        bounds = index[outermost]
        stride = math.prod(part.shape[d] for d in group if d > outermost)
        ranges.append(slice(bounds.start * stride, bounds.stop * stride))
        shape[outermost] = bounds.stop - bounds.start
        rest[outermost] = slice(None)
    rows = slice(ranges[0].start + part.first, ranges[0].stop + part.first)
    return source.read(part.tensor, (rows, *ranges[1:])).reshape(shape)[tuple(rest)]


def _whole(part: TensorPart) -> TensorPart:
    """The part with all entries of its dimension `axis`, if it has one."""
    if part.axis is None:
        return part
    shape = (*part.shape[: part.axis], part.rows, *part.shape[part.axis + 1 :])
    return TensorPart(part.tensor, shape)


def _rows_of(part: TensorPart, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the rows of a tensor of shape `whole` that are the part's."""
    if part.rows is None:
        return whole
    return (math.prod(part.shape) // math.prod(whole[1:]), *whole[1:])


def _split(whole: tuple[int, ...], parts: tuple[int, ...]) -> list[range] | None:
    """Dimensions of `parts` that each dimension of `whole` is split into; None if they do not fit.

    (8, 6) is split by (2, 4, 1, 6) into dimensions 0 to 1 and 2 to 3.
    """
    groups, at = [], 0
    for size in whole:
        start, product = at, 1
        while at < len(parts) and (product < size or parts[at] == 1):
            product *= parts[at]
            at += 1
        if product != size:
            return None
        groups.append(range(start, at))
    return groups if at == len(parts) else None


def _mismatch(source: TensorSource, part: TensorPart) -> str | None:
    shape = source.shape(part.tensor)
    if shape is None:
        return f"{part.tensor} is missing"
    part = _whole(part)
    if part.rows not in (None, shape[0]):
        return f"{part.tensor} has shape {list(shape)}; the config implies {part.rows} rows"
    if _split(_rows_of(part, shape), part.shape) is None:
        return f"{part.tensor} has shape {list(shape)}; the config implies {_terse(part.shape)}"
    return None


def _terse(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size > 1] or [1]


def _with(index: Index, axis: int, bounds: slice) -> Index:
    return (*index[:axis], bounds, *index[axis + 1 :])
