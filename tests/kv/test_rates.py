"""Learning costs: exact and noisy data, data that tell nothing, outliers, a changing machine."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.steps.work import causal_pairs
from jaxserve.kv.offload.rates import LinearCost, OffloadRates

US_PER_TOKEN, US_PER_PAIR = 100.0, 0.02
LATENCY_US, BYTES_PER_US = 300.0, 4_000.0
LENGTHS = (64, 512, 2048, 8192)


def true_prefill_us(start: int, stop: int) -> float:
    return US_PER_TOKEN * (stop - start) + US_PER_PAIR * causal_pairs(start, stop)


def true_move_us(num_bytes: int) -> float:
    return LATENCY_US + num_bytes / BYTES_PER_US


def watch(rates: OffloadRates, steps: int, *, noise=0.0, slowness=1.0, seed=0, contexts=(0, 8192)):
    """Reports `steps` prefill steps of up to 512 tokens, with log-normal noise."""
    rng = random.Random(seed)
    for _ in range(steps):
        start = rng.randrange(contexts[0], contexts[1] + 1)
        stop = start + rng.randrange(64, 513)
        us = slowness * true_prefill_us(start, stop) * math.exp(rng.gauss(0, noise))
        rates.prefilled(stop - start, causal_pairs(start, stop), round(us))


def watch_moves(rates: OffloadRates, moves: int, *, noise=0.0, slowness=1.0, seed=0):
    """Reports `moves` moves of 64 KiB to 16 MiB each way."""
    rng = random.Random(seed)
    for _ in range(moves):
        for direction in (("device", "host"), ("host", "device")):
            num_bytes = round(2 ** rng.uniform(16, 24))
            us = slowness * true_move_us(num_bytes) * math.exp(rng.gauss(0, noise))
            rates.transferred(*direction, num_bytes, round(us))


def worst_error(rates: OffloadRates, slowness=1.0) -> float:
    """The largest relative error of a prediction for a whole prompt."""
    return max(
        abs(rates.prefill_us(0, stop) / (slowness * true_prefill_us(0, stop)) - 1)
        for stop in LENGTHS
    )


# Pairs


@given(st.integers(0, 300), st.lists(st.integers(0, 50), max_size=5))
def test_pairs_are_counted_one_by_one_and_do_not_depend_on_the_cut(start, sizes):
    total, stop = 0, start
    for size in sizes:
        total += causal_pairs(stop, stop + size)
        stop += size
    assert total == causal_pairs(start, stop) == sum(p + 1 for p in range(start, stop))


# Learning


def test_nothing_is_known_before_the_first_observation():
    rates = OffloadRates()
    assert rates.prefill_us(0, 1) is None
    assert rates.transfer_us("device", "host", 1) is None
    assert rates.prefill_tokens_per_s() is None
    assert rates.bytes_per_s("device", "host") is None
    rates.transferred("device", "host", 1000, 10)
    assert rates.transfer_us("host", "device", 1000) is None


def test_nothing_to_do_takes_no_time_known_or_not():
    rates = OffloadRates()
    assert rates.prefill_us(7, 7) == 0
    assert rates.transfer_us("device", "host", 0) == 0


def test_one_observation_predicts_itself_and_puts_its_cost_on_tokens_and_bytes():
    rates = OffloadRates()
    rates.prefilled(100, causal_pairs(0, 100), 5000)
    rates.transferred("device", "host", 1000, 500)
    assert rates.prefill_us(0, 100) == 5000
    assert rates.prefill_us(0, 200) == 10_000
    assert rates.prefill_tokens_per_s() == 20_000
    assert rates.transfer_us("device", "host", 3000) == 1500
    assert rates.bytes_per_s("device", "host") == 2_000_000


def test_exact_steps_give_both_costs_back():
    rates = OffloadRates()
    watch(rates, 300)
    assert worst_error(rates) < 0.005
    assert rates.prefill_us(4096, 4608) == pytest.approx(true_prefill_us(4096, 4608), rel=0.005)
    assert rates.prefill_tokens_per_s() == pytest.approx(1e6 / US_PER_TOKEN, rel=0.005)


def test_exact_moves_give_latency_and_rate_back():
    rates = OffloadRates()
    watch_moves(rates, 100)
    assert rates.transfer_us("device", "host", 1) == pytest.approx(LATENCY_US, rel=0.01)
    assert rates.bytes_per_s("host", "device") == pytest.approx(1e6 * BYTES_PER_US, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_noisy_data_give_predictions_within_a_tenth(seed):
    rates = OffloadRates()
    watch(rates, 200, noise=0.1, seed=seed)
    watch_moves(rates, 200, noise=0.1, seed=seed)
    assert worst_error(rates) < 0.1
    for num_bytes in (2**16, 2**20, 2**24):
        predicted = rates.transfer_us("device", "host", num_bytes)
        assert predicted == pytest.approx(true_move_us(num_bytes), rel=0.1)


def test_directions_are_learnt_apart():
    rates = OffloadRates()
    for num_bytes in (10_000, 20_000, 40_000) * 20:
        rates.transferred("host", "disk", num_bytes, num_bytes // 100)
        rates.transferred("disk", "host", num_bytes, num_bytes // 10)
    assert rates.transfer_us("host", "disk", 80_000) == pytest.approx(800, rel=0.01)
    assert rates.transfer_us("disk", "host", 80_000) == pytest.approx(8000, rel=0.01)


# Data that tell nothing


def test_while_steps_are_all_alike_speed_is_followed_and_the_split_kept():
    rates = OffloadRates()
    watch(rates, 100)
    for slowness, steps in ((1, 300), (3, 100), (1, 100)):
        for _ in range(steps):
            us = round(slowness * true_prefill_us(0, 128))
            rates.prefilled(128, causal_pairs(0, 128), us)
        assert worst_error(rates, slowness) < 0.15


def test_a_cost_that_does_not_depend_on_size_has_no_rate_and_no_negative_one():
    rates = OffloadRates()
    for num_bytes in (1000, 2000, 4000, 8000) * 50:
        rates.transferred("device", "host", num_bytes, 1000 - num_bytes // 100)
    assert rates.bytes_per_s("device", "host") is None
    assert rates.transfer_us("device", "host", 1_000_000) == pytest.approx(960, rel=0.05)


@pytest.mark.parametrize(("tokens", "pairs"), [(0, 1), (1, 0), (-1, 1)])
def test_an_empty_step_is_refused(tokens, pairs):
    with pytest.raises(ValueError, match=rf"\({tokens}, {pairs}\)"):
        OffloadRates().prefilled(tokens, pairs, 10)


def test_an_empty_move_is_refused_and_leaves_no_trace():
    rates = OffloadRates()
    with pytest.raises(ValueError, match="at least 1"):
        rates.transferred("device", "host", 0, 10)
    assert rates.transfer_us("device", "host", 1) is None


# Outliers and change


@pytest.mark.parametrize("factor", [10, 1000])
def test_a_slow_first_step_is_forgotten_within_a_few(factor):
    rates = OffloadRates()
    rates.prefilled(128, causal_pairs(0, 128), round(factor * true_prefill_us(0, 128)))
    watch(rates, 30)
    assert worst_error(rates) < 0.1


@pytest.mark.parametrize(("factor", "bound"), [(1000, 0.12), (5, 0.12), (0.0, 0.2)])
def test_one_outlier_among_good_steps_does_little(factor, bound):
    rates = OffloadRates()
    watch(rates, 100)
    rates.prefilled(256, causal_pairs(0, 256), round(factor * true_prefill_us(0, 256)))
    assert worst_error(rates) < bound
    watch(rates, 100, seed=1)
    assert worst_error(rates) < 0.05


@pytest.mark.parametrize("slowness", [0.1, 0.5, 2.0, 10.0])
def test_a_changed_machine_is_followed_within_some_tens_of_observations(slowness):
    rates = OffloadRates()
    watch(rates, 100)
    watch_moves(rates, 100)
    watch(rates, 60, slowness=slowness, seed=1)
    watch_moves(rates, 60, slowness=slowness, seed=1)
    assert worst_error(rates, slowness) < 0.1
    predicted = rates.transfer_us("device", "host", 2**22)
    assert predicted == pytest.approx(slowness * true_move_us(2**22), rel=0.1)


# Whatever comes

amounts = st.integers(1, 10**13)


@given(st.lists(st.tuples(amounts, amounts, st.integers(-5, 10**13)), min_size=1, max_size=60))
def test_coefficients_are_finite_and_never_negative(observations):
    cost = LinearCost()
    for x, y, us in observations:
        cost.observe(x, y, us)
        assert math.isfinite(cost.first) and math.isfinite(cost.second)
        assert cost.first >= 0 and cost.second >= 0 and cost.first + cost.second > 0
        assert cost.predict(1, 1) <= cost.predict(2, 1) <= cost.predict(2, 2)


@given(
    st.floats(0.01, 1e4),
    st.floats(0, 10),
    st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 4096)), min_size=2, max_size=40),
)
def test_exact_data_seen_often_are_predicted_whatever_the_costs_and_sizes(
    per_token, per_pair, chunks
):
    rates = OffloadRates()
    for _ in range(100):
        for start, size in chunks:
            pairs = causal_pairs(start, start + size)
            rates.prefilled(size, pairs, round(1000 * (per_token * size + per_pair * pairs)))
    start, size = chunks[-1]
    true_us = 1000 * (per_token * size + per_pair * causal_pairs(start, start + size))
    assert rates.prefill_us(start, start + size) == pytest.approx(true_us, rel=0.1, abs=2)


# The choice


def both_ways(num_bytes: int):
    return [("device", "host", num_bytes), ("host", "device", num_bytes)]


def test_unknown_moves_are_not_tried_and_an_unknown_prefill_is_not_repeated():
    rates = OffloadRates()
    assert not rates.prefers_swap(0, 100, both_ways(1000))
    rates.transferred("device", "host", 1000, 10)
    assert not rates.prefers_swap(0, 100, both_ways(1000))  # The rate of the way back is unknown.
    rates.transferred("host", "device", 1000, 10)
    assert rates.prefers_swap(0, 100, both_ways(1000))
    rates.prefilled(100, causal_pairs(0, 100), 19)
    assert not rates.prefers_swap(0, 100, both_ways(1000))


def test_what_lies_in_the_tier_already_need_not_be_moved_there():
    rates = OffloadRates()
    rates.transferred("host", "device", 1000, 10)
    rates.prefilled(100, causal_pairs(0, 100), 11)
    assert rates.prefers_swap(0, 100, [("device", "host", 0), ("host", "device", 1000)])


def test_equal_costs_are_recomputed():
    rates = OffloadRates()
    rates.transferred("host", "device", 1000, 10)
    rates.prefilled(100, causal_pairs(0, 100), 10)
    assert not rates.prefers_swap(0, 100, [("host", "device", 1000)])
    assert not rates.prefers_swap(5, 5, [])


@pytest.mark.parametrize("bytes_per_token", [10_000, 100_000, 190_000, 250_000, 1_000_000])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_choice_costs_at_most_a_tenth_more_than_the_better_one(bytes_per_token, noise):
    rates = OffloadRates()
    watch(rates, 200, noise=noise)
    watch_moves(rates, 200, noise=noise)
    chosen = set()
    for length in (1, 2, 4, 8, 16, 64, 256, 1024, 2048, 4096, 8192):
        num_bytes = length * bytes_per_token
        swap_us, prefill_us = 2 * true_move_us(num_bytes), true_prefill_us(0, length)
        swaps = rates.prefers_swap(0, length, both_ways(num_bytes))
        chosen.add(swaps)
        assert (swap_us if swaps else prefill_us) <= 1.1 * min(swap_us, prefill_us)
    if bytes_per_token in (10_000, 100_000, 190_000):  # Short ones are computed, long ones moved.
        assert chosen == {False, True}
