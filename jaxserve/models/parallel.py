"""Communication between the ranks of a mesh within a model (Megatron-LM, 1909.08053).

Inside `jax.shard_map` a rank of `tensor` has its heads and its part of the MLP and of the
vocabulary. A linear layer is column-parallel when its outputs are split over ranks, and
row-parallel when its inputs are; the latter's results are partial sums. Without a mesh there is one
rank, and the collectives here do nothing.

Between sublayers every rank has all tokens. With `sequence_parallel` (2205.05198) it has its share
of them: norms and residuals are not computed n times, and the sum of a row-parallel layer is
reduce-scattered, then gathered by the next column-parallel layer.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collective_matmul import (
    CollectiveRates,
    all_gather_matmul,
    matmul_reduce_scatter,
)
from sharding_rules import SEQ, STAGE, TENSOR

VOCAB = (STAGE, TENSOR)
"""Mesh axes that the vocabulary is split over."""

Product = Callable[[Any, jax.Array], jax.Array]
"""weight [out, in], x [tokens, in] -> [tokens, out]."""

_sequence_parallel: contextvars.ContextVar[CollectiveRates | bool | None] = contextvars.ContextVar(
    "sequence_parallel", default=False
)
_replicated: contextvars.ContextVar[int] = contextvars.ContextVar("replicated", default=0)


@contextlib.contextmanager
def sequence_parallel(rates: CollectiveRates | None) -> Iterator[None]:
    """Traces layers with sequence parallelism: each rank of `tensor` has its share of the tokens.

    `rates` of the devices decide whether products and collectives overlap.
    """
    token = _sequence_parallel.set(rates)
    try:
        yield
    finally:
        _sequence_parallel.reset(token)


def bound(*axes: str) -> tuple[str, ...]:
    """Those of the mesh axes over which the code being traced runs on several ranks."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in axes if axis in mesh.manual_axes and mesh.shape[axis] > 1)


def one_rank() -> bool:
    """Whether a row-parallel product is whole on this rank, and nothing is to be summed."""
    return not bound(TENSOR)


def column_parallel(product: Product, weight: Any, x: jax.Array) -> jax.Array:
    """This rank's outputs, `product(weight, x)`, for all tokens; x may hold a share of them."""
    rates = _sequence_parallel.get()
    if rates is False or not bound(TENSOR):
        return product(weight, x)
    return all_gather_matmul(weight, x, TENSOR, rates=rates, product=product)


def row_parallel(product: Product, weight: Any, x: jax.Array) -> jax.Array:
    """The sum over ranks of `product(weight, x)`: for all tokens, or for this rank's share."""
    rates = _sequence_parallel.get()
    if not bound(TENSOR):
        return product(weight, x)
    if rates is False:
        return lax.psum(product(weight, x), TENSOR)
    return matmul_reduce_scatter(weight, x, TENSOR, rates=rates, product=product)


def enter_layers(x: jax.Array) -> jax.Array:
    """x [tokens, features] as a rank has it between layers: its share with sequence parallelism."""
    if _sequence_parallel.get() is False or not bound(TENSOR):
        return x
    count = len(x) // lax.axis_size(TENSOR)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(TENSOR) * count, count)


def leave_layers(x: jax.Array) -> jax.Array:
    """All tokens of x, on every rank."""
    if _sequence_parallel.get() is False or not bound(TENSOR):
        return x
    return lax.all_gather(x, TENSOR, tiled=True)


@contextlib.contextmanager
def context_parallel(replicated: int) -> Iterator[None]:
    """Traces a layer with context parallelism: of its tokens the first `replicated` are those of
    every rank of `seq`, the others its share of as many for each."""
    token = _replicated.set(replicated)
    try:
        yield
    finally:
        _replicated.reset(token)


def gather_over_seq(x: jax.Array) -> jax.Array:
    """x of all tokens, those of the other ranks of `seq` too, on each of them."""
    count = _replicated.get()
    if not bound(SEQ) or len(x) == count:
        return x
    return jnp.concatenate([x[:count], lax.all_gather(x[count:], SEQ, tiled=True)])


def sum_over_seq(x: jax.Array) -> jax.Array:
    """The sum over ranks of `seq` of x, each rank's result for the tokens of `gather_over_seq`: for
    the tokens of this rank."""
    if not bound(SEQ):
        return x
    count = _replicated.get()
    if len(x) == count:
        return lax.psum(x, SEQ)
    own = lax.psum_scatter(x[count:], SEQ, scatter_dimension=0, tiled=True)
    return jnp.concatenate([lax.psum(x[:count], SEQ), own]) if count else own


def gather_tokens(x: jax.Array) -> jax.Array:
    """All tokens of x, for layers whose weights each rank has a part of; see `sum_parts`."""
    return leave_layers(x)


def gather_features(x: jax.Array) -> jax.Array:
    """x [tokens, features] of which each rank has its own features, as [tokens, all features]."""
    return lax.all_gather(x, TENSOR, axis=1, tiled=True) if bound(TENSOR) else x


def sum_parts(x: jax.Array) -> jax.Array:
    """The sum over ranks of x, each rank's result for all tokens: for all of them, or for this
    rank's share."""
    if not bound(TENSOR):
        return x
    if _sequence_parallel.get() is False:
        return lax.psum(x, TENSOR)
    return lax.psum_scatter(x, TENSOR, scatter_dimension=0, tiled=True)


def on_first_rank(x: jax.Array) -> jax.Array:
    """x on the first rank and zeros on the others, so that a sum over ranks has it once."""
    return jnp.where(lax.axis_index(TENSOR) == 0, x, 0) if bound(TENSOR) else x


def first_expert(count: int, num_experts: int) -> jax.Array | int:
    """Index of this rank's first expert, where it has `count` of `num_experts`."""
    axes = bound(SEQ, TENSOR)
    return lax.axis_index(axes) * count if count < num_experts and axes else 0


def sum_over_heads(x: jax.Array) -> jax.Array:
    """The sum over all ranks of x, which each computes from its own heads."""
    return lax.psum(x, TENSOR) if bound(TENSOR) else x


def look_up(rows: Callable[[jax.Array], jax.Array], token_ids: jax.Array, count: int) -> jax.Array:
    """Rows of a vocabulary table, of which each rank has `count`: `rows(ids)` are a rank's own.

    token_ids int32 [tokens]; rows [tokens, ...].
    """
    axes = bound(*VOCAB)
    if not axes:
        return rows(token_ids)
    ids = token_ids - first_of_vocab(count)
    found = rows(ids)
    here = ((ids >= 0) & (ids < count)).reshape(-1, *[1] * (found.ndim - 1))
    return lax.psum(jnp.where(here, found, 0), axes)


def mask_vocab(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Logits [rows, part of the vocabulary] with -inf for padding."""
    axes, count = bound(*VOCAB), logits.shape[1]
    if not axes or count * lax.axis_size(axes) == vocab_size:
        return logits
    token = first_of_vocab(count) + jnp.arange(count)
    return jnp.where(token < vocab_size, logits, -jnp.inf)


def num_vocab_ranks() -> int:
    """Ranks that the vocabulary is split over."""
    axes = bound(*VOCAB)
    return lax.axis_size(axes) if axes else 1


def first_of_vocab(count: int) -> jax.Array | int:
    """Id of this rank's first token, where each rank has `count`."""
    axes = bound(*VOCAB)
    return lax.axis_index(axes) * count if axes else 0


def max_over_vocab(x: jax.Array) -> jax.Array:
    """The maximum of x over the ranks of the vocabulary."""
    axes = bound(*VOCAB)
    return lax.pmax(x, axes) if axes else x


def sum_over_vocab(x: jax.Array) -> jax.Array:
    """The sum of x over the ranks of the vocabulary."""
    axes = bound(*VOCAB)
    return lax.psum(x, axes) if axes else x


def gather_over_vocab(x: jax.Array) -> jax.Array:
    """x [rows, n] of all ranks of the vocabulary, concatenated: [rows, ranks * n]."""
    axes = bound(*VOCAB)
    return lax.all_gather(x, axes, axis=1, tiled=True) if axes else x


def vocab_parallel_argmax(places: jax.Array, values: jax.Array, count: int) -> jax.Array:
    """Token ids int32 [rows] of the largest values, the lowest id on ties.

    Each rank has found its largest `values` [rows] at `places` int32 [rows] among its `count`
    tokens; -1 means none, and is the result if no rank found any.
    """
    axes = bound(*VOCAB)
    if not axes:
        return places
    found = places >= 0
    bests = lax.all_gather(jnp.where(found, values, -jnp.inf), axes)
    ids = lax.all_gather(jnp.where(found, places + first_of_vocab(count), -1), axes)
    return jnp.take_along_axis(ids, jnp.argmax(bests, axis=0)[None], axis=0)[0]


def of_last_stage(x: jax.Array) -> jax.Array:
    """The last stage's x, on every stage."""
    if not bound(STAGE):
        return x
    return lax.psum(jnp.where(lax.axis_index(STAGE) == lax.axis_size(STAGE) - 1, x, 0), STAGE)
