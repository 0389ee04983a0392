"""Mixtures of experts: an MLP of which each token takes a few parts (1701.06538).

No token is dropped, and its experts depend on that token alone. Tokens are sorted by expert, and
each run of tokens is multiplied with its expert's weights, by `lax.ragged_dot`. On CPUs that
multiplies every token with every expert, so there a loop goes over blocks of tokens of one expert
(docs/decisions/014-moe.md).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.model_config import ExpertGroups, MoEConfig
from jaxserve.models import layers, parallel
from jaxserve.models.family import Params
from jaxserve.models.layers import Weight
from pallas_kernels.platforms import by_platform
from pallas_kernels.quantized_matmul import QuantizedWeight

_MAX_TOKENS_OF_A_BLOCK = 64
_MIN_SUM = 1e-20
"""Added to the sum of a token's weights, which may all be 0."""
_RAGGED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


_real_tokens: contextvars.ContextVar[tuple[jax.Array, list[jax.Array]] | None]
_real_tokens = contextvars.ContextVar("real_tokens", default=None)


def mixture(moe: MoEConfig, p: Params, x: jax.Array) -> jax.Array:
    """The mixture of x [tokens, hidden]: the weighted sum of each token's experts.

    Each rank of a mesh has a part of every expert, or some of the experts; every rank routes all
    tokens, and the ranks' results are summed. Ranks of `seq` have parts of the same experts for
    their own tokens, or other experts, for those of all.
    """
    x = parallel.gather_tokens(x)
    own = _experts(moe, p)
    apart = _num_outputs(own.down) < moe.num_experts * x.shape[1]
    tokens = parallel.gather_over_seq(x) if apart else x
    weights, experts = route(moe, p, tokens)
    experts = _of_real_tokens(moe, experts, apart)
    out = _sum_of_experts(moe, own, tokens, weights, experts)
    if apart:
        out = parallel.sum_over_seq(out)
    if moe.shared_intermediate_size:
        inner = _activated(moe, _product(_matrix(p["shared_gate_up"]), x))
        shared = _product(*layers.in_order(_matrix(p["shared_down"]), inner))
        if moe.shared_gate:
            shared = jax.nn.sigmoid(_router_logits(p["shared_router"], x)) * shared
        out = out + shared
    return parallel.sum_parts(out.astype(x.dtype))


@contextlib.contextmanager
def real_tokens(real: jax.Array | None) -> Iterator[list[jax.Array]]:
    """Traces a layer. `real` bool [tokens] says which of a rank's tokens belong to a sequence: the
    others take no expert of a mixture, whose weights they would read. The list has then, of a
    mixture, how many tokens take each expert, int32 [experts], on all ranks. With None all tokens
    take theirs, and nothing is counted."""
    counts: list[jax.Array] = []
    token = _real_tokens.set(None if real is None else (real, counts))
    try:
        yield counts
    finally:
        _real_tokens.reset(token)


def _of_real_tokens(moe: MoEConfig, experts: jax.Array, gathered: bool) -> jax.Array:
    """`experts` [tokens, num_experts_per_tok] with `moe.num_experts`, which is none, for padding;
    counts the others. The tokens are those of all ranks of `seq` if `gathered`, else this one's."""
    if (found := _real_tokens.get()) is None:
        return experts
    real, counts = found
    real = parallel.gather_over_seq(real) if gathered else real
    experts = jnp.where(real[:, None], experts, moe.num_experts)
    taken = experts if gathered else parallel.gather_over_seq(experts)
    counts.append(jnp.bincount(taken.reshape(-1), length=moe.num_experts).astype(jnp.int32))
    return experts


def route(moe: MoEConfig, p: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights float32 and experts int32, both [tokens, num_experts_per_tok], of x [tokens, hidden]
    for a `router` [experts, hidden] and, if it has one, its `router_bias` and `router_correction`
    [experts]."""
    logits = _router_logits(p["router"], x)
    if moe.biased:
        logits = logits + p["router_bias"]
    scores = jax.nn.sigmoid(logits) if moe.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    chosen_by = scores + p["router_correction"] if moe.corrected else scores
    if moe.groups is not None:
        chosen_by = _within_groups(moe.groups, chosen_by)
    _, experts = lax.top_k(chosen_by, moe.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if moe.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + _MIN_SUM)
    return weights * moe.routed_scale, experts


def _within_groups(groups: ExpertGroups, scores: jax.Array) -> jax.Array:
    """Scores [tokens, experts] of the experts in each token's best groups, -inf for the others."""
    apart = scores.reshape(len(scores), groups.count, -1)
    of_groups = lax.top_k(apart, groups.best)[0].sum(axis=-1)
    _, chosen = lax.top_k(of_groups, groups.chosen)
    inside = jnp.any(chosen[:, :, None] == jnp.arange(groups.count), axis=1)
    return jnp.where(inside[:, :, None], apart, -jnp.inf).reshape(scores.shape)


def _router_logits(router: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.matmul(x, router.T, preferred_element_type=jnp.float32)


class Experts(NamedTuple):
    """Parameters of a rank's experts: gate_up [2 * experts, ff, hidden] and down [experts, hidden,
    ff], or their matrices, and biases without the last dimension, None for none."""

    gate_up: Weight
    down: Weight
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


def _experts(moe: MoEConfig, p: Params) -> Experts:
    down, down_bias = p["experts_down"], p.get("experts_down_bias")
    if down_bias is not None and len(down_bias) == moe.num_experts:
        # Ranks have parts of every expert, whose sum has the bias once.
        down_bias = parallel.on_first_rank(down_bias)
    return Experts(p["experts_gate_up"], down, p.get("experts_gate_up_bias"), down_bias)


class Runs(NamedTuple):
    """Choices of a step, sorted by expert. A choice is one token's of one expert, numbered
    token * num_experts_per_tok + place.

    `order` int32 [choices] holds first those of this rank's experts; `sizes` int32 [experts] are
    the lengths of their runs. Those of padding and of other ranks' experts come last, in no run.
    """

    order: jax.Array
    sizes: jax.Array


def sorted_choices(experts: jax.Array, count: int) -> Runs:
    """Runs of the choices [choices] of `count` experts; other numbers are other ranks' experts, or
    none."""
    own = jnp.where((experts >= 0) & (experts < count), experts, count)
    return Runs(jnp.argsort(own, stable=True), jnp.bincount(own, length=count))


def _sum_of_experts(
    moe: MoEConfig, own: Experts, x: jax.Array, weights: jax.Array, experts: jax.Array
) -> jax.Array:
    """Float32 [tokens, hidden]: this rank's part of the sum."""
    quantized = any(isinstance(weight, QuantizedWeight) for weight in (own.gate_up, own.down))
    count = _num_outputs(own.down) // x.shape[1]
    choices = experts.reshape(-1) - parallel.first_expert(count, moe.num_experts)
    runs = sorted_choices(choices, count)
    blocks = functools.partial(by_blocks, moe)
    if quantized:
        return blocks(own, x, weights, runs)
    ragged = functools.partial(by_ragged_dot, moe)
    return by_platform(own, x, weights, runs, cpu=blocks, default=ragged)


def by_ragged_dot(
    moe: MoEConfig, own: Experts, x: jax.Array, weights: jax.Array, runs: Runs
) -> jax.Array:
    """One product for all runs of tokens of one expert."""
    tokens, chosen = weights.shape
    count, hidden, ff = own.down.shape
    expert = jnp.searchsorted(jnp.cumsum(runs.sizes), jnp.arange(weights.size), side="right")

    def product(weight: jax.Array, rows: jax.Array, bias: jax.Array | None) -> jax.Array:
        rows = lax.ragged_dot_general(rows, weight, runs.sizes, _RAGGED)
        if bias is None:
            return rows
        return rows + bias.reshape(count, -1).at[expert].get(mode="clip")

    gate_up = own.gate_up.reshape(count, 2 * ff, hidden)
    rows = product(gate_up, x[runs.order // chosen], own.gate_up_bias)
    rows = product(own.down, _activated(moe, rows), own.down_bias).astype(jnp.float32)
    rows = jnp.where(jnp.arange(len(rows))[:, None] < runs.sizes.sum(), rows, 0)
    # Summed in the order of a token's choices, which no other token changes.
    chosen_rows = rows[jnp.argsort(runs.order)].reshape(tokens, chosen, hidden)
    return jnp.einsum("tc,tch->th", weights, chosen_rows)


def by_blocks(
    moe: MoEConfig, own: Experts, x: jax.Array, weights: jax.Array, runs: Runs
) -> jax.Array:
    """A loop over blocks of tokens of one expert each: as many blocks as there are, no more."""
    (tokens, hidden), (num_choices, count) = x.shape, (weights.size, len(runs.sizes))
    block, of_expert = block_tokens(num_choices, count), num_blocks(runs, num_choices)
    last_blocks, ends = jnp.cumsum(of_expert), jnp.cumsum(runs.sizes)
    own = own._replace(gate_up=_matrix(own.gate_up), down=_matrix(own.down))

    def add_block(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_blocks, index, side="right")
        begin = ends[expert] - runs.sizes[expert]
        begin += block * (index - last_blocks[expert] + of_expert[expert])
        places = begin + jnp.arange(block)
        choices = runs.order[jnp.minimum(places, num_choices - 1)]
        token = choices // weights.shape[1]
        rows = _mlp(moe, _one_of(own, expert, count), x[token]).astype(jnp.float32)
        rows = rows * weights.reshape(-1)[choices, None]
        token = jnp.where(places < ends[expert], token, tokens)
        return out.at[token].add(rows, mode="drop")

    return lax.fori_loop(0, last_blocks[-1], add_block, jnp.zeros((tokens, hidden), jnp.float32))


def num_blocks(runs: Runs, num_choices: int) -> jax.Array:
    """Blocks int32 [experts] of each expert."""
    return -(-runs.sizes // block_tokens(num_choices, len(runs.sizes)))


def block_tokens(num_choices: int, num_experts: int) -> int:
    """Tokens of a block: one where experts are chosen once or twice on average, so that nothing is
    computed but what was chosen; else the power of two above an average run."""
    if num_choices <= 2 * num_experts:
        return 1
    return min(1 << (num_choices // num_experts).bit_length(), _MAX_TOKENS_OF_A_BLOCK)


def _num_outputs(down: Weight) -> int:
    """Outputs of all of a rank's experts, in a matrix or apart."""
    plane = down.values if isinstance(down, QuantizedWeight) else down
    return math.prod(plane.shape[:-1])


def _matrix(weight: Weight) -> Weight:
    return jax.tree.map(lambda plane: plane.reshape(-1, plane.shape[-1]), weight)


def _one_of(experts: Experts, index: jax.Array, count: int) -> Experts:
    """The parameters of one expert, its rows of matrices that have those of `count` experts."""

    def rows(plane: jax.Array) -> jax.Array:
        size = plane.shape[0] // count
        return lax.dynamic_slice_in_dim(plane, index * size, size)

    return jax.tree.map(rows, experts)


def _mlp(moe: MoEConfig, own: Experts, x: jax.Array) -> jax.Array:
    """One expert's output for x [tokens, hidden], by this rank's part of it, not summed over
    ranks."""
    inner = layers.add_bias(_product(own.gate_up, x), own.gate_up_bias)
    return layers.add_bias(_product(own.down, _activated(moe, inner)), own.down_bias)


def _product(weight: Weight, x: jax.Array) -> jax.Array:
    """`layers.product`; of one token in a form with which CPUs do not copy the expert's slice."""
    if len(x) == 1 and not isinstance(weight, QuantizedWeight) and x.dtype == jnp.float32:
        return x @ weight.T
    return layers.product(weight, x)


def _activated(moe: MoEConfig, x: jax.Array) -> jax.Array:
    """The activation of an expert, for its gate and up side by side: [tokens, 2 * ff]."""
    gate, up = jnp.split(x, 2, axis=-1)
    if moe.clamped is None:
        return jax.nn.silu(gate) * up
    alpha, limit = moe.clamped
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
