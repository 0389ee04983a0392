"""What a model family provides, and how one of its parameters is found in a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax

from jaxserve.models.config import ModelConfig

Params = dict[str, Any]
Init = Literal["normal", "ones", "zeros"]


@dataclasses.dataclass(frozen=True)
class Part:
    """One checkpoint tensor, reshaped to `shape`, that makes up all or part of a parameter.

    `tensor` is the name in a Hugging Face checkpoint; other formats translate from it.
    """

    tensor: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axes and origin of one parameter.

    `axes` names each dimension for the sharding rules. The parameter is its `parts` concatenated
    along `concat_axis`; a single part needs no axis.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    parts: tuple[Part, ...]
    concat_axis: int = 0
    init: Init = "normal"

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def one_tensor(
    tensor: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init: Init = "normal"
) -> ParamSpec:
    """Spec of a parameter that is one checkpoint tensor, seen as `shape`."""
    return ParamSpec(shape=shape, axes=axes, parts=(Part(tensor, shape),), init=init)


class Attention(Protocol):
    """Attention of one layer as the runtime supplies it: paged in the engine, dense in an oracle.

    `q` [tokens, query_heads, head_dim], `k` and `v` [tokens, kv_heads, head_dim], rotated; returns
    [tokens, query_heads, head_dim]. Query head h reads KV head h // queries_per_kv.
    """

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture: how to read its config, where its weights are, and what it computes.

    `config_from_hf` takes the parsed `config.json`. `param_specs` returns a pytree of ParamSpec
    with the structure of the parameters. `forward(params, config, token_ids, positions, attention)`
    takes int32 [tokens] twice and returns the final hidden states [hidden, tokens], normed;
    `logits(params, config, hidden)` turns [hidden, rows] into [vocab, rows] float32.
    """

    config_from_hf: Callable[[dict[str, Any]], ModelConfig]
    param_specs: Callable[[ModelConfig], Params]
    forward: Callable[[Params, ModelConfig, jax.Array, jax.Array, Attention], jax.Array]
    logits: Callable[[Params, ModelConfig, jax.Array], jax.Array]
