"""Slices of parameters equal slices of the whole, and read no more than they need."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.errors import WeightsError
from jaxserve.models.family import ParamSpec, TensorPart
from jaxserve.models.loading.assemble import aligned_empty, assemble, check_tensors

KV, GROUP, DIM, HIDDEN, FF = 4, 3, 2, 8, 6
SPECS = {
    "qkv": ParamSpec(
        (KV, GROUP + 2, DIM, HIDDEN),
        ("kv", "qkv", "dim", "embed"),
        (
            TensorPart("q", (KV, GROUP, DIM, HIDDEN)),
            TensorPart("k", (KV, 1, DIM, HIDDEN)),
            TensorPart("v", (KV, 1, DIM, HIDDEN)),
        ),
        concat_axis=1,
    ),
    "out": ParamSpec(
        (HIDDEN, KV, GROUP, DIM), ("embed",) * 4, (TensorPart("o", (HIDDEN, KV, GROUP, DIM)),)
    ),
    "gate_up": ParamSpec(
        (2, FF, HIDDEN),
        (None,) * 3,
        (TensorPart("gate", (1, FF, HIDDEN)), TensorPart("up", (1, FF, HIDDEN))),
    ),
    "bias": ParamSpec(
        (KV, 2, DIM),
        (None,) * 3,
        (TensorPart("kb", (KV, 1, DIM)), TensorPart("vb", (KV, 1, DIM))),
        1,
    ),
}
SHAPES = {
    "q": (KV * GROUP * DIM, HIDDEN),
    "k": (KV * DIM, HIDDEN),
    "v": (KV * DIM, HIDDEN),
    "o": (HIDDEN, KV * GROUP * DIM),
    "gate": (FF, HIDDEN),
    "up": (FF, HIDDEN),
    "kb": (KV * DIM,),
    "vb": (KV * DIM,),
}


class Tensors:
    """Tensors in memory that count what is read of them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        rng = np.random.default_rng(0)
        self.arrays = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
        self.values_read = 0

    def shape(self, name):
        return self.arrays[name].shape if name in self.arrays else None

    def read(self, name, index):
        piece = self.arrays[name][index]
        self.values_read += piece.size
        return piece

    def unclaimed(self, names):
        return sorted(self.arrays.keys() - names)


def whole(tensors: Tensors, spec: ParamSpec) -> np.ndarray:
    parts = [tensors.arrays[part.tensor].reshape(part.shape) for part in spec.parts]
    return np.concatenate(parts, axis=spec.concat_axis)


@given(st.data())
def test_any_slice_of_any_parameter(data):
    tensors = Tensors()
    spec = data.draw(st.sampled_from(list(SPECS.values())))
    index = []
    for size in spec.shape:
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, size))))
    got = assemble(tensors, spec, tuple(index), np.dtype(np.float16))
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, whole(tensors, spec)[tuple(index)].astype(np.float16))


@pytest.mark.parametrize(
    "name, axis", [("qkv", 0), ("qkv", 3), ("out", 0), ("out", 1), ("gate_up", 1), ("gate_up", 2)]
)
def test_a_shard_reads_only_itself(name, axis):
    tensors, spec = Tensors(), SPECS[name]
    half = spec.shape[axis] // 2
    index = [slice(0, size) for size in spec.shape]
    index[axis] = slice(half, 2 * half)
    piece = assemble(tensors, spec, tuple(index), np.dtype(np.float32))
    assert tensors.values_read == piece.size == spec.size // 2


def test_parts_outside_the_slice_are_not_read():
    tensors, spec = Tensors(), SPECS["gate_up"]
    assemble(tensors, spec, (slice(1, 2), slice(0, FF), slice(0, HIDDEN)), np.dtype(np.float32))
    assert tensors.values_read == FF * HIDDEN


@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_fused_tensor_only_a_parts_rows_are_read(rank):
    """A rank's half of the heads: of queries, keys and values that are below each other."""
    rows = KV * (GROUP + 2) * DIM
    tensors, spec = Tensors({"fused": (rows, HIDDEN)}), SPECS["qkv"]
    sizes = [math.prod(part.shape[:-1]) for part in spec.parts]
    parts = [
        dataclasses.replace(part, tensor="fused", first=sum(sizes[:at]), rows=rows)
        for at, part in enumerate(spec.parts)
    ]
    fused = dataclasses.replace(spec, parts=tuple(parts))
    apart = Tensors({part.tensor: (size, HIDDEN) for part, size in zip(spec.parts, sizes)})
    bounds = np.cumsum([0, *sizes])
    for part, start, stop in zip(spec.parts, bounds, bounds[1:]):
        apart.arrays[part.tensor] = tensors.arrays["fused"][start:stop]
    half = KV // 2
    index = (slice(rank * half, (rank + 1) * half), *(slice(0, n) for n in spec.shape[1:]))
    got = assemble(tensors, fused, index, np.dtype(np.float32))
    np.testing.assert_array_equal(got, whole(apart, spec)[index])
    assert tensors.values_read == got.size
    check_tensors(tensors, {"qkv": fused}, "somewhere")
    longer = Tensors({"fused": (rows + 1, HIDDEN)})
    with pytest.raises(WeightsError, match=rf"fused has shape .*; the config implies {rows} rows"):
        check_tensors(longer, {"qkv": fused}, "somewhere")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": None}, "k is missing"),
        ({"gate": (HIDDEN, FF)}, r"gate has shape \[8, 6\]; the config implies \[6, 8\]"),
        ({"o": (HIDDEN, KV * GROUP * DIM, 2)}, r"o has shape \[8, 24, 2\]"),
        ({"extra": (3,)}, "extra is not used by the model"),
    ],
)
def test_mismatches_are_named(change, message):
    shapes = {n: s for n, s in (SHAPES | change).items() if s is not None}
    with pytest.raises(WeightsError, match=message):
        check_tensors(Tensors(shapes), SPECS, "somewhere")


def test_only_the_first_mismatches_are_listed():
    with pytest.raises(WeightsError, match="and 3 more"):
        check_tensors(Tensors({}), SPECS, "somewhere")


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple))
def test_aligned_memory(shape):
    array = aligned_empty(shape, np.float16)
    assert array.shape == shape and array.size == math.prod(shape)
    assert array.ctypes.data % 64 == 0
