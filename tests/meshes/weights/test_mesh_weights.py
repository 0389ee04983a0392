"""Weights on a mesh: what is read for each device, and the same values from every format."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from mesh_engines import degrees, on_mesh, write_llama

from jaxserve.core.settings.config import EngineConfig
from jaxserve.models.loading.assemble import Index, TensorSource, assemble, cut
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.convert import convert
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import param_specs
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.startup import engine_plan

pytestmark = pytest.mark.meshes

FLOAT = np.dtype(np.float32)
UNEVEN = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 61,
    "intermediate_size": 83,
    "num_hidden_layers": 4,
}


class Counted:
    """Tensors of `source`, with the number of bytes read of them."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.bytes_read = 0

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._source.shape(name)

    def read(self, name: str, index: Index) -> np.ndarray:
        values = self._source.read(name, index)
        self.bytes_read += values.nbytes
        return values

    def unclaimed(self, names: set[str]) -> list[str]:
        return self._source.unclaimed(names)


def shapes_of(mesh: str, path: Path, **settings: object) -> ProgramShapes:
    return engine_plan.plan_engine(EngineConfig(model=path, **degrees(mesh), **settings)).shapes


def bytes_by_device(shapes: ProgramShapes, path: Path) -> dict[jax.Device, int]:
    """Bytes read for the shards of each device, which may be a process by itself."""
    source, read = open_checkpoint(path), {}
    specs, structure = jax.tree.flatten(shapes.specs)
    shardings = structure.flatten_up_to(shapes.params.shardings)
    for device in shapes.mesh.devices.flat:
        counted = Counted(source)
        for spec, sharding in zip(specs, shardings, strict=True):
            index = sharding.devices_indices_map(spec.shape)[device]
            index = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, spec.shape))
            assemble(counted, spec, index, FLOAT)
        read[device] = counted.bytes_read
    return read


@pytest.mark.parametrize("mesh", ["TP4", "PP4", "TP2 PP2 CP2"])
def test_a_device_reads_its_shards_and_no_more(tmp_path, mesh):
    on_mesh(mesh, check_bytes, write_llama(tmp_path / "model", num_hidden_layers=4))


def check_bytes(mesh: str, path: Path) -> None:
    shapes = shapes_of(mesh, path)
    of_file = sum(part.nbytes for part in tensors_of(path))
    read = bytes_by_device(shapes, path)
    assert set(read.values()) == {shapes.weights_bytes}
    assert shapes.weights_bytes < 1.1 * of_file / (shapes.tensor * shapes.stages)


def tensors_of(path: Path) -> list[np.ndarray]:
    source = open_checkpoint(path)
    return [source.read(name, (slice(None),)) for name in source.tensors]


def test_a_device_reads_no_more_than_the_heads_it_has_a_share_of(tmp_path):
    """With each KV head on two ranks and padding on others, at most whole heads more."""
    path = write_llama(tmp_path / "model", **UNEVEN)
    on_mesh("TP8", check_uneven_bytes, path)


def check_uneven_bytes(mesh: str, path: Path) -> None:
    shapes = shapes_of(mesh, path)
    heads = 4 * 64 * 16 * 4 * (3 + 2 + 3)  # layers, hidden, head_dim, bytes; all of a KV head
    assert max(bytes_by_device(shapes, path).values()) <= shapes.weights_bytes + heads


@pytest.mark.parametrize("mesh", ["TP4 PP2", "TP8"])
def test_every_format_gives_a_mesh_the_same_parameters(tmp_path, mesh):
    """Those that one device would have, with copies and zeros where the mesh wants them."""
    path = write_llama(tmp_path / "model", **UNEVEN)
    convert(path, tmp_path / "orbax", dtype="float32")
    on_mesh(mesh, check_formats, path, tmp_path / "orbax")


def check_formats(mesh: str, path: Path, orbax: Path) -> None:
    for model, load_format in ((path, "auto"), (orbax, "auto"), (path, "dummy")):
        shapes = shapes_of(mesh, model, load_format=load_format)
        checkpoint = open_checkpoint(model, load_format)
        plain = param_specs(checkpoint.config)
        whole = load_params(checkpoint, plain, dtype="float32")
        by_parts = {
            spec.parts: np.asarray(array)
            for spec, array in zip(jax.tree.leaves(plain), jax.tree.leaves(whole), strict=True)
        }

        def wanted(spec, by_parts=by_parts):
            everything = tuple(slice(0, size) for size in spec.shape)
            return cut(lambda one, index: by_parts[one.parts][index], spec, everything)

        loaded = load_params(
            checkpoint, shapes.specs, dtype="float32", shardings=shapes.params.shardings
        )
        jax.tree.map(
            lambda spec, array, sharding: check_array(array, wanted(spec), sharding),
            shapes.specs,
            loaded,
            shapes.params.shardings,
        )


def check_array(array: jax.Array, expected: np.ndarray, sharding: jax.sharding.Sharding) -> None:
    assert array.sharding == sharding
    np.testing.assert_array_equal(array, expected)
