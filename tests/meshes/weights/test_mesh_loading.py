"""Loading for a mesh: each byte of the weights is read once, and the peak of host memory is the
devices' shards and one parameter."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import family_members
import jax
import numpy as np
import pytest
from mesh_engines import on_mesh
from quantized_checkpoints import mxfp4, write
from test_mesh_weights import FLOAT, shapes_of
from tiny_checkpoints import CONFIG, fused_experts, hf_shapes, of_experts, write_hf
from tiny_engines import CONTEXT, EOS, member

from jaxserve.models.family import Params
from jaxserve.models.loading import packed
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.params import load_params

pytestmark = pytest.mark.meshes

RAW = CONFIG | {"intermediate_size": 192, "max_position_embeddings": CONTEXT, "eos_token_id": EOS}
EXPERTS = of_experts("Qwen3MoeForCausalLM") | {"moe_intermediate_size": 64}
GROUPED = ("compressed-tensors W4A16 with zero points", "awq", "gptq", "gptq of 8 bits")
"""With scales of groups of each output: no two devices share one."""
OF_ROWS = ("compressed-tensors W8A8", "fp8", "fp8 in blocks")
VALUES = (".weight", ".qweight", ".weight_packed", "_blocks")


class Counted:
    """A tensor, and how often each of its entries was read."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.reads = np.zeros(tensor.get_shape(), int)

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def get_shape(self) -> list[int]:
        return self._tensor.get_shape()

    def __getitem__(self, index: Any) -> np.ndarray:
        self.reads[index] += 1
        return self._tensor[index]


def loaded(
    mesh: str, path: Path, dtype: str = "float32", **settings: Any
) -> tuple[Checkpoint, Params]:
    """The checkpoint, whose tensors count what was read of them for all devices of a mesh."""
    shapes = shapes_of(mesh, path, dtype=dtype, **settings)
    checkpoint = open_checkpoint(path)
    for name, tensor in checkpoint.tensors.items():
        checkpoint.tensors[name] = Counted(tensor)
    params = load_params(checkpoint, shapes.specs, dtype=dtype, shardings=shapes.params.shardings)
    return checkpoint, params


def test_every_byte_is_read_once(tmp_path):
    on_mesh("TP2", check_reads, tmp_path)
    on_mesh("TP2 PP2", check_reads, tmp_path)


def check_reads(mesh: str, directory: Path) -> None:
    """Of all tensors, or, where devices share scales of rows, of all that have values."""
    for name in ("plain", *GROUPED, *OF_ROWS):
        config = RAW | EXPERTS if name in ("plain", "awq") else RAW
        model = directory / mesh / name
        tensors = family_members.tensors(hf_shapes(config))
        plain = name == "plain"
        path = write_hf(model, config, tensors) if plain else write(model, config, tensors, name)[0]
        checkpoint, _ = loaded(mesh, path)
        once = VALUES if name in OF_ROWS else (*VALUES, ".weight_scale", "scales", "qzeros")
        found = {key: part.reads for key, part in checkpoint.tensors.items() if key.endswith(once)}
        assert found and not {key for key, reads in found.items() if (reads != 1).any()}, name


def test_what_shares_bytes_is_read_for_each(tmp_path):
    """Gate and up of gpt-oss, row by row in turn, for both; the rows of a layer whose inputs are
    divided and in activation order for each device."""
    on_mesh("TP2", check_shared, tmp_path)


def check_shared(mesh: str, directory: Path) -> None:
    raw = member("gpt_oss")[0] | {"num_experts": 6, "intermediate_size": 128}
    tensors, _ = mxfp4(fused_experts(family_members.tensors(hf_shapes(raw))))
    own = {"quantization_config": {"quant_method": "mxfp4"}}
    checkpoint, _ = loaded(mesh, write_hf(directory / "mxfp4", raw | own, tensors))
    for name, part in checkpoint.tensors.items():
        in_turn = "experts.gate_up_proj" in name
        assert (part.reads == (2 if in_turn else 1)).all(), name
    tensors = family_members.tensors(hf_shapes(RAW))
    path, _ = write(directory / "gptq", RAW, tensors, "gptq in activation order")
    checkpoint, _ = loaded(mesh, path)
    for name, part in checkpoint.tensors.items():
        if name.endswith(".qweight"):
            divided = "o_proj" in name or "down_proj" in name
            assert (part.reads == (2 if divided else 1)).all(), name


OF_PYTHON = 1 << 19
"""Bytes of objects that are no arrays, of other threads too: a fiftieth of the parameters."""


def test_memory_beside_the_parameters(tmp_path):
    on_mesh("TP2", check_memory, tmp_path)


def check_memory(mesh: str, directory: Path) -> None:
    """With all that devices are given kept on the host, too: that, and as much as the largest
    parameter."""
    raw = RAW | {"hidden_size": 256, "intermediate_size": 4096, "vocab_size": 512}
    tensors = family_members.tensors(hf_shapes(raw))
    paths = {"plain": write_hf(directory / "plain", raw, tensors)}
    for name in (*GROUPED, *OF_ROWS, "gptq in activation order"):
        paths[name] = write(directory / name, raw, tensors, name)[0]
    del tensors
    for name, path in paths.items():
        with pytest.MonkeyPatch.context() as patch:
            # As few next to this model as there are next to real ones.
            patch.setattr(packed, "_VALUES_AT_ONCE", 1 << 14)
            kept = keep_slices(patch)
            shapes = shapes_of(mesh, path)
            checkpoint = open_checkpoint(path)
            tracemalloc.start()
            load_params(
                checkpoint, shapes.specs, dtype="float32", shardings=shapes.params.shardings
            )
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        parameters = [spec.abstract(FLOAT) for spec in jax.tree.leaves(shapes.specs)]
        sizes = [sum(map(num_bytes, jax.tree.leaves(planes))) for planes in parameters]
        assert sum(array.nbytes for array in kept) >= sum(sizes)
        most = sum(sizes) + max(sizes) + OF_PYTHON
        assert sum(sizes) < peak <= most, (name, peak, sizes)


def keep_slices(patch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The list of all slices that arrays will be made of."""
    kept, made = [], jax.make_array_from_callback

    def keeping(shape: Any, sharding: Any, slice_of: Any) -> jax.Array:
        def keep(index: Any) -> np.ndarray:
            kept.append(slice_of(index))
            return kept[-1]

        return made(shape, sharding, keep)

    patch.setattr(jax, "make_array_from_callback", keeping)
    return kept


def num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize
