"""The enumerated set of programs and the choice among them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import ConfigError, ProgramMissError
from jaxserve.core.steps.buckets import Buckets, ProgramKey


@st.composite
def configs(draw: st.DrawFn) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens)."""
    max_num_seqs = draw(st.integers(1, 300))
    return max_num_seqs, max_num_seqs + draw(st.integers(16, 9000))


@settings(max_examples=100, deadline=None)
@given(config=configs(), data=st.data())
def test_picks_the_smallest_program_that_holds_the_step(config, data):
    max_num_seqs, budget = config
    buckets = Buckets.from_config(max_num_seqs, budget)
    decodes = data.draw(st.integers(0, max_num_seqs))
    # A sequence that prefills is one of those that could have been decoding.
    most = buckets.max_prefill_tokens if decodes < max_num_seqs else 0
    prefill = data.draw(st.integers(0 if decodes else 1, most))
    key, programs = buckets.pick(decodes, prefill), buckets.keys()
    holding = [
        other
        for other in programs
        if other.rows >= decodes
        and other.prefill_tokens >= prefill
        and bool(other.prefill_tokens) == bool(prefill)
    ]
    assert key in holding
    assert key.num_tokens == min(other.num_tokens for other in holding)


@given(config=configs())
def test_the_largest_program_is_within_the_budget_and_wastes_less_than_16_tokens(config):
    max_num_seqs, budget = config
    key = Buckets.from_config(max_num_seqs, budget).keys()[-1]
    assert key.rows == (max_num_seqs if max_num_seqs > 1 else 0)
    assert budget - 16 < max_num_seqs + key.prefill_tokens <= budget


@given(config=configs())
def test_programs_are_few_and_distinct(config):
    max_num_seqs, budget = config
    keys = Buckets.from_config(max_num_seqs, budget).keys()
    doublings = max_num_seqs.bit_length() + 1
    assert len(keys) == len(set(keys)) <= doublings + 3 * budget.bit_length()
    assert ProgramKey(1, 0) in keys
    assert all(key.num_tokens for key in keys)


def test_the_programs_of_a_small_server():
    buckets = Buckets.from_config(max_num_seqs=24, max_num_batched_tokens=24 + 96)
    assert buckets.rows == (1, 2, 4, 8, 16, 24)
    assert buckets.mixed_rows == (0, 24)
    assert buckets.prefill_tokens == (32, 64, 96)
    assert len(buckets.keys()) == 6 + 6
    assert buckets.pick(5, 0) == ProgramKey(8, 0)
    assert buckets.pick(0, 1) == ProgramKey(0, 32)
    assert buckets.pick(9, 65) == ProgramKey(24, 96)


@pytest.mark.parametrize("step", [(0, 0), (25, 0), (25, 1), (1, 97)])
def test_a_shape_outside_the_set_is_an_error_that_says_what_fits(step):
    buckets = Buckets.from_config(max_num_seqs=24, max_num_batched_tokens=24 + 96)
    with pytest.raises(ProgramMissError, match=r"1 to 24 decodes, .* 1 to 96 prefill tokens"):
        buckets.pick(*step)


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(0, 64), (64, 64), (64, 79)])
def test_refuses_a_budget_that_leaves_nothing_to_prefill(max_num_seqs, budget):
    with pytest.raises(ConfigError, match=f"max_num_batched_tokens {budget}"):
        Buckets.from_config(max_num_seqs, budget)


def test_prefills_dealt_to_ranks_divide():
    assert Buckets.from_config(2, 2 + 100, seq=3).prefill_tokens == (48, 96)
    with pytest.raises(ConfigError, match="by 48 or more"):
        Buckets.from_config(2, 2 + 40, seq=3)


def test_prefills_that_go_from_program_to_program_are_of_one_size():
    assert Buckets.from_config(2, 2 + 64, pipelined=True).prefill_tokens == (32, 64)
    assert Buckets.from_config(2, 2 + 64, pipelined=True, seq=2).prefill_tokens == (64,)
