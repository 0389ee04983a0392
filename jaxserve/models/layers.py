"""Layers that model families share: pure functions of activations [tokens, features].

A weight is [out, in], as checkpoints store it, so a linear layer is `x @ weight.T`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.models import parallel
from jaxserve.models.lora import AdaptedWeight
from pallas_kernels.platforms import by_platform
from pallas_kernels.quantized_matmul import QuantizedWeight, dequantize, quantized_matmul
from pallas_kernels.residual_norm import add_and_norm, product_parts

Weight = jax.Array | QuantizedWeight | AdaptedWeight

FEW_TOKENS = 64
"""Up to this many tokens CPUs multiply faster with the weight on the left
(docs/decisions/013-token-major.md)."""


class PendingSum(NamedTuple):
    """The residual stream before the last product is added: `x` [tokens, hidden] plus the sum of
    `parts` [n, tokens, hidden]. The norm that comes next adds them in its own kernel."""

    x: jax.Array
    parts: jax.Array


Residual = jax.Array | PendingSum

_pending: contextvars.ContextVar[bool] = contextvars.ContextVar("pending", default=False)


@contextlib.contextmanager
def pending_sums(allowed: bool = True) -> Iterator[None]:
    """Traces layers that may return a PendingSum, where the target device has a kernel for it."""
    token = _pending.set(allowed)
    try:
        yield
    finally:
        _pending.reset(token)


def settled(x: Residual) -> jax.Array:
    """The residual stream [tokens, hidden], with everything added."""
    if not isinstance(x, PendingSum):
        return x
    return x.x + jnp.sum(x.parts, axis=0).astype(x.x.dtype)


def normed(x: Residual, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """The residual stream settled, and its RMS norm."""
    if isinstance(x, PendingSum):
        return add_and_norm(x.x, x.parts, weight, eps=eps)
    return x, rms_norm(x, weight, eps)


def embed(table: Weight, token_ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of `table` [vocab, hidden] for int32 token_ids [tokens], as [tokens, hidden]."""

    def rows(ids: jax.Array) -> jax.Array:
        found = jax.tree.map(lambda plane: plane.at[ids].get(mode="clip"), table)
        return dequantize(found) if isinstance(found, QuantizedWeight) else found

    return parallel.look_up(rows, token_ids, table.shape[0]).astype(dtype)


def column_parallel(weight: Weight, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [tokens, in] times `weight` [out..., in...], plus bias [out...]: [tokens, prod(out)].

    Each rank of a mesh has its own outputs. The trailing dimensions of `weight` whose product is
    `in` are contracted, so that a parameter can have a dimension of heads for the sharding rules; a
    quantized one contracts the last.
    """
    return add_bias(parallel.column_parallel(product, _matrix(weight, x), x), bias)


def row_parallel(weight: Weight, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Like `column_parallel`, but each rank of a mesh has its own inputs: results are summed."""
    adapted = _matrix(weight, x)
    own = adapted.weight if isinstance(adapted, AdaptedWeight) else adapted
    own, inputs = in_order(own, x)

    def of_rank(own: Weight, inputs: jax.Array) -> jax.Array:
        y = product(own, inputs)
        return y + _delta(adapted, x) if isinstance(adapted, AdaptedWeight) else y

    return add_bias(parallel.row_parallel(of_rank, own, inputs), bias)


def add_row_parallel(
    residual: jax.Array, weight: Weight, x: jax.Array, bias: jax.Array | None = None
) -> Residual:
    """`residual` [tokens, out] plus `row_parallel`; within `pending_sums` perhaps not added yet."""
    plain = isinstance(weight, jax.Array) and bias is None and parallel.one_rank()
    if _pending.get() and plain:
        parts = product_parts(x, _matrix(weight, x), residual)
        if parts is not None:
            return PendingSum(residual, parts)
    return residual + row_parallel(weight, x, bias)


def in_order(weight: Weight, x: jax.Array) -> tuple[Weight, jax.Array]:
    """A matrix of which each rank of a mesh has its own inputs, and the inputs of its columns, for
    this rank's x [tokens, in]. Those of a weight with an order of inputs are anywhere: all ranks
    gather the features of x."""
    if not isinstance(weight, QuantizedWeight) or weight.order is None:
        return weight, x
    return weight.unordered, parallel.gather_features(x)[:, weight.order[0]]


def replicated(weight: Weight, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Like `column_parallel`, without communication: for the tokens of `x` alone, and the outputs
    that this rank has of `weight`."""
    return add_bias(product(_matrix(weight, x), x), bias)


def _matrix(weight: Weight, x: jax.Array) -> Weight:
    if isinstance(weight, AdaptedWeight):
        return dataclasses.replace(weight, weight=_matrix(weight.weight, x))
    if isinstance(weight, QuantizedWeight):
        return jax.tree.map(lambda plane: plane.reshape(-1, plane.shape[-1]), weight)
    return weight.reshape(-1, x.shape[-1])


def product(weight: Weight, x: jax.Array) -> jax.Array:
    """x [tokens, in] times a matrix [out, in] transposed: [tokens, out]."""
    if isinstance(weight, AdaptedWeight):
        return product(weight.weight, x) + _delta(weight, x)
    return quantized_matmul(weight, x) if isinstance(weight, QuantizedWeight) else matmul(weight, x)


def _delta(weight: AdaptedWeight, x: jax.Array) -> jax.Array:
    """What adapters add; of a row-parallel layer, a rank's part of the sum, as the product is."""
    return weight.adapters.delta(x, weight.slots, matmul)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y [tokens, out] plus bias [out...], if there is one."""
    return y if bias is None else y + bias.reshape(-1)


def matmul(weight: jax.Array, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """x [tokens, in] times `weight` [out, in] transposed: [tokens, out], summed in float32.

    dtype: of the result, by default that of x.
    """
    dtype = dtype or x.dtype

    def default(weight: jax.Array, x: jax.Array) -> jax.Array:
        return _dot(x, weight, dtype)

    def cpu(weight: jax.Array, x: jax.Array) -> jax.Array:
        # With results of float32 the weight is read in its own dtype, and not converted first.
        if len(x) > FEW_TOKENS:
            return _dot(x, weight, jnp.float32).astype(dtype)
        if len(x) == 1 and x.dtype == jnp.bfloat16:
            # A product would first convert the weight; a sum of multiples converts as it reads.
            multiples = weight.astype(jnp.float32) * x.astype(jnp.float32)
            return jnp.sum(multiples, axis=1)[None].astype(dtype)
        # Without the barrier XLA turns the product around.
        y = jax.lax.optimization_barrier(_dot(weight, x, jnp.float32))
        return y.T.astype(dtype)

    return by_platform(weight, x, cpu=cpu, default=default)


def _dot(rows: jax.Array, columns: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """rows [n, in] times columns [m, in] transposed: [n, m] of `dtype`.

    Transposing an operand instead would hide from XLA's CPU backend what it can multiply directly.
    """
    both = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(rows, columns, both, preferred_element_type=dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the features of x [..., features] (1910.07467)."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight


def gated_mlp(
    x: jax.Array,
    gate_up: Weight,
    down: Weight,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
) -> jax.Array:
    """GLU (2002.05202) of x [tokens, hidden]: gate_up [2, ff, hidden], down [hidden, ff]."""
    return row_parallel(down, gated(x, gate_up, gate_up_bias, activation), down_bias)


def gated(
    x: jax.Array,
    gate_up: Weight,
    bias: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
) -> jax.Array:
    """What a GLU projects down: [tokens, ff]."""
    gate, up = jnp.split(column_parallel(gate_up, x, bias), 2, axis=-1)
    return activation(gate) * up


def tied_or_own_logits(
    head: Weight, hidden: jax.Array, vocab_size: int, soft_cap: float | None = None
) -> jax.Array:
    """Logits float32 [rows, vocab] of hidden states [rows, hidden] for a head [vocab, hidden].

    On a mesh, of each rank's part of the vocabulary.
    """
    if isinstance(head, QuantizedWeight):
        logits = quantized_matmul(head, hidden, jnp.float32)
    else:
        logits = matmul(head, hidden, jnp.float32)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    return parallel.mask_vocab(logits, vocab_size)
