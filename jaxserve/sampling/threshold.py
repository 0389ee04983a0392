"""Top-k, top-p and min-p as one threshold a row, found by searching its bits instead of sorting.

A kept set is always {tokens whose weight >= floor}, weights being exp((logit - max) / T). The bits
of a non-negative float order like the float, so a floor is found in at most 31 steps of bisection,
or on GPUs in ten steps of three bits, and is exact: the k-th largest weight, or the largest weight
at which the nucleus (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020) is
heavy enough. Tokens of equal weight are kept or dropped together.

On a mesh each rank has the weights of its part of the vocabulary, and all compute the same floor.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.models import parallel
from jaxserve.sampling.vocabulary import CELL, ordered_sum, take_cells
from pallas_kernels.platforms import by_platform

# Candidates come from this many cells of consecutive tokens, the ones with the heaviest tokens.
CANDIDATE_CELLS = 64
_MIN_CELLS_OF_RANK = 8
_SMALLEST = np.finfo(np.float32).tiny
_ABOVE_ONE_BITS = int(np.float32(1).view(np.int32)) + 1
# A floor has at most 30 bits: ten rounds of seven tries find three each.
_STEP_BITS, _STEPS = 3, 10
_FIRST_STEP = 1 << _STEP_BITS * (_STEPS - 1)

# (weights [rows, n], floor [rows]) -> amount at or above the floor [rows]
Measure = Callable[[jax.Array, jax.Array], jax.Array]


def weight_floor(
    weights: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Floor [rows] that applies min_p, then top_k, then top_p, in vLLM's order.

    `weights` is float32 [rows, n * CELL], with a largest weight of 1 in each row (of all ranks) and
    0 for tokens that must not be sampled. `top_p` is relative to the mass that top_k and min_p
    keep. Off: top_k = 0, top_p = 1, min_p = 0. The floor is positive, so zero weights never pass.
    """
    floor = jnp.maximum(min_p, _SMALLEST)
    return by_platform(
        *(weights, top_k, top_p, floor), cuda=_searched_floor, default=_bisected_floor
    )


def _searched_floor(
    weights: jax.Array, top_k: jax.Array, top_p: jax.Array, floor: jax.Array
) -> jax.Array:
    """In a fixed number of passes: a GPU's host would wait for each trip of a loop that may end
    early (branches.py)."""
    count = _search(weights, jnp.ones_like(weights), top_k.astype(jnp.float32), floor)
    floor = jnp.where(top_k > 0, count, floor)
    (mass,) = _amounts(weights, weights, [floor])
    return jnp.where(top_p < 1, _search(weights, weights, top_p * mass, floor), floor)


def _search(
    weights: jax.Array, amounts: jax.Array, target: jax.Array, floor: jax.Array
) -> jax.Array:
    """The largest floor at or above which there is at least the target, or `floor`."""

    def narrow(index: jax.Array, low: jax.Array) -> jax.Array:
        step = jnp.int32(_FIRST_STEP) >> (index * _STEP_BITS)
        tried = [low + step * n for n in range(1, 1 << _STEP_BITS)]
        found = _amounts(weights, amounts, [*map(_float, tried)])
        enough = [(each >= target) & (bits < _ABOVE_ONE_BITS) for each, bits in zip(found, tried)]
        return low + step * sum(each.astype(jnp.int32) for each in enough)

    return _float(lax.fori_loop(0, _STEPS, narrow, _bits(floor)))


def _amounts(weights: jax.Array, amounts: jax.Array, floors: list[jax.Array]) -> list[jax.Array]:
    """At or above each of the floors [rows], all in one pass."""
    kept = [jnp.where(weights >= floor[:, None], amounts, 0.0) for floor in floors]
    zeros = [jnp.float32(0)] * len(floors)
    sums = lax.reduce(kept, zeros, lambda a, b: [x + y for x, y in zip(a, b)], (1,))
    return [*map(parallel.sum_over_vocab, sums)]


def _bisected_floor(
    weights: jax.Array, top_k: jax.Array, top_p: jax.Array, floor: jax.Array
) -> jax.Array:
    filters = jnp.any((top_k > 0) | (top_p < 1))
    return lax.cond(filters, _filtered_floor, lambda *args: args[-1], weights, top_k, top_p, floor)


def _filtered_floor(
    weights: jax.Array, top_k: jax.Array, top_p: jax.Array, floor: jax.Array
) -> jax.Array:
    candidates, bound = _heaviest(weights)

    def filter_once(index: jax.Array, floor: jax.Array) -> jax.Array:
        by_count = index == 0  # the first round is top_k, the second top_p

        def among(weights: jax.Array, floor: jax.Array) -> jax.Array:
            amounts = jnp.where(by_count, 1.0, weights)
            return ordered_sum(jnp.where(weights >= floor[:, None], amounts, 0.0))

        def overall(weights: jax.Array, floor: jax.Array) -> jax.Array:
            return parallel.sum_over_vocab(among(weights, floor))

        active = jnp.where(by_count, top_k > 0, top_p < 1)
        mass_target = top_p * overall(weights, floor)
        target = jnp.where(by_count, top_k.astype(jnp.float32), mass_target)

        low = _bits(floor)
        start = jnp.maximum(low, _bits(bound) + 1)
        enough = among(candidates, _float(start)) >= target
        near = _bisect(
            among, candidates, target, start, jnp.where(active & enough, _ABOVE_ONE_BITS, 0)
        )
        far = _bisect(overall, weights, target, low, jnp.where(active & ~enough, start, 0))
        return jnp.where(active, _float(jnp.where(enough, near, far)), floor)

    # One loop body serves both rounds, which halves the code to compile.
    return lax.fori_loop(0, 2, filter_once, floor)


def _heaviest(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Candidates [rows, n] of all ranks and a bound [rows]: every weight above the bound is a
    candidate.

    They are the cells whose heaviest tokens are the largest; the last cell taken gives the bound.
    Most floors lie above it and need no further pass over the whole vocabulary.
    """
    rows, width = weights.shape
    most = max(CANDIDATE_CELLS // parallel.num_vocab_ranks(), _MIN_CELLS_OF_RANK)
    if width // CELL <= most:
        return parallel.gather_over_vocab(weights), jnp.zeros(rows, weights.dtype)
    cell_max = jnp.max(weights.reshape(rows, -1, CELL), axis=2)
    # Without a barrier XLA sees through the slice, and sorts instead of selecting. One per array:
    # around the tuple, XLA for CPUs aborts in programs of several devices.
    heaviest, cells = map(lax.optimization_barrier, lax.top_k(cell_max, most))
    candidates = parallel.gather_over_vocab(take_cells(weights, cells))
    return candidates, parallel.max_over_vocab(heaviest[:, -1])


def _bisect(
    measure: Measure, weights: jax.Array, target: jax.Array, low: jax.Array, high: jax.Array
) -> jax.Array:
    """Bits in [low, high) of the largest floor with measure >= target; low must satisfy it.

    Rows with high <= low + 1 stay at low; when no row is open, nothing is measured.
    """

    def is_open(bounds: tuple[jax.Array, ...]) -> jax.Array:
        low, high, _ = bounds
        return jnp.any(high - low > 1)

    def halve(bounds: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, middle = bounds
        kept = measure(weights, _float(middle))
        exact = kept == target  # no higher floor can keep this much, so the row is done
        low = jnp.where(kept >= target, middle, low)
        high = jnp.where(exact, low + 1, jnp.where(kept >= target, high, middle))
        return low, high, halfway(low, high)

    def halfway(low: jax.Array, high: jax.Array) -> jax.Array:
        return jnp.where(high - low > 1, low + (high - low) // 2, low)

    # The next middle is carried, or XLA would recompute it for every weight.
    return lax.while_loop(is_open, halve, (low, high, halfway(low, high)))[0]


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
