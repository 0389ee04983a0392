"""Experts of a layer in one tensor, read under the names of single experts.

gpt-oss has `gate_up_proj` [experts, hidden, 2 * ff], gate and up in turn along its last dimension,
and `down_proj` [experts, ff, hidden]: transposes of the weights of linear layers. In MXFP4 each is
two tensors, of which nothing is transposed: `*_blocks` [experts, out, groups, 16] and `*_scales`
[experts, out, groups]. Biases are `*_bias` [experts, out].
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import WeightsError
from jaxserve.models.loading import mxfp4
from jaxserve.models.loading.assemble import Index
from jaxserve.models.quantization import of_inputs, regrouped
from pallas_kernels.quantized_matmul import Format, QuantizedWeight

_NAME = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
PACKED = ("_blocks", "_scales")
"""Ends of the names of tensors of bytes."""


class _Place(NamedTuple):
    """Where one expert's tensor is: every `step`-th output, from `first` on, of an expert of the
    tensors whose names begin with `stem`."""

    stem: str
    expert: int
    first: int
    step: int
    is_bias: bool

    def outputs(self, rows: slice) -> slice:
        """The stored outputs among which `rows` are."""
        return slice(rows.start * self.step, rows.stop * self.step)


def _place(name: str) -> _Place | None:
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    prefix, expert, projection, kind = found.groups()
    fused = "down_proj" if projection == "down" else "gate_up_proj"
    first, step = {"gate": (0, 2), "up": (1, 2), "down": (0, 1)}[projection]
    return _Place(f"{prefix}.{fused}", int(expert), first, step, kind == "bias")


@dataclasses.dataclass(frozen=True)
class FusedExperts:
    """Tensors of single experts, out of `tensors`, slices of safetensors files by name, which have
    those of all `num_experts`."""

    tensors: Mapping[str, Any]
    num_experts: int

    def stored(self, name: str) -> tuple[str, ...]:
        """The tensors that one expert's is read from; none if there are none."""
        place = _place(name)
        if place is None:
            return ()
        if place.is_bias:
            names = (place.stem + "_bias",)
        elif place.stem + PACKED[0] in self.tensors:
            return tuple(place.stem + end for end in PACKED)
        else:
            names = (place.stem,)
        return names if names[0] in self.tensors else ()

    def is_packed(self, name: str) -> bool:
        """Whether an expert's tensor is stored in MXFP4."""
        return len(self.stored(name)) > 1

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of an expert's tensor; None if there is no such tensor, and that of all experts'
        if they are not `num_experts`.

        Raises WeightsError where packed tensors do not belong together.
        """
        place, stored = _place(name), self.stored(name)
        if not stored:
            return None
        whole = tuple(self.tensors[stored[0]].get_shape())
        if self.is_packed(name):
            self._check_packed(*stored)
            whole = (*whole[:2], whole[2] * mxfp4.GROUP)
        elif not place.is_bias and len(whole) == 3:
            whole = (whole[0], whole[2], whole[1])
        experts, *own = whole
        if experts != self.num_experts or not own or own[0] % place.step:
            return whole
        return (own[0] // place.step, *own[1:])

    def read(self, name: str, index: Index) -> np.ndarray:
        """The slice of an expert's tensor [out] or [out, in], exactly."""
        place, stored = _place(name), self.stored(name)
        experts, outputs = slice(place.expert, place.expert + 1), place.outputs(index[0])
        own = slice(place.first, None, place.step)
        if place.is_bias:
            return self.tensors[stored[0]][experts, outputs][0, own]
        inputs = index[1]
        if len(stored) == 1:
            return self.tensors[stored[0]][experts, inputs, outputs][0, :, own].T
        first, last = inputs.start // mxfp4.GROUP, cdiv(inputs.stop, mxfp4.GROUP)
        planes = (self.tensors[part][experts, outputs, first:last][0, own] for part in stored)
        begin = first * mxfp4.GROUP
        return mxfp4.dequantize(*planes)[:, inputs.start - begin : inputs.stop - begin]

    def read_packed(self, name: str, rows: slice, inputs: slice, format: Format) -> QuantizedWeight:
        """Rows of an expert's weight [out, in], which is stored in MXFP4, with the values that are
        stored, and of them whole groups of inputs in `format`."""
        place = _place(name)
        experts, own = slice(place.expert, place.expert + 1), slice(place.first, None, place.step)
        groups = slice(inputs.start // mxfp4.GROUP, cdiv(inputs.stop, mxfp4.GROUP))
        planes = (
            self.tensors[part][experts, place.outputs(rows), groups] for part in self.stored(name)
        )
        weight = regrouped(mxfp4.packed(*(plane[0, own] for plane in planes)), format)
        begin = groups.start * mxfp4.GROUP
        return of_inputs(weight, inputs.start - begin, inputs.stop - begin)

    def _check_packed(self, blocks: str, scales: str) -> None:
        if scales not in self.tensors:
            raise WeightsError(f"{blocks} has no scales: {scales} is missing; fetch it again.")
        both = [self.tensors[name] for name in (blocks, scales)]
        shape, of_scales = (tuple(tensor.get_shape()) for tensor in both)
        if len(shape) != 4 or shape != (*of_scales, mxfp4.GROUP_BYTES):
            raise WeightsError(
                f"{blocks} has shape {list(shape)} and its scales {list(of_scales)}; they must be "
                f"[experts, outputs, groups, {mxfp4.GROUP_BYTES}] and [experts, outputs, groups]."
            )
        for name, tensor in zip((blocks, scales), both):
            if tensor.get_dtype() != "U8":
                raise WeightsError(f"{name} is {tensor.get_dtype()}; MXFP4 is stored as U8.")
