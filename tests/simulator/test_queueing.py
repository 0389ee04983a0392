"""Simulations against timelines by hand, queueing theory, and what must be conserved."""

from __future__ import annotations

import itertools
import random

import pytest
from exhaustive import combination
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import of, simulation, tiny_config, tiny_trace

from jaxserve.core.events import Admitted, Arrived, Collected, Dispatched, Finished
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.steps.buckets import Buckets
from jaxserve.scheduler.policies import POLICIES
from jaxserve.simulator.simulation import Arrival, Simulation
from jaxserve.simulator.step_times import LinearTimes

TIMES = LinearTimes(base_s=2e-3, token_s=1e-4)


def arrival(time_us: int, prompt_tokens: int, output_tokens: int, token: int = 0) -> Arrival:
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    return Arrival(time_us, [token] * prompt_tokens, params)


def simulated(times: LinearTimes = TIMES, **changes: object) -> Simulation:
    config = tiny_config("sarathi", **changes)
    buckets = Buckets.from_config(config.max_num_seqs, config.max_num_batched_tokens)
    return Simulation(config, buckets, 400, times, keep_events=True)


def test_three_requests_by_hand():
    """A alone pads to 32 tokens: 5.2 ms. Its second token takes 2.1 ms, and is dispatched before B,
    who came in between, is seen. Its third is computed with B's prompt, in the program of 4 rows
    and 32 tokens: 5.6 ms. C finds an idle engine."""
    engine = simulated()
    engine.run([arrival(0, 8, 3, 1), arrival(1_000, 8, 2, 2), arrival(30_000, 8, 1, 3)])
    a, b, c = sorted(engine.metrics.finished(), key=lambda summary: int(summary.request_id))
    assert a.token_us == (5_200, 7_300, 12_900)
    assert b.token_us == (12_900, 15_000)
    assert c.token_us == (35_200,)
    assert [step.program for step in of(engine.log.records, Dispatched)] == [
        "step-0-32",
        "step-1-0",
        "step-4-32",
        "step-1-0",
        "step-0-32",
    ]


@pytest.mark.parametrize("load", [combination(0.3), 0.7])
def test_one_at_a_time_is_an_m_d_1_queue(load):
    """Mean time to first token: D + R D^2 / (2 (1 - R D)) (DistServe, Zhong et al. 2024)."""
    service_s, draw, time_s, arrivals = 5.2e-3, random.Random(1), 0.0, []
    rate = load / service_s
    for number in range(8_000):
        arrivals.append(arrival(round(time_s * 1e6), 2, 1, number))
        time_s += draw.expovariate(rate)
    engine = simulated(max_num_seqs=1, max_num_batched_tokens=33, debug_kv=False)
    engine.run(arrivals)
    finished = sorted(engine.metrics.finished(), key=lambda summary: int(summary.request_id))
    # From the arrival of the trace: the engine itself sees a request after the step that runs.
    waits = [s.first_token_us - a.time_us for s, a in zip(finished, arrivals)]
    expected = service_s + rate * service_s**2 / (2 * (1 - load))
    assert sum(waits) / len(waits) / 1e6 == pytest.approx(expected, rel=0.05)


def test_littles_law():
    """Requests in the system, averaged over time, are their rate times their mean time in it."""
    engine = simulated(debug_kv=False)
    engine.run(tiny_trace(count=40))
    changes = [
        (record.time_us, 1 if isinstance(record, Arrived) else -1)
        for record in engine.log.records
        if isinstance(record, Arrived | Finished)
    ]
    inside, area = 0, 0
    for (time_us, change), (next_us, _) in itertools.pairwise(changes):
        inside += change
        area += inside * (next_us - time_us)
    summaries = engine.metrics.finished()
    assert area == sum(summary.e2e_us for summary in summaries) > 0


@settings(max_examples=10, deadline=None)
@given(
    scheduler=st.sampled_from(sorted(POLICIES)),
    max_num_seqs=st.integers(1, 6),
    prefill_tokens=st.sampled_from([16, 32, 80]),
    stages=st.integers(1, 3),
    num_pages=st.integers(33, 70),
    host_pages=st.sampled_from([0, 8, 64]),
    preemption=st.sampled_from(["auto", "recompute"]),
    prefix_caching=st.booleans(),
    fair_share=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_nothing_is_lost_with_any_config(
    scheduler,
    max_num_seqs,
    prefill_tokens,
    stages,
    num_pages,
    host_pages,
    preemption,
    prefix_caching,
    fair_share,
    seed,
):
    """Tokens in, tokens out, and pages."""
    engine = simulation(
        scheduler,
        num_pages=num_pages,
        host_pages=host_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + prefill_tokens,
        pipeline_parallel_size=stages,
        preemption=preemption,
        enable_prefix_caching=prefix_caching,
        fair_share=fair_share,
    )
    trace = tiny_trace(seed, count=8)
    requests = engine.run(trace)
    sequences = [output.seq for request in requests for output in request.sequence_outputs]
    assert all(len(seq.output_token_ids) == seq.params.max_tokens for seq in sequences)
    records = engine.log.records
    out = sum(len(record.sequences) for record in of(records, Collected))
    assert out == sum(seq.params.max_tokens for seq in sequences)
    prefilled = sum(record.prefill_tokens for record in of(records, Dispatched))
    cached = sum(record.cached_tokens for record in of(records, Admitted))
    assert prefilled + cached >= sum(seq.num_prompt for seq in sequences)
    if not sum(seq.num_preemptions for seq in sequences):
        assert prefilled + cached == sum(seq.num_prompt for seq in sequences)
    assert engine.core.kv.pool.num_used == 0
    assert not engine.core.requests
