"""Random weights of any config, for benchmarks without a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxserve.core.model_config import ModelConfig
from jaxserve.models import quantization_config
from jaxserve.models.family import AnySpec, Params, Rearranged, Stacked
from jaxserve.models.loading.directory import CONFIG, ModelDirectory
from jaxserve.models.loading.gguf.checkpoint import GgufCheckpoint
from jaxserve.models.quantization_scheme import QuantizationConfig
from jaxserve.text.tokenizer import Tokenizer
from pallas_kernels.quantized_matmul import MXFP4, Format

_SCALE = 0.02
_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")


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

    @property
    def quantization(self) -> str | None:
        return quantization_config.method_of(self.config_files()[CONFIG])

    def is_quantized(self, name: str) -> bool:
        if self._has_mxfp4:
            return bool(_EXPERT.search(name))
        return bool(self._stored and self._stored.scheme(name.removesuffix(".weight")))

    def stored_format(self, name: str, num_inputs: int) -> Format | None:
        """The format of a weight that is stored as config.json says: random ones are rounded to
        it."""
        if self._has_mxfp4 and _EXPERT.search(name):
            return MXFP4
        scheme = self._stored.scheme(name.removesuffix(".weight")) if self._stored else None
        return scheme.format(num_inputs) if scheme else None

    @functools.cached_property
    def _stored(self) -> QuantizationConfig | None:
        return quantization_config.parse(self.config_files()[CONFIG])

    @functools.cached_property
    def _has_mxfp4(self) -> bool:
        return self.quantization == "mxfp4"

    def config_files(self) -> dict[str, dict[str, Any]]:
        return self.source.config_files()

    def check(self, specs: Params) -> None:
        """Random weights always match the specs."""

    def restore(self, specs: Params, dtype: np.dtype, shardings: Params) -> Params:
        """Weights drawn on the devices that hold them: normal with deviation 0.02, norms one.

        The values depend on the seed and on a parameter's name, not on shardings.
        """
        seed = jax.random.key(self.seed)

        def draw(spec: AnySpec, sharding: Sharding) -> jax.Array:
            layers = spec.specs if isinstance(spec, Stacked) else (spec,)
            names = [zlib.crc32(layer.parts[0].tensor.encode()) for layer in layers]
            keys = jax.vmap(functools.partial(jax.random.fold_in, seed))(np.array(names, np.uint32))
            rows = None
            if isinstance(layers[0], Rearranged):
                first, rows = layers[0].first, layers[0].rows
                rows = (first, rows.shape, rows.tobytes(), rows.dtype)
            plain = layers[0].source if rows else layers[0]
            stacked = isinstance(spec, Stacked)
            own = np.dtype(spec.dtype or dtype)
            return _program(plain.shape, plain.init, rows, stacked, own, sharding)(keys)

        return jax.tree.map(draw, specs, shardings)


@functools.cache
def _program(
    shape: tuple[int, ...],
    init: str,
    rows: tuple[int, tuple[int, ...], bytes, np.dtype] | None,
    stacked: bool,
    dtype: np.dtype,
    sharding: Sharding,
) -> Any:
    """One compiled program per kind of parameter, shared by all layers. `rows` are those of a
    Rearranged."""

    def draw(key: jax.Array) -> jax.Array:
        match init:
            case "ones":
                values = jnp.ones(shape, dtype)
            case "zeros":
                values = jnp.zeros(shape, dtype)
            case _:
                values = (_SCALE * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
        if rows is None:
            return values
        first, sizes, content, kind = rows
        places = np.frombuffer(content, kind).reshape(sizes)
        values = values.reshape(*shape[:first], -1, *shape[first + len(sizes) :])
        return jnp.take(
            values,
            jnp.where(places < 0, values.shape[first], places),
            axis=first,
            mode="fill",
            fill_value=0,
        )

    def draw_all(keys: jax.Array) -> jax.Array:
        drawn = [draw(key) for key in keys]
        return jnp.stack(drawn) if stacked else drawn[0]

    return jax.jit(draw_all, out_shardings=sharding)
