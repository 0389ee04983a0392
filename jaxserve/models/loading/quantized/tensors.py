"""The weights of quantized linear layers, out of safetensors files.

A layer `module` has, in place of `module.weight`,

- FP8 and int8: `weight` [out, in] of bytes and `weight_scale` (of blocks `weight_scale_inv`): one
  scale, one for each output, or one for each block; int8 may have `weight_zero_point` besides;
- compressed-tensors, packed: `weight_packed` [out, in / n] of n integers a word, `weight_scale`
  [out, groups], `weight_zero_point` [out / n, groups], `weight_shape` [2], `weight_g_idx` [in];
- AWQ: `qweight` [in, out / 8], `scales` [groups, out], `qzeros` [groups, out / 8];
- GPTQ: `qweight` [in / n, out], `scales` [groups, out], `qzeros` [groups, out / n], `g_idx` [in].

A weight is (value - zero point) * scale, in float32: integers and scales of two bytes give it
exactly. compressed-tensors moves packed values and zero points by half their range, which cancels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import WeightsError
from jaxserve.models.loading.assemble import Index
from jaxserve.models.loading.quantized.integers import per_word, unpacked, words
from jaxserve.models.quantization_scheme import QuantizationConfig, Scheme
from pallas_kernels.quantized_matmul import Format, QuantizedWeight, from_integers

_WEIGHT = ".weight"
_SCALE_DTYPES = ("F32", "F16", "BF16")
_TWO_BYTES = ("F16", "BF16")
_INTEGERS = ("I32",)
DTYPES = {
    ".weight": ("F8_E4M3", "I8"),
    ".weight_packed": _INTEGERS,
    ".weight_zero_point": ("I32", "I8"),
    ".weight_shape": ("I64", "I32"),
    ".weight_g_idx": _INTEGERS,
    ".qweight": _INTEGERS,
    ".qzeros": _INTEGERS,
    ".g_idx": _INTEGERS,
}
"""Dtypes of safetensors files that are no floats, by the ends of names that may have them."""


class _Layout(NamedTuple):
    """Names of a storage's tensors, after a module's, and how they lie.

    transposed: tensors are [inputs, outputs].
    packed: the axis of a weight [out, in] along which words have several values; None if they are
        no words. Zero points of words are packed along outputs.
    """

    values: str
    zeros: str | None = None
    order: str | None = None
    transposed: bool = False
    packed: int | None = None


_LAYOUTS = {
    "fp8": _Layout("weight"),
    "int8": _Layout("weight", "weight_zero_point", "weight_g_idx"),
    "packed": _Layout("weight_packed", "weight_zero_point", "weight_g_idx", packed=1),
    "awq": _Layout("qweight", "qzeros", transposed=True, packed=0),
    "gptq": _Layout("qweight", "qzeros", "g_idx", transposed=True, packed=1),
}


class _Weight(NamedTuple):
    """A weight [out, in] and the names of its tensors; those of zero points and of the groups of
    inputs are None where there are none."""

    scheme: Scheme
    layout: _Layout
    shape: tuple[int, int]
    values: str
    scales: str
    zeros: str | None
    order: str | None


class _Grid(NamedTuple):
    """Scales of a slice of a weight, float32 [rows, groups], or [1, ...] for the same in all rows,
    their zero points, and the group of each input."""

    scales: np.ndarray
    zeros: np.ndarray | int
    groups: np.ndarray


@dataclasses.dataclass(frozen=True)
class QuantizedTensors:
    """Weights out of `tensors`, slices of safetensors files by name, which are stored as `config`
    says. `name` is that of a weight, "module.weight"."""

    tensors: Mapping[str, Any]
    config: QuantizationConfig

    def stored(self, name: str) -> tuple[str, ...]:
        """The tensors that a weight is read from; none if it is not quantized."""
        weight = self._weight(name)
        if weight is None:
            return ()
        module = name.removesuffix(_WEIGHT)
        used = [weight.values, weight.scales, weight.zeros, weight.order]
        # Those of values that the config states as well, and of activations, which are not rounded.
        unread = ("weight_shape", "weight_g_idx", "g_idx", "input_scale", "input_zero_point")
        others = [f"{module}.{last}" for last in unread]
        return tuple(each for each in (*used, *others) if each in self.tensors)

    def shape(self, name: str) -> tuple[int, int] | None:
        """[out, in] of a weight; None if it is not quantized.

        Raises WeightsError where its tensors are missing or do not belong together.
        """
        weight = self._weight(name)
        return weight.shape if weight else None

    def format(self, name: str) -> Format | None:
        """The format that has the weight exactly; None if there is none, or it is not quantized."""
        weight = self._weight(name)
        if weight is None:
            return None
        format = weight.scheme.format(weight.shape[1])
        if format and format.minimum and self._dtype(weight.scales) not in _TWO_BYTES:
            return None  # a product of scale and zero point would be rounded
        return format

    def is_unneeded(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros, which GPTQ's tools write for layers without one."""
        module = name.removesuffix(".bias")
        if self.config.method != "gptq" or f"{module}.qweight" not in self.tensors:
            return False
        return name.endswith(".bias") and not np.any(self.tensors[name][:])

    def read(self, name: str, index: Index) -> np.ndarray:
        """The slice of a weight, float32."""
        weight = self._weight(name)
        grid = self._grid(weight, index[0], self._groups(name)[index[1]])
        values = self._values(weight, *index)
        if values.dtype.itemsize == 1 and values.dtype.kind in "iu":
            values = values.astype(np.int16)
            values = values - (
                grid.zeros if np.isscalar(grid.zeros) else grid.zeros[:, grid.groups]
            )
        scales = grid.scales[:, grid.groups]
        return values.astype(np.float32) * scales

    def read_packed(self, name: str, rows: slice, inputs: slice, format: Format) -> QuantizedWeight:
        """Rows of a weight in `format`, its own or one whose groups divide those, and of them whole
        groups of inputs. Those of an order are anywhere in a row, which is read whole."""
        weight = self._weight(name)
        size = weight.shape[1] // format.num_groups(weight.shape[1])
        groups, order = self._groups(name), None
        if format.ordered:
            order = np.argsort(groups, kind="stable")
            groups, order = groups[order], order[None, inputs]
            values = self._values(weight, rows, slice(0, weight.shape[1]))[:, order[0]]
        else:
            values = self._values(weight, rows, inputs)
        if weight.order is not None and (groups != np.repeat(groups[::size], size)).any():
            raise WeightsError(
                f"{weight.order} has groups that are not all of {size} inputs; write the model "
                "without quantization by `jaxserve convert`, and load that."
                if format.ordered
                else f"{weight.order} has groups whose inputs are not in a row, and config.json "
                "says that they are (desc_act, actorder); correct it."
            )
        grid = self._grid(weight, rows, groups[inputs])
        firsts = grid.groups[::size]
        scales = np.broadcast_to(grid.scales[:, firsts], (len(values), len(firsts)))
        if weight.scheme.storage == "fp8":
            return from_integers(values, scales, None, format)
        half = 1 << (weight.scheme.bits - 1)
        zeros = grid.zeros if np.isscalar(grid.zeros) else grid.zeros[:, firsts]
        if values.dtype == np.int8:
            values, zeros = values.view(np.uint8) ^ np.uint8(half), zeros + half
        if not format.minimum:
            if (zeros != half).any() if isinstance(zeros, np.ndarray) else zeros != half:
                raise WeightsError(
                    f"{weight.zeros} has zero points other than {half}, and config.json says that "
                    "there are none (sym); correct it."
                )
            return from_integers(values.astype(np.int16) - half, scales, None, format, order)
        minima = np.broadcast_to(zeros, scales.shape) * -scales
        return from_integers(values, scales, minima, format, order)

    def _values(self, weight: _Weight, rows: slice, columns: slice) -> np.ndarray:
        """Stored values [rows, columns], uint8, int8 or float8."""
        layout, bits = weight.layout, weight.scheme.bits
        if layout.packed is None:
            return self.tensors[weight.values][rows, columns]
        window = [rows, columns]
        along = window[layout.packed]
        window[layout.packed] = words(along, bits)
        packed = self._cut(weight, weight.values, window)
        awq = weight.scheme.storage == "awq"
        return unpacked(packed, along, bits, layout.packed, awq=awq)

    @functools.cached_property
    def _groups(self) -> Any:
        return functools.cache(self._groups_of)

    def _groups_of(self, name: str) -> np.ndarray:
        """The group of each input of a weight."""
        weight = self._weight(name)
        in_a_row = np.arange(weight.shape[1]) // (weight.scheme.group_size or weight.shape[1])
        if weight.order is None:
            return in_a_row
        groups = self.tensors[weight.order][:]
        if (groups == -1).all():  # As compressed-tensors initializes it: not reordered.
            return in_a_row
        self._check_order(weight, groups)
        return groups

    def _grid(self, weight: _Weight, rows: slice, groups: np.ndarray) -> _Grid:
        """Scales of rows, for inputs of these groups."""
        scheme = weight.scheme
        first, last = int(groups.min()), int(groups.max()) + 1
        groups = groups - first
        stored = self.tensors[weight.scales]
        if _size(stored) == 1:
            scale = np.asarray(stored[...], np.float32).reshape(1, 1)
            return _Grid(scale, self._zeros(weight, slice(0, 1), slice(0, 1)), groups)
        if len(stored.get_shape()) == 1:
            scales = np.asarray(stored[rows], np.float32)[:, None]
        elif scheme.rows in (1, None):
            scales = self._cut(weight, weight.scales, [rows, slice(first, last)])
        else:
            blocks = np.arange(rows.start, rows.stop) // scheme.rows
            top = int(blocks[0])
            scales = stored[top : int(blocks[-1]) + 1, first:last][blocks - top]
        scales = np.asarray(scales, np.float32)
        if not np.isfinite(scales).all():
            raise WeightsError(f"{weight.scales} is not finite everywhere; fetch the file again.")
        return _Grid(scales, self._zeros(weight, rows, slice(first, last)), groups)

    def _zeros(self, weight: _Weight, rows: slice, groups: slice) -> np.ndarray | int:
        """Zero points [rows, groups], or that of all."""
        scheme = weight.scheme
        if weight.zeros is None:
            return 0 if scheme.storage in ("fp8", "int8") else 1 << (scheme.bits - 1)
        if self._dtype(weight.zeros) == "I8":
            zeros = self.tensors[weight.zeros]
            if scheme.storage != "packed":
                return zeros[rows, groups].astype(np.int16)
            return zeros[rows, groups].astype(np.int16) + (1 << (scheme.bits - 1))
        packed = self._cut(weight, weight.zeros, [words(rows, scheme.bits), groups])
        zeros = unpacked(packed, rows, scheme.bits, 0, awq=scheme.storage == "awq")
        zeros = zeros.astype(np.int16)
        return (zeros + 1) % (1 << scheme.bits) if scheme.zeros_less_one else zeros

    def _cut(self, weight: _Weight, name: str, window: list[slice]) -> np.ndarray:
        """The slice `window`, of outputs and inputs, of a tensor of the weight."""
        tensor = self.tensors[name]
        if weight.layout.transposed:
            return tensor[window[1], window[0]].T
        return tensor[window[0], window[1]]

    def _check_order(self, weight: _Weight, groups: np.ndarray) -> None:
        size = weight.scheme.group_size
        count = 1 if size is None else cdiv(weight.shape[1], size)
        if groups.size and not 0 <= groups.min() <= groups.max() < count:
            raise WeightsError(
                f"{weight.order} has groups from {groups.min()} to {groups.max()}; there are "
                f"{count}. Fetch the file again."
            )

    def _dtype(self, name: str) -> str:
        return self.tensors[name].get_dtype()

    def _weight(self, name: str) -> _Weight | None:
        return self._weights(name) if name.endswith(_WEIGHT) else None

    @functools.cached_property
    def _weights(self) -> Any:
        return functools.cache(self._find)

    def _find(self, name: str) -> _Weight | None:
        """The weight of a module whose tensors fit together."""
        module = name.removesuffix(_WEIGHT)
        scheme = self.config.scheme(module)
        found = self.tensors.get(name)
        if found is not None and found.get_dtype() not in DTYPES[_WEIGHT]:
            return None  # not quantized
        if scheme is None:
            if found is None:
                return None
            raise WeightsError(
                f"{name} is {found.get_dtype()}, but quantization_config leaves {module} "
                "unquantized; correct the config, or fetch the file again."
            )
        layout = _LAYOUTS[scheme.storage]
        values = self.tensors.get(f"{module}.{layout.values}")
        if values is None:
            return None
        names = [f"{module}.{last}" for last in scheme.scale_names]
        scales = next((each for each in names if each in self.tensors), None)
        if scales is None:
            raise WeightsError(
                f"{module}.{layout.values} has no scales: {names[0]} is missing; fetch it again."
            )
        # A symmetric GPTQ has them too.
        has_zeros = layout.zeros and (not scheme.symmetric or scheme.storage == "gptq")
        zeros = f"{module}.{layout.zeros}" if has_zeros else None
        order = f"{module}.{layout.order}" if layout.order else None
        if order not in self.tensors and not scheme.reordered:
            order = None
        for needed, what in ((zeros, "zero points"), (order, "order of inputs")):
            if needed is not None and needed not in self.tensors:
                raise WeightsError(
                    f"{module}.{layout.values} has no {what}: {needed} is missing; fetch it again."
                )
        shape = self._shape(module, scheme, layout, values)
        weight = _Weight(scheme, layout, shape, f"{module}.{layout.values}", scales, zeros, order)
        self._check(weight)
        return weight

    def _shape(self, module: str, scheme: Scheme, layout: _Layout, values: Any) -> tuple[int, int]:
        name = f"{module}.{layout.values}"
        wanted = {"fp8": ("F8_E4M3",), "int8": ("I8",)}.get(scheme.storage, _INTEGERS)
        if values.get_dtype() not in wanted:
            raise WeightsError(
                f"{name} is {values.get_dtype()}; {self.config.method} stores it as {wanted[0]}."
            )
        stored = list(values.get_shape())
        if len(stored) != 2 or 0 in stored:
            raise WeightsError(f"{name} has shape {stored}; it must have outputs and inputs.")
        if layout.transposed:
            stored.reverse()
        if layout.packed is not None:
            stored[layout.packed] *= per_word(scheme.bits)
        if scheme.storage != "packed":
            return stored[0], stored[1]
        whole = f"{module}.weight_shape"
        if whole not in self.tensors:
            raise WeightsError(f"{name} has no shape: {whole} is missing; fetch it again.")
        sizes = np.asarray(self.tensors[whole][:]).reshape(-1).tolist()
        spare = stored[1] - sizes[1] if len(sizes) == 2 and sizes[0] == stored[0] else -1
        if not 0 <= spare < per_word(scheme.bits):
            raise WeightsError(f"{whole} is {sizes}, and {name} has {stored}; fetch it again.")
        return sizes[0], sizes[1]

    def _check(self, weight: _Weight) -> None:
        """Raises WeightsError for tensors that do not fit the weight's shape."""
        scheme, layout, (outputs, inputs) = weight.scheme, weight.layout, weight.shape
        groups = cdiv(inputs, scheme.group_size or inputs)
        scales = self.tensors[weight.scales]
        shape = list(scales.get_shape())
        whole = scheme.group_size is None and scheme.rows in (1, None)
        if scheme.storage in ("fp8", "int8") and whole:
            fits = shape in ([], [1], [1, 1], [outputs], [outputs, 1])
            wanted = [outputs, 1]
        else:
            wanted = [cdiv(outputs, scheme.rows or outputs), groups]
            if layout.transposed:
                wanted.reverse()
            fits = shape == wanted
        if not fits:
            raise WeightsError(f"{weight.scales} has shape {shape}; it must be {wanted}.")
        if self._dtype(weight.scales) not in _SCALE_DTYPES:
            raise WeightsError(
                f"{weight.scales} is {self._dtype(weight.scales)}; scales may be "
                f"{', '.join(_SCALE_DTYPES)}."
            )
        if weight.zeros is not None:
            self._check_zeros(weight, groups)
        if weight.order is not None:
            shape = list(self.tensors[weight.order].get_shape())
            if shape != [inputs]:
                raise WeightsError(f"{weight.order} has shape {shape}; it must be {[inputs]}.")

    def _check_zeros(self, weight: _Weight, groups: int) -> None:
        outputs, shape = weight.shape[0], list(self.tensors[weight.zeros].get_shape())
        if self._dtype(weight.zeros) == "I8":
            wanted = [outputs, groups]
        else:
            wanted = [cdiv(outputs, per_word(weight.scheme.bits)), groups]
            if weight.layout.transposed:
                wanted.reverse()
        if shape != wanted:
            raise WeightsError(f"{weight.zeros} has shape {shape}; it must be {wanted}.")


def _size(tensor: Any) -> int:
    return int(np.prod(tensor.get_shape(), dtype=np.int64))
