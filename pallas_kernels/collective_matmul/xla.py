"""Collective matmuls by `lax.ppermute`, for every XLA backend.

Each step of an unrolled loop starts the send for the next step before a product that does not
depend on it: compilers with asynchronous collectives, as for TPUs and GPUs, put the product between
the start and the end of a hop. Both ways, the first halves of all chunks of tokens go up the ring
and the second halves down. Both halves are multiplied in one product, which is faster than two of
half the size.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import send


def dot(weight, x):
    """Float32 [tokens, out] of arrays weight [out, in] and x [tokens, in]."""
    return jnp.matmul(x, weight.T, preferred_element_type=jnp.float32)


def padded(x, tokens):
    """x [..., in] with zeros up to [tokens, in]."""
    return jnp.pad(x, ((0, tokens - len(x)), (0, 0)))


def plain_all_gather_matmul(weight, x, axis_name, product):
    gathered = lax.all_gather(x, axis_name, tiled=True)
    return product(weight, gathered).astype(x.dtype)


def plain_matmul_reduce_scatter(weight, x, axis_name, product):
    """x [tokens, in] of a multiple of the ranks."""
    partial = product(weight, x).astype(x.dtype)
    return lax.psum_scatter(partial, axis_name, tiled=True)


def ring_all_gather_matmul(weight, x, axis_name, product, both_ways):
    """In step s, tokens from s ranks away are multiplied and sent on."""
    ranks, tokens = lax.axis_size(axis_name), len(x)
    parts = _parts(tokens, both_ways)
    held = [x[first:last] for first, last, _ in parts]
    result = None
    for step in range(ranks):
        here = held
        if step < ranks - 1:
            held = [send(half, hop, axis_name) for half, (_, _, hop) in zip(here, parts)]
        chunk = _product(weight, here, product)
        # The next hop begins after this product; XLA would begin it before, where nothing hides it.
        chunk, *held = lax.optimization_barrier((chunk, *held))
        if result is None:
            result = jnp.zeros_like(chunk, shape=(ranks * tokens, chunk.shape[1]))
        for first, last, hop in parts:
            at = _rank_above(-step * hop, axis_name) * tokens + first
            result = lax.dynamic_update_slice_in_dim(result, chunk[first:last], at, axis=0)
    return result


def ring_matmul_reduce_scatter(weight, x, axis_name, product, both_ways):
    """In step s, the product for the rank s + 1 behind is added to that rank's running sum.

    x [tokens, in] of a multiple of the ranks.
    """
    ranks = lax.axis_size(axis_name)
    tokens = len(x) // ranks
    parts = _parts(tokens, both_ways)
    sums = None
    for step in range(ranks):
        if sums is not None:
            sums = [send(half, hop, axis_name) for half, (_, _, hop) in zip(sums, parts)]
        here = []
        for first, last, hop in parts:
            at = _rank_above(-(step + 1) * hop, axis_name) * tokens + first
            here.append(lax.dynamic_slice_in_dim(x, at, last - first))
        chunk = _product(weight, here, product)
        chunks = [chunk[first:last] for first, last, _ in parts]
        sums = chunks if sums is None else [*map(jnp.add, sums, chunks)]
    return jnp.concatenate(sums)


def _product(weight, parts, product):
    """Product of the parts of one chunk, in their dtype, isolated from all others.

    Without barriers compilers undo the overlap: XLA merges products that share an operand, on GPUs,
    and fuses a product with the addition that waits for a hop, on TPUs.
    """
    weight, parts = lax.optimization_barrier((weight, parts))
    result = product(weight, jnp.concatenate(parts)).astype(parts[0].dtype)
    return lax.optimization_barrier(result)


def _parts(tokens, both_ways):
    """(first, last, hop) of the parts of a chunk: tokens first to last - 1 go `hop` ranks up."""
    half = -(-tokens // 2) if both_ways else tokens
    parts = [(0, half, 1), (half, tokens, -1)]
    return [part for part in parts if part[0] < part[1]]


def _rank_above(hops, axis_name):
    """The rank `hops` above this one, around the ring."""
    ranks = lax.axis_size(axis_name)
    return lax.rem(lax.axis_index(axis_name) + hops % ranks, ranks)
