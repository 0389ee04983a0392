"""Shapes of parameters: of a model, of what drafts for it, and of LoRA adapters."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, Sharding

from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.models.family import AnySpec, Family, Params
from jaxserve.models.lora import Adapters, adapter_specs
from jaxserve.models.parallel import VOCAB
from jaxserve.models.partition import partition
from jaxserve.models.quantization import with_formats
from jaxserve.models.registry import get_family
from jaxserve.runtime.hardware.arrays import ArrayShapes, placed, tree_bytes
from pallas_kernels.quantized_matmul import QuantizedWeight
from sharding_rules import EXPERT_PARALLEL, MEGATRON, Rules

if TYPE_CHECKING:  # How files are read determines no program (program_sources.py).
    from jaxserve.models.loading.checkpoint import Checkpoint

_PARAMETERS = MEGATRON | {"vocab": VOCAB}
"""Rules for parameters: the vocabulary is split over stages too, to store no unused copies."""


@dataclasses.dataclass(frozen=True)
class ParamShapes:
    """Shapes of the parameters of a tree of `specs`, partitioned for the mesh of `arrays`. Without
    parameters `specs` is None, and so are `shardings` and `abstract`."""

    specs: Any
    arrays: ArrayShapes
    rules: Rules
    dtype: jnp.dtype

    @functools.cached_property
    def shardings(self) -> Any:
        """A sharding for each parameter; of one that is packed and split, for each plane."""
        return jax.tree.map(self._sharding_of, self.specs)

    def _sharding_of(self, spec: AnySpec) -> Sharding | QuantizedWeight:
        by_name = self.arrays.by_name
        if not spec.split:
            return by_name(spec.axes, spec.shape, self.rules)
        return jax.tree.map(
            lambda plane: by_name(spec.plane_axes(plane.shape), plane.shape, self.rules),
            spec.abstract(self.dtype),
        )

    @functools.cached_property
    def abstract(self) -> Any:
        """Shapes of the arrays of each parameter."""

        def all_placed(spec: AnySpec, sharding: Sharding | QuantizedWeight) -> Any:
            arrays = spec.abstract(self.dtype)
            if isinstance(sharding, Sharding):
                sharding = jax.tree.map(lambda array: sharding, arrays)
            return jax.tree.map(placed, arrays, sharding)

        return jax.tree.map(all_placed, self.specs, self.shardings)

    @property
    def num_bytes(self) -> int:
        """Bytes on one device."""
        return tree_bytes(self.abstract)


def param_rules(config: EngineConfig) -> Rules:
    """Which mesh axis each dimension of parameters is split over."""
    return _PARAMETERS | EXPERT_PARALLEL if config.enable_expert_parallel else _PARAMETERS


def partitioned(
    config: EngineConfig,
    checkpoint: Checkpoint,
    mesh: Mesh | AbstractMesh | None,
    quantization: str | None,
    specs: Params | None = None,
    model: ModelConfig | None = None,
) -> tuple[ModelConfig, Family, Params]:
    """A config, by default the checkpoint's, its family, and specs, by default the family's,
    partitioned for `mesh`."""
    # Context-dependent rotary frequencies are computed for the served context length.
    model = dataclasses.replace(
        model or checkpoint.config, max_position_embeddings=config.max_model_len
    )
    family = get_family(model.architecture)
    specs = with_formats(
        specs or family.param_specs(model),
        quantization,
        checkpoint.stored_format,
        checkpoint.quantization,
    )
    if mesh is not None:
        model, specs = partition(
            model,
            specs,
            tensor=config.tensor_parallel_size,
            stages=config.pipeline_parallel_size,
            vocab=config.tensor_parallel_size * config.pipeline_parallel_size,
            expert_ranks=config.tensor_parallel_size * config.context_parallel_size
            if config.enable_expert_parallel
            else None,
        )
    return model, family, specs


def partitioned_adapters(
    config: EngineConfig, model: ModelConfig, mesh: Mesh | AbstractMesh | None
) -> list[dict[str, Adapters]]:
    """Specs of the LoRA adapters of each layer, partitioned for `mesh`."""
    specs = get_family(model.architecture).param_specs(model)
    adapters = adapter_specs(specs, config.max_loras, config.max_lora_rank)
    if mesh is None:
        return adapters
    _, split = partition(
        model,
        {"layers": adapters},
        tensor=config.tensor_parallel_size,
        stages=config.pipeline_parallel_size,
        vocab=config.tensor_parallel_size * config.pipeline_parallel_size,
    )
    return split["layers"]
