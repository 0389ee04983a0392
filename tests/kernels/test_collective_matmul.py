"""Products split over 2, 4 and 8 devices, and what they send meanwhile."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from scripts import on_eight_devices

from pallas_kernels.collective_matmul import (
    CollectiveRates,
    all_gather_matmul,
    matmul_reduce_scatter,
    reference,
    worth_it,
    xla,
)
from pallas_kernels.quantized_matmul import GGUF, quantize, quantized_matmul
from pallas_kernels.quantized_matmul import reference as quantized_reference

ROWS, COLUMNS = P("tensor"), P(None, "tensor")
"""Of a weight its outputs and inputs; of activations tokens and features."""

ONE_WAY = CollectiveRates(1.0, 1e15, 1e9, 0.0, both_ways=False)
BOTH_WAYS = ONE_WAY._replace(both_ways=True)
"""Of devices that multiply once a second: always worth it."""


def over(ranks, function, in_specs, out_specs):
    """`function` over as many devices along the axis "tensor", jitted."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("tensor",))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def gather(ranks, num_tokens=None, rates=None, product=xla.dot):
    def function(weight, x):
        return all_gather_matmul(
            weight, x, "tensor", num_tokens=num_tokens, rates=rates, product=product
        )

    return over(ranks, function, (ROWS, ROWS), COLUMNS)


def scatter(ranks, rates=None):
    def function(weight, x):
        return matmul_reduce_scatter(weight, x, "tensor", rates=rates)

    return over(ranks, function, (COLUMNS, COLUMNS), ROWS)


def random_array(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def parts(array, ranks, axis):
    return np.split(np.asarray(array, np.float64), ranks, axis)


@pytest.mark.meshes
@on_eight_devices
def test_the_same_as_one_product():
    """Whatever the shapes; tokens that do not divide are padded, and the padding left out."""

    @settings(max_examples=12, deadline=None)
    @given(
        ranks=st.sampled_from([1, 2, 4, 8]),
        tokens=st.integers(1, 40),
        sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
        rates=st.sampled_from([None, ONE_WAY, BOTH_WAYS]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        seed=st.integers(0, 2**32 - 1),
    )
    @example(8, 8, (1, 1), BOTH_WAYS, "float32", 0)  # one token each: nothing for the other way
    @example(4, 9, (2, 3), BOTH_WAYS, "bfloat16", 0)
    @example(2, 1, (3, 1), ONE_WAY, "float32", 0)  # a rank with nothing but padding
    def check(ranks, tokens, sizes, rates, dtype, seed):
        outputs, inputs = ranks * sizes[0], ranks * sizes[1]
        weight = random_array(seed, outputs, inputs, dtype=dtype)
        x = random_array(seed + 1, tokens, inputs, dtype=dtype)
        shared = -(-tokens // ranks)
        tolerance = {"rtol": 0, "atol": 60 * float(jnp.finfo(dtype).eps)}

        x_padded = xla.padded(x, ranks * shared)
        y = gather(ranks, tokens, rates)(weight, x_padded)
        expected = reference.all_gather_matmul(parts(weight, ranks, 0), parts(x_padded, ranks, 0))
        assert y.dtype == x.dtype and y.shape == (tokens, outputs)
        expected = np.concatenate(expected, axis=1)[:tokens]
        np.testing.assert_allclose(np.asarray(y, np.float64), expected, **tolerance)

        y = scatter(ranks, rates)(weight, x)
        expected = reference.matmul_reduce_scatter(parts(weight, ranks, 1), parts(x, ranks, 1))
        assert y.dtype == x.dtype and y.shape == (ranks * shared, outputs)
        assert not np.asarray(y[tokens:], np.float64).any()
        y = np.asarray(y, np.float64)
        np.testing.assert_allclose(y, np.concatenate(expected), **tolerance)

    check()


@pytest.mark.parametrize("both_ways", [False, True])
@on_eight_devices
def test_sums_are_made_in_the_order_that_is_promised(both_ways):
    """One input a rank, of magnitudes that make every order give another result."""
    ranks, tokens = 8, 6
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ranks * tokens, ranks)) * 2.0 ** rng.integers(0, 30, ranks)
    x = x.astype(np.float32)
    y = scatter(ranks, BOTH_WAYS if both_ways else ONE_WAY)(np.ones((1, ranks), np.float32), x)
    differs = 0
    for token in range(ranks * tokens):
        rank, within = divmod(token, tokens)
        hop = -1 if both_ways and within >= tokens // 2 else 1
        in_order = [x[token, (rank + hop * (1 + step)) % ranks] for step in range(ranks)]
        assert y[token, 0] == functools.reduce(np.add, in_order)
        differs += functools.reduce(np.add, in_order) != functools.reduce(np.add, x[token])
    assert differs


@on_eight_devices
def test_what_a_program_consists_of():
    """n - 1 hops each way, n products, and no other collective, in either product."""
    for ranks in (2, 4, 8):
        shared, outputs, inputs = 6, 16, 24
        weight, x = random_array(0, outputs, inputs), random_array(1, ranks * shared, inputs)
        for function, width in ((gather, inputs), (scatter, outputs)):
            for rates, ways in ((ONE_WAY, 1), (BOTH_WAYS, 2)):
                lowered = function(ranks, rates=rates).lower(weight, x)
                assert lowered.as_text().count("stablehlo.dot_general") == ranks
                text = lowered.compile().as_text()
                hops = re.findall(r"f32\[(\d+),(\d+)\]\S* collective-permute\(", text)
                assert hops == [(str(shared // ways), str(width))] * ways * (ranks - 1)
                assert not re.search(r"all-gather|all-reduce|all-to-all|reduce-scatter", text)


@on_eight_devices
def test_not_worth_it_or_not_measured_is_one_product_and_a_collective():
    weight, x = random_array(0, 16, 16), random_array(1, 16, 16)
    slow = BOTH_WAYS._replace(link_bytes_per_s=1e-3)
    for rates in (None, slow):
        for function, collective in (
            (gather, "stablehlo.all_gather"),
            (scatter, "stablehlo.reduce_scatter"),
        ):
            text = function(4, rates=rates).lower(weight, x).as_text()
            assert text.count(collective) == text.count("stablehlo.dot_general") == 1
            assert "collective_permute" not in text


@on_eight_devices
def test_a_packed_weight_is_never_unpacked_for_it():
    ranks = 4
    weight = quantize(random_array(0, 32, 64), GGUF["Q4_1"])
    x = random_array(1, 20, 64)
    function = gather(ranks, rates=BOTH_WAYS, product=quantized_matmul)
    expected = quantized_reference.quantized_matmul(weight, x)
    np.testing.assert_allclose(function(weight, x), expected, rtol=1e-4, atol=1e-4)


# Of the order of an accelerator's, and round: a product of 1e15 FLOP/s, memory of 1e12 bytes/s.
ROUND = CollectiveRates(1e15, 1e12, 1e11, 0.0, both_ways=False)


def gathers(rates, tokens, ranks=8, outputs=1000, inputs=4000, element_bytes=2):
    """Whether to gather [tokens, inputs] of each rank while multiplying is worth it."""
    return worth_it(
        rates,
        ranks=ranks,
        tokens=tokens,
        weight_shape=(outputs, inputs),
        weight_bytes=outputs * inputs * element_bytes,
        message_bytes=inputs * tokens * element_bytes,
    )


def test_worth_it_where_a_product_takes_longer_than_its_hop():
    """For many tokens: 2 out in t / C against in t e / W, so out against e C / (2 W) = 10 000."""
    assert not gathers(ROUND, tokens=100_000, outputs=9_900)
    assert gathers(ROUND, tokens=100_000, outputs=10_100)
    assert gathers(ROUND._replace(both_ways=True), tokens=100_000, outputs=5_050)
    assert not gathers(ROUND._replace(both_ways=True), tokens=100_000, outputs=4_950)
    # 2 out in t / C is 808 us here, of which the bytes of the hop take 800.
    late = ROUND._replace(hop_latency_us=9e3)
    assert not gathers(late, tokens=100_000, outputs=10_100)


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("ranks", [2, 8])
def test_never_worth_it_while_products_take_as_long_as_the_weight_is_read(tokens, ranks):
    for latency_us in (0.0, 1.0, 10.0, 100.0):
        for link in (1e9, 1e11, 1e13):
            rates = ROUND._replace(hop_latency_us=latency_us, link_bytes_per_s=link)
            assert not gathers(rates, tokens, ranks)


def test_one_rank_has_nothing_to_hide():
    assert not gathers(ROUND, tokens=100_000, ranks=1, outputs=20_000)


@settings(deadline=None)
@given(
    rates=st.builds(
        CollectiveRates,
        st.floats(1e12, 1e15),
        st.floats(1e11, 1e13),
        st.floats(1e9, 1e12),
        st.floats(0, 100),
        st.booleans(),
    ),
    ranks=st.sampled_from([2, 4, 8, 16]),
    log_tokens=st.floats(0, 17),
    outputs=st.integers(128, 20_000),
)
def test_what_is_chosen_takes_less_time_by_the_model(rates, ranks, log_tokens, outputs):
    tokens, inputs = int(2**log_tokens), 4096

    def product_s(tokens):
        return max(
            2 * outputs * inputs * tokens / rates.flops_per_s,
            2 * outputs * inputs / rates.memory_bytes_per_s,
        )

    sent = 2 * inputs * tokens / (1 + rates.both_ways)
    hop_s = rates.hop_latency_us / 1e6 + sent / rates.link_bytes_per_s
    plain_s = product_s(ranks * tokens) + (ranks - 1) * hop_s
    ring_s = product_s(tokens) + (ranks - 1) * max(product_s(tokens), hop_s)
    if gathers(rates, tokens, ranks, outputs, inputs):
        assert ring_s < plain_s
    elif ring_s < plain_s:
        # Passed by only where hops would show: by no more than all products but one.
        assert hop_s > product_s(tokens) or math.isclose(ring_s, plain_s)


@on_eight_devices
def test_what_does_not_belong_together_is_refused():
    weight, x = random_array(0, 8, 12), random_array(1, 16, 12)
    with pytest.raises(ValueError, match=r"x has shape \(4, 11\); this weight takes \[tokens, 12"):
        gather(4)(weight, x[:, :11])
    with pytest.raises(ValueError, match="num_tokens is 17; the ranks hold 16"):
        gather(4, num_tokens=17)(weight, x)
    with pytest.raises(ValueError, match=r"this weight takes \[tokens, 3\]"):
        scatter(4)(weight, x[:, :8])
