"""Signatures of collective matmuls: products with tokens split over a mesh axis.

Tensor parallelism splits a layer's first weight by outputs and its second by inputs; sequence
parallelism (2205.05198) splits activations between layers by tokens, so each norm is computed once:

    x [tokens / n, in]  --all_gather_matmul-->  [tokens, out / n]     weight [out / n, in]
    x [tokens, in / n]  --matmul_reduce_scatter-->  [tokens / n, out] weight [out, in / n]

Collectives and products can overlap: a collective is n - 1 hops along a ring, and each hop is sent
while the tokens already received are multiplied (the collective matmul of Wang et al., ASPLOS 2023;
T3, 2401.16677, does the same in hardware). It replaces one product of all tokens by n products of
1/n of them, so `worth_it` decides.

For use inside `jax.shard_map`. The weight is never split further: it may be anything that `product`
takes, such as a quantized weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

from pallas_kernels.collective_matmul import xla
from pallas_kernels.collective_matmul.choice import CollectiveRates, worth_it


class Weight(Protocol):
    """An array or a quantized weight: a pytree of arrays with the logical weight's shape."""

    shape: tuple[int, int]


Product = Callable[[Any, jax.Array], jax.Array]
"""weight [out, in], x [tokens, in] -> [tokens, out], best in float32."""


def all_gather_matmul(
    weight: Weight,
    x: jax.Array,
    axis_name: str,
    *,
    num_tokens: int | None = None,
    rates: CollectiveRates | None = None,
    product: Product = xla.dot,
) -> jax.Array:
    """This rank's outputs for all ranks' tokens: [num_tokens, out / n] in the dtype of x.

    weight [out / n, in] and x [tokens / n, in] are this rank's; tokens are in the order of ranks.
    num_tokens: number of real tokens; padding after them is dropped.
    rates: measured device rates. Without them, tokens are gathered before one product.

    Raises ValueError for mismatched shapes.
    """
    _check(weight, x)
    tokens = jax.lax.axis_size(axis_name) * len(x)
    if num_tokens is not None and not 0 <= num_tokens <= tokens:
        raise ValueError(f"num_tokens is {num_tokens}; the ranks hold {tokens}.")
    if _overlaps(weight, len(x), x.nbytes, axis_name, rates):
        result = xla.ring_all_gather_matmul(weight, x, axis_name, product, rates.both_ways)
    else:
        result = xla.plain_all_gather_matmul(weight, x, axis_name, product)
    return result[:num_tokens]


def matmul_reduce_scatter(
    weight: Weight,
    x: jax.Array,
    axis_name: str,
    *,
    rates: CollectiveRates | None = None,
    product: Product = xla.dot,
) -> jax.Array:
    """This rank's tokens of the sum of all ranks' products: [tokens / n, out] in the dtype of x.

    weight [out, in / n] and x [tokens, in / n] are this rank's. Tokens are in the order of ranks,
    padded with zeros to a multiple of n.
    rates: measured device rates. Without them, one product is computed and then summed.

    Every rank's product is rounded to the dtype of x. Along a ring, those for the tokens of rank r
    are added in the order r + 1, r + 2, ..., r - 1, r, and every sum is rounded; both ways, the
    second half of r's tokens in the order r - 1, r - 2, ..., r + 1, r. The result is deterministic,
    but its last bits may differ from those of another n or of one product.

    Raises ValueError for mismatched shapes.
    """
    _check(weight, x)
    ranks = jax.lax.axis_size(axis_name)
    tokens = -(-len(x) // ranks)
    message_bytes = weight.shape[0] * tokens * x.dtype.itemsize
    x = xla.padded(x, ranks * tokens)
    if _overlaps(weight, tokens, message_bytes, axis_name, rates):
        return xla.ring_matmul_reduce_scatter(weight, x, axis_name, product, rates.both_ways)
    return xla.plain_matmul_reduce_scatter(weight, x, axis_name, product)


def _check(weight, x):
    if x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x has shape {x.shape}; this weight takes [tokens, {weight.shape[1]}].")


def _overlaps(weight, tokens, message_bytes, axis_name, rates):
    return rates is not None and worth_it(
        rates,
        ranks=jax.lax.axis_size(axis_name),
        tokens=tokens,
        weight_shape=weight.shape,
        weight_bytes=sum(plane.nbytes for plane in jax.tree.leaves(weight)),
        message_bytes=message_bytes,
    )
