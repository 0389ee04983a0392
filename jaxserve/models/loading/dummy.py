"""Random weights of any config, for benchmarks of models one does not have."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxserve.models.config import ModelConfig
from jaxserve.models.family import Params
from jaxserve.models.loading.directory import ModelDirectory
from jaxserve.models.loading.gguf import GgufCheckpoint
from jaxserve.text.tokenizer import Tokenizer

_SCALE = 0.02


@dataclasses.dataclass(frozen=True)
class DummyCheckpoint:
    """The config and tokenizer of `source` with weights drawn from `seed`."""

    source: ModelDirectory | GgufCheckpoint
    seed: int = 0

    format = "dummy"

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"dummy {self.seed} {self.config}".encode()).hexdigest()

    def tokenizer(self) -> Tokenizer:
        return self.source.tokenizer()

    def packed_kind(self, name: str) -> None:
        """What is random is in no blocks, whatever the source is."""

    def config_files(self) -> dict[str, dict[str, Any]]:
        return self.source.config_files()

    def check(self, specs: Params) -> None:
        """Weights made to the specs match them."""

    def restore(self, specs: Params, dtype: np.dtype, shardings: Params) -> Params:
        """Weights drawn on the devices that keep them: normal with deviation 0.02, norms one.

        The values depend on the seed and on a parameter's place in the tree, not on shardings.
        """
        leaves, structure = jax.tree.flatten(specs)
        key = jax.random.key(self.seed)
        arrays = [
            _program(spec.shape, spec.init, dtype, sharding)(jax.random.fold_in(key, place))
            for place, (spec, sharding) in enumerate(
                zip(leaves, structure.flatten_up_to(shardings))
            )
        ]
        return structure.unflatten(arrays)


@functools.cache
def _program(shape: tuple[int, ...], init: str, dtype: np.dtype, sharding: Sharding) -> Any:
    """One compiled program per kind of parameter, shared by all layers."""

    def draw(key: jax.Array) -> jax.Array:
        match init:
            case "ones":
                return jnp.ones(shape, dtype)
            case "zeros":
                return jnp.zeros(shape, dtype)
        return (_SCALE * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return jax.jit(draw, out_shardings=sharding)
