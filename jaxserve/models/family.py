"""What a model family provides, and how one of its parameters is found in a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.model_config import LayerKind, ModelConfig
from pallas_kernels.quantized_matmul import Format, QuantizedWeight, abstract_weight

Params = dict[str, Any]
Init = Literal["normal", "ones", "zeros"]


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """One checkpoint tensor, reshaped to `shape`, that makes up all or part of a parameter.

    `tensor` is the name in a Hugging Face checkpoint; other formats translate from it. Of a tensor
    that several parts share, a part is the rows from `first` on, of `rows` rows in all; with an
    `axis`, entries of that dimension of `shape` instead of rows.
    """

    tensor: str
    shape: tuple[int, ...]
    first: int = 0
    rows: int | None = None
    axis: int | None = None


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axes and origin of one parameter.

    `axes` names each dimension for the sharding rules. The parameter is its `parts` concatenated
    along `concat_axis`; a single part needs no axis. The last `num_inputs` dimensions are those
    that a linear layer contracts; 0 for other parameters. With a `format` the parameter is a
    QuantizedWeight [outputs, inputs] (models/quantization.py); if it is `split`, over a mesh, its
    planes keep the dimensions of its outputs, [*outputs, columns]. With a `dtype` it has that one,
    whatever the model's.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    parts: tuple[TensorPart, ...]
    concat_axis: int = 0
    init: Init = "normal"
    num_inputs: int = 0
    format: Format | None = None
    split: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """Outputs and inputs of a matrix."""
        inputs = math.prod(self.shape[-self.num_inputs :])
        return self.size // inputs, inputs

    @property
    def rows(self) -> tuple[int, ...]:
        """Dimensions of the planes of a QuantizedWeight before their columns."""
        return self.shape[: -self.num_inputs] if self.split else self.matrix[:1]

    @property
    def orders(self) -> tuple[int, ...]:
        """Those of its order of inputs: each expert's tensors have their own."""
        named = zip(self.shape, self.axes[: -self.num_inputs])
        orders = tuple(size if axis == "experts" else 1 for size, axis in named)
        return orders if self.split else (math.prod(orders),)

    def plane_axes(self, plane: tuple[int, ...]) -> tuple[str | None, ...]:
        """Names of the dimensions of a split parameter's plane of this shape; None for dimensions
        of one entry, which is of all rows or all columns."""
        axes = self.axes[: 1 - self.num_inputs or None]
        return tuple(axis if size > 1 else None for axis, size in zip(axes, plane, strict=True))

    def abstract(self, dtype: jnp.dtype) -> jax.ShapeDtypeStruct | QuantizedWeight:
        """Shape and dtype of the parameter in a model of `dtype`."""
        if self.format is None:
            return jax.ShapeDtypeStruct(self.shape, self.dtype or dtype)
        planes = abstract_weight(*self.matrix, self.format)
        return planes_of(planes, self.rows, self.orders, _abstract_plane)


@dataclasses.dataclass(frozen=True, eq=False)
class Rearranged:
    """A parameter whose entries are reordered, replicated or padded with zeros.

    `rows`, integers of any shape, replaces as many dimensions of `source`, starting at `first`. Its
    entries are indices into those dimensions flattened; -1 is for zeros.
    """

    source: ParamSpec
    first: int
    rows: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self.source.shape
        return (*whole[: self.first], *self.rows.shape, *whole[self.first + self.rows.ndim :])

    @property
    def axes(self) -> tuple[str | None, ...]:
        return self.source.axes

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def parts(self) -> tuple[TensorPart, ...]:
        return self.source.parts

    @property
    def format(self) -> Format | None:
        return self.source.format

    @property
    def dtype(self) -> str | None:
        return self.source.dtype

    split = False

    def abstract(self, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype or dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """Parameters of equal shapes and formats, stacked along a new first dimension "layers". Of
    those with a format, each plane is stacked."""

    specs: tuple[ParamSpec | Rearranged, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.specs), *self.specs[0].shape)

    @property
    def axes(self) -> tuple[str | None, ...]:
        return ("layers", *self.specs[0].axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def parts(self) -> tuple[TensorPart, ...]:
        return tuple(part for spec in self.specs for part in spec.parts)

    @property
    def format(self) -> Format | None:
        return self.specs[0].format

    @property
    def split(self) -> bool:
        return self.specs[0].split

    @property
    def dtype(self) -> str | None:
        return self.specs[0].dtype

    def plane_axes(self, plane: tuple[int, ...]) -> tuple[str | None, ...]:
        """As of the parameters that are stacked."""
        return ("layers", *self.specs[0].plane_axes(plane[1:]))

    def abstract(self, dtype: jnp.dtype) -> jax.ShapeDtypeStruct | QuantizedWeight:
        """Shape and dtype of the parameter in a model of `dtype`."""
        return jax.tree.map(
            lambda one: jax.ShapeDtypeStruct((len(self.specs), *one.shape), one.dtype),
            self.specs[0].abstract(dtype),
        )


def planes_of(
    weight: QuantizedWeight,
    rows: tuple[int, ...],
    orders: tuple[int, ...],
    plane_of: Callable[[Any, tuple[int, ...]], Any],
) -> QuantizedWeight:
    """A weight of `plane_of(plane, shape)`, where planes have these dimensions before their
    columns."""

    def of(plane: Any, before: tuple[int, ...]) -> Any:
        return None if plane is None else plane_of(plane, (*before, plane.shape[-1]))

    return QuantizedWeight(
        of(weight.values, rows),
        of(weight.scales, rows),
        of(weight.minima, rows),
        weight.format,
        of(weight.order, orders),
    )


def _abstract_plane(plane: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, plane.dtype)


AnySpec = ParamSpec | Rearranged | Stacked
"""A leaf of a tree of specs: a parameter as its family defines it, or partitioned for a mesh
(models/partition.py)."""


def one_tensor(
    tensor: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Init = "normal",
    num_inputs: int = 0,
) -> ParamSpec:
    """Spec of a parameter that is one checkpoint tensor, seen as `shape`."""
    return ParamSpec(shape, axes, (TensorPart(tensor, shape),), init=init, num_inputs=num_inputs)


class Attention(Protocol):
    """Attention of one layer, from the runtime: paged in the engine, dense in a reference.

    `q` [tokens, query_heads, head_dim], `k` and `v` [tokens, kv_heads, head_dim], rotated; returns
    [tokens, query_heads, head_dim]. Query head h reads KV head h // queries_per_kv. `sinks`
    [query_heads] are logits in each softmax without a value (2309.17453). Of a model with `mla`,
    `v` has the first `value_dim` features of `k`, and so has the result.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array: ...


class LayeredAttention(Protocol):
    """Attention of a whole model: like `Attention`, with the index of the layer."""

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture: reads its config, locates its weights, computes its layers.

    config_from_hf(raw): the ModelConfig of a parsed `config.json`.
    param_specs(config): a tree of ParamSpec with the structure of the parameters; its "layers" is
        a list with one entry per layer.
    embed(params, config, token_ids, positions): activations [tokens, hidden] before the first
        layer, and data that all layers share (rotations), arrays [tokens, ...], for int32 [tokens]
        ids and positions.
    layer(p, config, kind, x, shared, attention): the activations after one layer with the
        parameters `p`, an entry of "layers". Within `layers.pending_sums` they may be a PendingSum,
        which the next layer then takes.
    final_norm(params, config, x): the final hidden states [tokens, hidden].
    logits(params, config, hidden): float32 [rows, vocab] of hidden states [rows, hidden].
    other_tensors: prefixes of checkpoint tensors that the model does without, such as those of a
        vision tower beside a language model.

    Only `layer` reads "layers"; the other functions may get the parameters without them.
    """

    config_from_hf: Callable[[dict[str, Any]], ModelConfig]
    param_specs: Callable[[ModelConfig], Params]
    embed: Callable[[Params, ModelConfig, jax.Array, jax.Array], tuple[jax.Array, Any]]
    layer: Callable[[Params, ModelConfig, LayerKind, jax.Array, Any, Attention], jax.Array]
    final_norm: Callable[[Params, ModelConfig, jax.Array], jax.Array]
    logits: Callable[[Params, ModelConfig, jax.Array], jax.Array]
    other_tensors: tuple[str, ...] = ()

    def forward(
        self,
        params: Params,
        config: ModelConfig,
        token_ids: jax.Array,
        positions: jax.Array,
        attention: LayeredAttention,
    ) -> jax.Array:
        """The whole model: final hidden states [tokens, hidden].

        Layers are unrolled: a loop over stacked weights copies every slice on CPUs and GPUs
        (docs/decisions/002-programs.md).
        """
        x, shared = self.embed(params, config, token_ids, positions)
        for index, (p, kind) in enumerate(zip(params["layers"], config.layer_kinds)):
            x = self.layer(p, config, kind, x, shared, functools.partial(attention, index))
        return self.final_norm(params, config, x)
