from __future__ import annotations

import math

import pytest
from event_sessions import Session, VirtualClock
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.events import EventLog, VerifiedDrafts
from jaxserve.core.requests.outputs import RequestMetrics
from jaxserve.metrics.fluidity import Deadlines, Fluidity, linear_prefill
from jaxserve.metrics.metrics import Metrics
from jaxserve.metrics.statistics import HistogramValue
from jaxserve.metrics.summaries import Percentiles, RunSummary

DEADLINES = Deadlines(linear_prefill(1_000_000, 0), decode_us=100_000)
PARTS = ("queue", "prefill", "decode", "inference")


class Run:
    """A log on a virtual clock with its metrics, and steps at times a test chooses."""

    def __init__(self, **options):
        self.clock = VirtualClock()
        self.metrics = Metrics(DEADLINES, **options)
        self.log = EventLog(self.metrics.fold, clock=self.clock, keep_all=True)
        self.steps = 0

    def at(self, us: int) -> EventLog:
        self.clock.us = us
        return self.log

    def step(
        self, dispatched_us: int, ready_us: int, sequences, counts=None, drafts=(), **shape
    ) -> None:
        defaults = {"decode_rows": 0, "prefill": (), "padded_tokens": 0, "pages_used": 1}
        self.at(dispatched_us).dispatched(
            self.steps,
            "program",
            begin_us=dispatched_us - 6,
            scheduled_us=dispatched_us - 3,
            packed_us=dispatched_us - 1,
            pages_total=4,
            **{**defaults, **shape},
        )
        begin_us = dispatched_us + 10
        self.at(ready_us).collected(
            self.steps, sequences, counts, drafts=drafts, begin_us=begin_us, ready_us=ready_us
        )
        self.steps += 1

    def value(self, name: str):
        return self.metrics.get_metrics()[name].value


def observed(value: HistogramValue, upper: float) -> int:
    return dict(value.buckets)[upper]


def test_each_token_has_its_time_however_long_sequences_run_together(monkeypatch):
    """Steps in a row store their times in common, here three of them at most."""
    monkeypatch.setattr("jaxserve.metrics.metrics._MAX_STREAK", 3)
    run = Run(keep_tokens=True)
    for sequence in range(3):
        run.at(0).arrived(sequence, str(sequence), prompt_tokens=1)
    times: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in range(12):
        ready_us = 1_000 * step + 900
        gained = [sequence for sequence in times if sequence == 0 or step % (3 + sequence)]
        counts = [1 + sequence for sequence in gained] if step == 5 else None
        run.step(1_000 * step + 100, ready_us, gained, counts)
        for sequence, count in zip(gained, counts or [1] * len(gained)):
            times[sequence] += [ready_us] * count
        for sequence in gained:
            found = run.metrics.request([sequence])
            assert found.first_token_us == times[sequence][0]
    for sequence in (1, 0, 2):
        run.at(20_000).finished(sequence, "length")
    ended = {int(summary.request_id): summary for summary in run.metrics.finished()}
    assert {sequence: list(summary.token_us) for sequence, summary in ended.items()} == times
    with pytest.raises(KeyError):
        run.step(30_000, 30_900, [0])
    assert run.value("vllm:generation_tokens_total") == sum(map(len, times.values()))


def test_a_step_with_drafts_counts_its_own_tokens():
    run = Run()
    run.at(0).arrived(0, "a", prompt_tokens=5)
    run.step(1_000, 1_900, [0], [1])
    for step in (2, 3, 4):
        run.step(1_000 * step, 1_000 * step + 900, [0], [3], drafts=[VerifiedDrafts(0, 4, 2)])
    steps = run.value("vllm:iteration_tokens_total")
    assert (steps.count, steps.sum) == (4, 5 + 1 + 3 * 3)
    accepted = run.value("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert accepted == {"0": 3, "1": 3, "2": 0, "3": 0}


def test_drafts_are_counted_by_request():
    """Those of all its sequences, while it runs and after."""
    run = Run()
    for sequence, request in enumerate("aab"):
        run.at(0).arrived(sequence, request, prompt_tokens=5)
    run.step(1_000, 1_900, [0, 1, 2])
    first = VerifiedDrafts(0, 4, 2), VerifiedDrafts(1, 3, 0)
    run.step(2_000, 2_900, [0, 1, 2], [3, 1, 1], drafts=first)
    run.at(3_000).finished(0, "stop")
    second = VerifiedDrafts(1, 1, 1), VerifiedDrafts(2, 1, 1)
    run.step(4_000, 4_900, [1, 2], [2, 2], drafts=second)
    run.at(5_000).finished(1, "stop")
    for sequences, counts in (([0, 1], (3, 8, 3)), ([2], (1, 1, 1))):
        found = run.metrics.request(sequences)
        assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == counts
    assert RunSummary.of(run.metrics.finished()).drafts == (3, 8, 3)


def test_one_request_by_hand():
    run = Run(keep_tokens=True)
    run.at(1_000).arrived(0, "a", prompt_tokens=20)
    run.at(4_000).admitted(0, cached_tokens=16)
    run.step(5_000, 51_000, [0], prefill=[(0, 4)], padded_tokens=12, pages_used=2)
    run.step(60_000, 151_000, [0], decode_rows=1)
    run.step(160_000, 500_000, [0], decode_rows=1)
    run.at(500_100).finished(0, "stop")

    (summary,) = run.metrics.finished()
    assert summary.token_us == (51_000, 151_000, 500_000)
    assert summary.inter_token_us == (100_000, 349_000)
    assert (summary.queue_us, summary.ttft_us, summary.e2e_us) == (3_000, 50_000, 499_100)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (20, 16, 3)
    assert summary.fluidity == Fluidity(met=3, missed=0)
    assert run.metrics.request([0]) == RequestMetrics(
        arrival_us=1_000, first_token_us=51_000, finish_us=500_100, queue_us=3_000, cached_tokens=16
    )

    assert run.value("vllm:prompt_tokens_total") == 20
    assert run.value("vllm:generation_tokens_total") == 3
    assert run.value("vllm:prefix_cache_queries_total") == 20
    assert run.value("vllm:prefix_cache_hits_total") == 16
    assert run.value("vllm:request_success_total") == {
        "stop": 1,
        "length": 0,
        "abort": 0,
        "error": 0,
    }
    ttft = run.value("vllm:time_to_first_token_seconds")
    assert (ttft.sum, observed(ttft, 0.04), observed(ttft, 0.06)) == (0.05, 0, 1)
    gaps = run.value("vllm:inter_token_latency_seconds")
    assert (gaps.sum, observed(gaps, 0.1), observed(gaps, 0.4)) == (0.449, 1, 2)
    e2e = run.value("vllm:e2e_request_latency_seconds")
    assert (e2e.sum, e2e.count) == (0.4991, 1)
    assert run.value("jaxserve:token_deadlines_total") == {"met": 3, "missed": 0}
    assert observed(run.value("jaxserve:fluidity_index"), 0.99) == 0
    assert run.value("jaxserve:padded_tokens_total") == 12
    times = {part: run.value(f"vllm:request_{part}_time_seconds").sum for part in PARTS}
    assert times == {"queue": 0.003, "prefill": 0.047, "decode": 0.449, "inference": 0.496}
    assert run.value("vllm:request_time_per_output_token_seconds").sum == 0.2245
    assert run.value("vllm:request_prompt_tokens").sum == 20
    assert run.value("vllm:request_prefill_kv_computed_tokens").sum == 4
    assert run.value("vllm:request_generation_tokens").sum == 3
    steps = run.value("vllm:iteration_tokens_total")
    assert (steps.sum, steps.count) == (20 + 3, 3)
    host = run.value("jaxserve:host_seconds_total")
    assert host["schedule"] == pytest.approx(9e-6)
    assert host["pack"] == pytest.approx(6e-6)
    assert host["dispatch"] == pytest.approx(3e-6)
    assert host["wait"] == pytest.approx((45_990 + 90_990 + 339_990) / 1e6)


def test_gauges_follow_a_sequence_through_its_states():
    run = Run()

    def gauges():
        return run.value("vllm:num_requests_running"), run.value("vllm:num_requests_waiting")

    log = run.at(0)
    log.arrived(0, "a", 1)
    log.arrived(1, "b", 1)
    assert gauges() == (0, 2)
    log.admitted(0)
    assert gauges() == (1, 1)
    log.preempted(0)
    assert gauges() == (0, 2)
    log.resumed(0)
    assert gauges() == (1, 1)
    log.finished(0, "abort")
    log.failed(1, "no memory")
    assert gauges() == (0, 0)
    assert run.value("vllm:num_preemptions_total") == 1
    assert run.value("vllm:request_success_total")["error"] == 1
    # What was cut short says nothing about latency.
    assert run.value("vllm:e2e_request_latency_seconds").count == 0
    assert run.value("vllm:prompt_tokens_total") == 0


def test_preemptions_of_completed_requests():
    run = Run()
    for sequence, times in ((0, 0), (1, 2), (2, 1)):
        run.log.arrived(sequence, "a", 5)
        run.log.admitted(sequence)
        for _ in range(times):
            run.log.preempted(sequence)
            run.log.resumed(sequence)
        run.log.finished(sequence, "abort" if sequence == 2 else "length")
    preemptions = run.value("vllm:request_num_preemptions")
    assert (preemptions.sum, preemptions.count) == (2, 2)
    assert preemptions.buckets[:3] == ((0, 1), (1, 1), (2, 2))


def test_parameters_are_those_of_arrived_requests():
    """n is of a request, max_tokens of each of its sequences that has a limit."""
    run = Run()
    for index in range(3):
        run.log.arrived(index, "a", 5, max_tokens=7, index=index, n=3)
    run.log.arrived(3, "b", 5)
    n, limits = run.value("vllm:request_params_n"), run.value("vllm:request_params_max_tokens")
    assert (n.sum, n.count) == (3 + 1, 2)
    assert (limits.sum, limits.count) == (21, 3)


def test_what_was_aborted_is_in_no_histogram_of_completed_requests():
    run = Run()
    run.log.arrived(0, "a", 5)
    run.log.admitted(0)
    run.step(10, 20, [0])
    run.log.finished(0, "abort")
    names = [f"vllm:request_{part}_time_seconds" for part in PARTS]
    names += ["vllm:request_prompt_tokens", "vllm:request_generation_tokens"]
    assert {run.value(name).count for name in names} == {0}


def test_several_tokens_of_a_step_are_one_delivery():
    run = Run(keep_tokens=True)
    run.at(0).arrived(0, "a", 1)
    run.log.admitted(0)
    run.step(10, 50_000, [0], counts=[1])
    run.step(60_000, 100_000, [0], counts=[4])
    run.at(100_000).finished(0, "length")
    assert run.value("vllm:generation_tokens_total") == 5
    assert run.value("vllm:inter_token_latency_seconds").count == 1
    assert run.metrics.finished()[0].inter_token_us == (50_000, 0, 0, 0)


def test_a_request_of_several_sequences_is_served_with_its_first_and_ends_with_its_last():
    run = Run()
    for sequence in (0, 1):
        run.at(100).arrived(sequence, "a", 32)
    run.at(150).admitted(0, cached_tokens=0)
    assert run.metrics.request([0, 1]) == RequestMetrics(100, None, None, 50, 0)
    run.step(200, 300, [0])
    run.at(350).admitted(1, cached_tokens=32)
    run.step(400, 500, [0, 1])
    run.at(600).finished(0, "stop")
    assert run.metrics.request([0, 1]).finish_us is None
    run.at(700).finished(1, "length")
    assert run.metrics.request([0, 1]) == RequestMetrics(100, 300, 700, 50, 0)


def test_device_is_busy_from_call_or_previous_result_to_result():
    run = Run()
    run.step(101, 200, [])  # called at 100
    run.step(301, 400, [])  # idle from 200 to 300
    assert run.value("jaxserve:device_busy_seconds_total") == pytest.approx(200e-6)
    assert run.value("jaxserve:device_busy_share") == pytest.approx(200 / 300)
    while_idle = run.metrics.get_metrics(now_us=1_100)["jaxserve:device_busy_share"]
    assert while_idle.value == pytest.approx(200 / 1000)
    # Overlapped: the second of two steps on their way counts from the end of the first.
    log = run.at(500)
    shape = {"decode_rows": 1, "prefill": (), "padded_tokens": 0}
    for step in (2, 3):
        log.dispatched(
            step,
            "p",
            begin_us=500,
            scheduled_us=500,
            packed_us=500,
            pages_used=0,
            pages_total=4,
            **shape,
        )
    log.collected(2, [], begin_us=500, ready_us=600)
    log.collected(3, [], begin_us=600, ready_us=700)
    assert run.value("jaxserve:device_busy_seconds_total") == pytest.approx(400e-6)


def test_startup_phases_and_compiles():
    run = Run()
    assert run.value("jaxserve:device_busy_share") == 0.0
    for name, us in (("weights", 1_500_000), ("warm up", 10), ("weights", 500_000)):
        with run.log.phase("startup", name):
            run.clock.advance(us)
    with run.log.phase("compile", "d4p16"):
        run.clock.advance(9)
    assert run.value("jaxserve:startup_seconds") == {"weights": 2.0, "warm up": 1e-05}
    assert run.value("jaxserve:programs_compiled_total") == 1


def test_moves_by_the_way_they_took():
    """Those that failed moved nothing."""
    run = Run()
    assert run.value("jaxserve:kv_transferred_bytes_total") == {}
    for way, begin_us, end_us, error in (
        (("device", "host"), 0, 250, None),
        (("host", "device"), 100, 600, None),
        (("device", "host"), 300, 1_050, None),
        (("device", "host"), 1_100, 9_000_000, "OSError: disk full"),
    ):
        run.log.transferred(
            *way, pages=2, num_bytes=64, begin_us=begin_us, end_us=end_us, error=error
        )
    assert run.value("jaxserve:kv_transferred_bytes_total") == {
        "device-host": 128,
        "host-device": 64,
    }
    assert run.value("jaxserve:kv_transfer_seconds_total") == {
        "device-host": 0.001,
        "host-device": 0.0005,
    }


def test_an_unknown_sequence_is_refused():
    run = Run(keep_finished=1)
    with pytest.raises(KeyError):
        run.log.admitted(5)
    for sequence in (0, 1):
        run.log.arrived(sequence, "a", 1)
        run.log.finished(sequence, "abort")
    with pytest.raises(KeyError):
        run.log.finished(1, "abort")
    with pytest.raises(KeyError):
        run.metrics.request([0])  # No longer kept.
    assert run.metrics.request([1]).finish_us == 0
    run.log.arrived(2, "c", 1)  # The log still works after a refusal.
    assert run.value("vllm:num_requests_waiting") == 1


def test_a_run_in_one_line():
    run = Run()
    assert RunSummary.of(run.metrics.finished()) is None
    for sequence, prompt_tokens in enumerate((10, 30)):
        run.at(0).arrived(sequence, "ab"[sequence], prompt_tokens)
        run.log.admitted(sequence, cached_tokens=sequence * 16)
    run.step(10, 100_000, [0])
    run.step(100_010, 200_000, [0, 1])
    run.step(200_010, 400_000, [0, 1])
    for sequence in (0, 1):
        run.at(400_001).finished(sequence, "length")
    run.at(400_001).arrived(2, "never served", 99)
    run.at(900_001).finished(2, "abort")
    assert RunSummary.of(run.metrics.finished()) == RunSummary(
        sequences=2,
        prompt_tokens=40,
        cached_tokens=16,
        output_tokens=5,
        elapsed_us=400_000,
        output_tokens_per_s=12.5,
        stream_tokens_per_s=3 / 0.5,
        ttft_us=Percentiles(p50=100_000, p90=200_000, p99=200_000),
        fluidity=Fluidity(met=5, missed=0),
    )


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.booleans())
def test_a_random_session_adds_up(random, requests, drain):
    clock = VirtualClock()
    metrics = Metrics(DEADLINES, keep_tokens=True)
    log = EventLog(metrics.fold, clock=clock, keep_all=True)
    lives = Session(log, clock, random).run(requests, drain).lives
    snapshot = {name: metric.value for name, metric in metrics.get_metrics().items()}

    served = [life for life in lives.values() if life.token_us]
    running = [life for life in lives.values() if life.state == "running"]
    waiting = [life for life in lives.values() if life.state in ("waiting", "preempted")]
    assert snapshot["vllm:num_requests_running"] == len(running)
    assert snapshot["vllm:num_requests_waiting"] == len(waiting)
    assert snapshot["vllm:num_preemptions_total"] == sum(x.preemptions for x in lives.values())
    assert snapshot["vllm:prompt_tokens_total"] == sum(x.prompt_tokens for x in served)
    assert snapshot["vllm:generation_tokens_total"] == sum(len(x.token_us) for x in served)
    ended = [life.reason for life in lives.values() if life.reason]
    assert snapshot["vllm:request_success_total"] == {
        reason: ended.count(reason) for reason in ("stop", "length", "abort", "error")
    }
    for name, expected_us in (
        ("vllm:time_to_first_token_seconds", [x.token_us[0] - x.arrival_us for x in served]),
        (
            "vllm:inter_token_latency_seconds",
            [b - a for x in served for a, b in zip(x.token_us, x.token_us[1:])],
        ),
        (
            "vllm:e2e_request_latency_seconds",
            [x.finish_us - x.arrival_us for x in lives.values() if x.reason == "length"],
        ),
    ):
        assert snapshot[name].sum == sum(expected_us) / 1e6, name
        for bound, count in snapshot[name].buckets:
            assert count == sum(us <= bound * 1e6 for us in expected_us), (name, bound)
    for sequence, life in lives.items():
        request = metrics.request([sequence])
        assert (request.arrival_us, request.finish_us) == (life.arrival_us, life.finish_us)
        assert request.first_token_us == next(iter(life.token_us), None)
        if life.admitted_us is not None:
            assert request.queue_us == life.admitted_us - life.arrival_us

    replayed = Metrics(DEADLINES, keep_tokens=True)
    for record in log.records:
        replayed.fold(record)
    assert replayed.get_metrics() == metrics.get_metrics()
    assert replayed.finished() == metrics.finished()


def test_metrics_are_named_as_in_vllm_and_shaped_for_an_exporter():
    snapshot = Metrics().get_metrics()
    kinds = {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:num_preemptions_total": "counter",
        "vllm:prompt_tokens_total": "counter",
        "vllm:generation_tokens_total": "counter",
        "vllm:prefix_cache_queries_total": "counter",
        "vllm:prefix_cache_hits_total": "counter",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:inter_token_latency_seconds": "histogram",
        "vllm:e2e_request_latency_seconds": "histogram",
        "vllm:request_success_total": "counter",
        **{f"vllm:request_{part}_time_seconds": "histogram" for part in PARTS},
        "vllm:request_time_per_output_token_seconds": "histogram",
        "vllm:request_prompt_tokens": "histogram",
        "vllm:request_prefill_kv_computed_tokens": "histogram",
        "vllm:request_generation_tokens": "histogram",
        "vllm:request_num_preemptions": "histogram",
        "vllm:request_params_n": "histogram",
        "vllm:request_params_max_tokens": "histogram",
        "vllm:iteration_tokens_total": "histogram",
    }
    assert {name: snapshot[name].kind for name in kinds} == kinds
    for name, metric in snapshot.items():
        if name != "vllm:iteration_tokens_total":
            assert (metric.kind == "counter") == name.endswith("_total"), name
        assert (metric.kind == "histogram") == isinstance(metric.value, HistogramValue), name
        assert (metric.label is not None) == isinstance(metric.value, dict), name
        if metric.kind == "histogram":
            assert metric.value.buckets[-1] == (math.inf, 0), name
