"""Parameters of a Flax NNX model in the structure of an engine's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.core.errors import WeightsError
from jaxserve.core.model_config import ModelConfig
from jaxserve.models.family import Params, ParamSpec, TensorPart
from jaxserve.models.registry import param_specs

_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
"""Names of NNX's layers for a parameter, and of checkpoints."""


def from_flax(model: nnx.Module, config: ModelConfig) -> Params:
    """The parameters of an NNX model, for `update_weights` of an engine of `config`
    (`LLM.model_config`). Can be compiled by `nnx.jit`.

    Modules are named as in a Hugging Face checkpoint (`layers[0].self_attn.q_proj`), with or
    without the outer `model`, and are NNX's own or have its parameters: `kernel` [inputs, outputs],
    of any number of dimensions each, `embedding`, `scale` and `bias`.

    Raises WeightsError for a parameter that is missing, has another size, or is not of the model.
    """
    arrays = dict(_named(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    specs = param_specs(config)
    needed = {_short(part.tensor) for spec in jax.tree.leaves(specs) for part in spec.parts}
    for name in arrays:
        if name not in needed:
            raise WeightsError(f"{name} is not a parameter of {config.architecture}.")
    return jax.tree.map(lambda spec: _assembled(arrays, spec), specs)


def _named(tree: Any) -> Iterator[tuple[str, tuple[str, jax.Array]]]:
    """The kind and array of each parameter, by its short name in a checkpoint."""
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        *module, kind = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        yield _short(".".join([*module, _LEAVES.get(kind, kind)])), (kind, array)


def _short(tensor: str) -> str:
    return tensor.removeprefix("model.")


def _assembled(arrays: Mapping[str, tuple[str, jax.Array]], spec: ParamSpec) -> jax.Array:
    parts = [_part(arrays, spec, part) for part in spec.parts]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=spec.concat_axis)


def _part(
    arrays: Mapping[str, tuple[str, jax.Array]], spec: ParamSpec, part: TensorPart
) -> jax.Array:
    name = _short(part.tensor)
    if name not in arrays:
        raise WeightsError(f"{name} is missing in the NNX model.")
    kind, array = arrays[name]
    if kind == "kernel":
        _, inputs = spec.matrix
        if array.size % inputs == 0:
            array = array.reshape(inputs, -1).T
    if array.size != math.prod(part.shape):
        raise WeightsError(
            f"{name} has shape {list(array.shape)}; the config implies {list(part.shape)}."
        )
    return array.reshape(part.shape)
