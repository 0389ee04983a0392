"""LoRA adapters (2106.09685) beside a model's weights: many of them, one for each token.

An adapter adds B A x to the product W x of a linear layer. The adapters of an engine are stacked in
buffers of one shape, with a slot for each, as in Punica (2310.18547) and S-LoRA (2311.03285). A
step multiplies its tokens with all of them and keeps of each token the products of its own adapter:
this reads every adapter once, where a gather for each token would read and copy one per token.
The dimensions above an adapter's rank are zero. A free slot has what was there before: no token's
adapter is there, and all numbers are finite.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.family import AnySpec, Params, ParamSpec, Rearranged, Stacked, TensorPart

SLOTS = "adapters"
"""The dimension of slots, of which no mesh axis has a part."""
A, B = ".lora_A.weight", ".lora_B.weight"
"""Endings of an adapter's tensors, after the name of a linear layer."""
_WEIGHT = ".weight"
_LINEAR = ("qkv", "attn_out", "gate_up", "down")
"""Parameters of a layer that adapters may change."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of one parameter, which has one or more linear layers as `parts`: specs, their
    shapes, or arrays.

    `a` [slots, parts, rank, in...]; `b` has an array [out..., slots, rank] for each part, and the
    outputs of the parts are concatenated along `axis` of out.
    """

    a: Any
    b: tuple[Any, ...]
    axis: int = dataclasses.field(metadata={"static": True})

    def delta(self, x: jax.Array, slots: jax.Array, matmul: Any) -> jax.Array:
        """What each token's adapter adds, [tokens, prod(out)], for x [tokens, in] and int32 slots
        [tokens], 0 for none. `matmul` is that of `models/layers.py`."""
        count, parts, rank, *_ = self.a.shape
        inner = matmul(self.a.reshape(-1, x.shape[-1]), x).reshape(-1, count, parts, rank)
        own = slots[:, None] == 1 + jnp.arange(count)
        inner = jnp.where(own[:, :, None, None], inner, 0)
        outer = [
            matmul(b.reshape(-1, count * rank), inner[:, :, part].reshape(-1, count * rank))
            for part, b in enumerate(self.b)
        ]
        if parts == 1:
            return outer[0]
        shaped = [y.reshape(-1, *b.shape[:-2]) for y, b in zip(outer, self.b)]
        return jnp.concatenate(shaped, axis=1 + self.axis).reshape(len(x), -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A weight, and the adapters of the tokens that it will be multiplied with."""

    weight: Any
    adapters: Adapters
    slots: jax.Array


def adapted(p: Params, adapters: dict[str, Adapters] | None, slots: jax.Array | None) -> Params:
    """The parameters of a layer with AdaptedWeights, for tokens with these slots."""
    if adapters is None or slots is None:
        return p
    return p | {name: AdaptedWeight(p[name], own, slots) for name, own in adapters.items()}


def adapter_specs(specs: Params, num_slots: int, rank: int) -> list[dict[str, Adapters]]:
    """Specs of all adapters, for each layer of a family's `specs`."""
    return [
        {name: _specs_of(layer[name], num_slots, rank) for name in _LINEAR if name in layer}
        for layer in specs["layers"]
    ]


def _specs_of(spec: ParamSpec, num_slots: int, rank: int) -> Adapters:
    inputs, names = spec.shape[-spec.num_inputs :], spec.axes[-spec.num_inputs :]
    modules = [part.tensor.removesuffix(_WEIGHT) for part in spec.parts]
    a = ParamSpec(
        shape=(num_slots, len(modules), rank, *inputs),
        axes=(SLOTS, None, None, *names),
        parts=tuple(TensorPart(module + A, (1, 1, rank, *inputs)) for module in modules),
    )
    b = []
    for place, (module, part) in enumerate(zip(modules, spec.parts)):
        outputs, axes = part.shape[: -spec.num_inputs], list(spec.axes[: -spec.num_inputs])
        if len(modules) > 1:  # Of fused projections the first are the queries.
            fused = axes[spec.concat_axis]
            axes[spec.concat_axis] = "queries" if fused == "qkv" and place == 0 else None
        own = TensorPart(module + B, outputs, part.first, part.rows)
        b.append(ParamSpec((*outputs, num_slots, rank), (*axes, SLOTS, None), (own,)))
    return Adapters(a, tuple(b), spec.concat_axis)


def of_one(spec: AnySpec) -> AnySpec:
    """The spec of one adapter's entries of a spec of all adapters."""
    match spec:
        case Stacked():
            return Stacked(tuple(map(of_one, spec.specs)))
        case Rearranged():
            return dataclasses.replace(spec, source=of_one(spec.source))
    shape = [1 if axis == SLOTS else size for size, axis in zip(spec.shape, spec.axes)]
    return dataclasses.replace(spec, shape=tuple(shape))


def modules_of(specs: Params) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers that adapters may change, by their names in a
    checkpoint, for a family's `specs`."""
    modules = {}
    for layer in specs["layers"]:
        for name in _LINEAR:
            spec = layer.get(name)
            for part in spec.parts if spec else ():
                rows = part.rows or math.prod(part.shape[: -spec.num_inputs])
                inputs = math.prod(spec.shape[-spec.num_inputs :])
                modules[part.tensor.removesuffix(_WEIGHT)] = rows, inputs
    return modules
