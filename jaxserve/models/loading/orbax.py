"""Orbax checkpoints: those of `jaxserve convert`, each shard restored straight to its device, and
those of training, in a different layout."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxserve.core.errors import WeightsError
from jaxserve.core.model_files import check_regular
from jaxserve.models.family import AnySpec, Params, ParamSpec
from jaxserve.models.loading.assemble import Index, assemble, by_slice, check_tensors, cut
from jaxserve.models.loading.directory import ModelDirectory
from jaxserve.models.registry import param_specs

PARAMS = "params"
_CHUNK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class NamedArrays:
    """Arrays, or their shapes, as tensors: each is named by its path in a tree, joined by dots."""

    arrays: dict[str, Any]

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.arrays[name].shape) if name in self.arrays else None

    def read(self, name: str, index: Index) -> np.ndarray:
        return self.arrays[name][index]

    def unclaimed(self, names: set[str]) -> list[str]:
        return sorted(self.arrays.keys() - names)


@dataclasses.dataclass(frozen=True)
class OrbaxCheckpoint(ModelDirectory):
    """A directory with a config, a tokenizer, and the parameters under `params/`.

    These are the parameters of the family, as `save_params` writes them, or the tensors that the
    family's specs are made of, each at the path that is its name.
    """

    format = "orbax"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises ModelError for a malformed config or what is no regular file, WeightsError for an
        unreadable checkpoint."""
        checkpoint = super().open(path)
        for file in (path / PARAMS).rglob("*"):
            if not file.is_dir():
                check_regular(file)
        checkpoint.stored  # noqa: B018  (reads the metadata, to detect damage now)
        return checkpoint

    @property
    def fingerprint(self) -> str:
        return self.fingerprint_with(p for p in (self.path / PARAMS).rglob("*") if p.is_file())

    @functools.cached_property
    def stored(self) -> Params:
        """Tree of the stored arrays' metadata: shape and dtype."""
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                return checkpointer.metadata(self._params_path).item_metadata.tree
        except Exception as error:
            raise self._unreadable(error) from error

    def check(self, specs: Params) -> None:
        """Raise WeightsError unless the stored arrays are those the specs describe."""
        if self._of_tensors:
            check_tensors(NamedArrays(_named(self.stored)), specs, str(self._params_path))
            return
        stored, wanted = _shapes(self.stored), _shapes(specs)
        for name in sorted(stored.keys() | wanted.keys()):
            if stored.get(name) != wanted.get(name):
                raise WeightsError(
                    f"{self.path}: {name} is stored with shape {stored.get(name, 'absent')}, but "
                    f"the config implies {wanted.get(name, 'absent')}; convert the model again."
                )

    def restore(self, specs: Params, dtype: np.dtype, shardings: Params) -> Params:
        """The parameters, each shard read by the process and onto the device that holds it.

        If their layout must change, because they are stored as tensors or `specs` are partitioned
        for a mesh (models/partition.py), every process reads all of them first.
        """
        if self._of_tensors or not all(isinstance(s, ParamSpec) for s in jax.tree.leaves(specs)):
            return self._cut(specs, dtype, shardings)

        def abstract(spec: ParamSpec, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype or dtype, sharding=sharding)

        try:
            with ocp.StandardCheckpointer() as checkpointer:
                return checkpointer.restore(
                    self._params_path, jax.tree.map(abstract, specs, shardings)
                )
        except Exception as error:
            raise self._unreadable(error) from error

    def _cut(self, specs: Params, dtype: np.dtype, shardings: Params) -> Params:
        """Like `restore`, but reads all arrays to the host first."""
        stored = self._on_host()
        if self._of_tensors:
            tensors = NamedArrays(_named(stored))

            def block(spec: AnySpec, index: Index) -> np.ndarray:
                return assemble(tensors, spec, index, np.dtype(spec.dtype or dtype))

        else:
            as_stated = jax.tree.leaves(param_specs(self.config))
            arrays = {spec.parts: array for spec, (_, array) in zip(as_stated, _leaves(stored))}

            def read(spec: ParamSpec, index: Index) -> np.ndarray:
                return arrays[spec.parts][index].astype(spec.dtype or dtype)

            block = functools.partial(cut, read)

        def place(spec: AnySpec, sharding: jax.sharding.Sharding) -> jax.Array:
            return by_slice(spec.shape, sharding, functools.partial(block, spec))

        return jax.tree.map(place, specs, shardings)

    def _on_host(self) -> Params:
        """Tree of the stored arrays."""
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), self.stored)
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                return checkpointer.restore(self._params_path, restore_args=on_host)
        except Exception as error:
            raise self._unreadable(error) from error

    @functools.cached_property
    def _of_tensors(self) -> bool:
        """Whether the arrays are checkpoint tensors instead of the family's parameters."""
        specs, stored = param_specs(self.config), _named(self.stored)
        if _shapes(self.stored) == _shapes(specs):
            return False
        return any(part.tensor in stored for spec in jax.tree.leaves(specs) for part in spec.parts)

    @property
    def _params_path(self) -> Path:
        return (self.path / PARAMS).absolute()

    def _unreadable(self, error: Exception) -> WeightsError:
        """Orbax and the storage library below it raise many kinds of error for damaged files."""
        return WeightsError(
            f"{self._params_path} cannot be read as an Orbax checkpoint ({error}); "
            "convert the model again."
        )


def save_params(params: Params, directory: Path) -> None:
    """Write the parameters under `directory`, which is an Orbax checkpoint once it has a config.

    Uncompressed: weights shrink little, and compressing them takes eight times as long. In chunks,
    so that restoring a shard of a large array does not read all of it.
    """
    chunked = jax.tree.map(lambda array: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), params)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(
            (directory / PARAMS).absolute(), args=ocp.args.PyTreeSave(params, save_args=chunked)
        )


def _leaves(tree: Params) -> list[tuple[tuple, object]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))[0]


def _named(tree: Params) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    return {_name(path): leaf for path, leaf in _leaves(tree)}


def _shapes(tree: Params) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in _named(tree).items()}


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
