"""The engine core on a virtual clock: without JAX, by hand, and beside the engine that computes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from exhaustive import combination
from patience import PATIENCE_S
from scripts import run_script
from simulations import TIMES, simulation, tiny_trace
from tiny_engines import TinyModel

from jaxserve.core.events import Collected, Dispatched, EventLog
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.settings.speculative import AUTO_LENGTHS
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.core.steps.results import DispatchedStep, PackedStep, StepResults
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_core import EngineCore
from jaxserve.kv.tier import Tier
from jaxserve.metrics.metrics import Metrics
from jaxserve.runtime.programs.device_step import BUBBLE, DeviceStep
from jaxserve.runtime.programs.forward.step_work import prefix_cost
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.startup.engine_plan import EnginePlan
from jaxserve.runtime.startup.start import start
from jaxserve.scheduler.policies import POLICIES
from jaxserve.simulator.acceptance import Verified
from jaxserve.simulator.executor import SimulatedExecutor, VirtualClock
from jaxserve.simulator.layer_reads import LayerReads
from jaxserve.simulator.pool_use import PoolUse
from jaxserve.simulator.simulation import Arrival, Simulation
from jaxserve.simulator.transfer_worker import Link, SimulatedTransferWorker
from jaxserve.text import Tokenizer

PLAIN = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_every_scheduler_runs_where_jax_is_missing():
    run_script(
        """
        import sys
        sys.modules["jax"] = sys.modules["jaxlib"] = None
        import simulations
        simulations.check_all()
        """,
        timeout_s=PATIENCE_S,
    )


def test_a_timeline_by_hand():
    """Prompts of 8 tokens pad to 32: 5.2 ms and 8 + 7 + .. = 36 pairs; a decode of one row sees 9
    tokens, then 10."""
    simulated = simulation("sarathi")
    first, second = (Arrival(us, range(token, token + 8), PLAIN) for us, token in ((0, 0), (1, 50)))
    simulated.run([first])
    steps = [r for r in simulated.log.records if isinstance(r, Collected)]
    assert [step.time_us for step in steps if step.sequences] == [
        5_236,
        5_236 + 2_109,
        5_236 + 2_109 + 2_110,
    ]
    begun = simulated.clock.now()
    simulated.run([dataclasses.replace(second, time_us=begun)])
    assert simulated.clock.now() - begun == begun
    (step, *_) = (r for r in simulated.log.records if isinstance(r, Dispatched))
    assert step.prefill_tokens == 8
    assert step.padded_tokens == 24


def test_the_pool_is_as_full_as_it_is_between_requests_too():
    simulated = simulation("sarathi", enable_prefix_caching=False)
    pool, clock = simulated.core.kv.pool, simulated.clock
    use = PoolUse(pool, clock)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    simulated.run([Arrival(begin_us, [1, 2], params) for begin_us in (0, 10_000_000)])
    # Each has a page until its last step runs, and none is taken in between.
    ends = [each.token_us[-2] - each.arrival_us for each in simulated.metrics.finished()]
    assert len(ends) == 2 and 0 < max(ends) < 1_000_000
    assert use.peak == 1 / pool.capacity
    assert use.share_us == pytest.approx(sum(ends) / pool.capacity, rel=1e-9)
    times_us, shares = zip(*use.points)
    assert len(times_us) <= 1025 and times_us[-1] == clock.now()
    spans = [end - begin for begin, end in itertools.pairwise(times_us)]
    integral = sum(span * share for span, share in zip(spans, shares))
    assert integral == pytest.approx(use.share_us, rel=1e-9)
    assert all(not share for us, share in use.points if 1_000_000 < us < 9_000_000)


def test_transfers_take_the_time_of_their_bytes_one_at_a_time_in_each_queue():
    clock = VirtualClock()
    link = Link(bytes_per_s=1e6, latency_s=1e-3)
    transfers = SimulatedTransferWorker({Tier.HOST: link}, page_bytes=1000, clock=clock)
    assert transfers.reserve()
    assert transfers.reserve()
    save = transfers.submit(Tier.DEVICE, [1, 2], Tier.HOST, [0, 1], 2)
    other = transfers.submit(Tier.DEVICE, [3], Tier.HOST, [2], 1)
    fetch = transfers.submit(Tier.HOST, [5], Tier.DEVICE, [4])
    assert not transfers.ended()
    assert not transfers.reserve(2_999)  # Both buffers are in use until 3 ms.
    assert clock.now() == 2_999
    assert transfers.reserve(1)
    assert [handle.ended_us for handle in (fetch, save)] == [2_000, 3_000]
    assert other.ended_us is None
    assert transfers.ended() == [fetch, save]
    assert fetch.consume()
    assert transfers.wait(10_000)
    assert (clock.now(), other.begun_us, other.ended_us) == (5_000, 3_000, 5_000)
    assert transfers.ended() == [other]
    assert not transfers.wait(10_000)
    assert clock.now() == 5_000


def test_a_pass_takes_as_long_as_its_reads_or_its_computing():
    """Of 5 and 1 host pages, in groups of 4: three groups, each with its copies."""
    reads = LayerReads(weights_s=2.0, page_s=0.5, latency_s=0.25, group_pages=4, steps=2)
    one, other = (
        StepPlan(decodes=(ScheduledChunk(None, 9, 1, True, 0, 0, host_pages=(range(count),)),))
        for count in (5, 1)
    )
    assert reads.pass_s(1.0, [one, other]) == 2.0 + 3 * (4 * 0.5 + 0.25)
    assert reads.pass_s(9.0, [one, other]) == 9.0
    assert reads.pass_s(1.0, [StepPlan()]) == 2.0
    assert reads.pass_s(0.0, [StepPlan()]) == 0.0
    assert reads.to_host_s(3) == 0.25 + 3 * 0.5


def chunk_of(chunk: ScheduledChunk) -> tuple[Any, ...]:
    seq = chunk.seq
    sizes = chunk.num_uploaded, chunk.num_drafts, chunk.num_lookahead_tokens
    return (seq.request_id, seq.index, *chunk[1:6], list(chunk.pages), *sizes)


@contextlib.contextmanager
def decisions(core: EngineCore, decided: list[Any]) -> Iterator[None]:
    """Within the block, `decided` gains every plan that the scheduler makes, as plain data."""
    schedule = core.scheduler.schedule

    def recorded(now_us: int) -> StepPlan:
        plan = schedule(now_us)
        chunks = [list(map(chunk_of, part)) for part in (plan.decodes, plan.prefills)]
        events = [
            [(seq.request_id, seq.index) for seq in part] for part in (plan.resumed, plan.preempted)
        ]
        decided.append((now_us, chunks, list(map(chunk_of, plan.admitted)), events))
        return plan

    core.scheduler.schedule = recorded
    yield
    core.scheduler.schedule = schedule


class TimedRunner(Runner):
    """A runner that computes, and takes the time that a simulated executor would take."""

    def simulate(self, simulated: SimulatedExecutor, clock: VirtualClock) -> None:
        self.simulated, self.clock = simulated, clock
        self.read_steps: list[DispatchedStep] = []

    def dispatch(self, packed: Any, begun_us: int | None) -> None:
        super().dispatch(packed, begun_us)
        if packed is BUBBLE:
            self.simulated.advance(begun_us)
            return
        step = PackedStep(packed.step_id, packed.plan, packed.key)
        self.simulated.dispatch(step, begun_us)

    def to_host(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().to_host(pairs)
        self.simulated.to_host(pairs)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().copy(pairs)
        self.simulated.copy(pairs)

    def read(self, step: DeviceStep) -> StepResults:
        self.simulated.read(self.simulated.in_flight.popleft())
        self.read_steps.append(step)
        return dataclasses.replace(super().read(step), late=False)  # That is of real time.


@pytest.fixture(scope="module")
def started(llama):
    """Everything that an engine of the tiny Llama is made of."""
    config = EngineConfig(str(llama.path), **llama.settings(debug_kv=True, host_kv_bytes=0))
    plan, tokenizer, runner = start(config, EventLog())
    runner.__class__ = TimedRunner
    return plan, tokenizer, runner


@pytest.mark.parametrize("scheduler", POLICIES)
def test_decisions_are_those_of_the_engine_that_computes(started, scheduler):
    plan, tokenizer, runner = started
    target_us = 5_000 if scheduler == "medha" else None
    config = dataclasses.replace(plan.config, scheduler=scheduler, target_step_us=target_us)
    plan = dataclasses.replace(plan, config=config)
    compare(plan, tokenizer, runner, tiny_trace(seed=3))


@pytest.mark.parametrize(
    "kv",
    [
        {},
        combination({"kv_on": "host", "resident_kv_tokens": 16}),
    ],
)
def test_decisions_are_those_of_the_engine_that_reads_below_the_device(tmp_path, kv):
    """Layers on disk, two steps to a read; older KV on the host."""
    model = TinyModel.write_llama(tmp_path, num_hidden_layers=3)
    blocks = {"weights_on": "disk", "steps_per_weight_read": 2, "max_num_seqs": 2}
    blocks |= {"max_num_batched_tokens": 1 + 16, "host_kv_bytes": None if kv else 0}
    settings = model.settings(debug_kv=True, **blocks | kv)
    plan, tokenizer, runner = start(EngineConfig(str(model.path), **settings), EventLog())
    runner.__class__ = TimedRunner
    reads = LayerReads(weights_s=2e-2, page_s=1e-3, latency_s=1e-4, group_pages=4, steps=2)
    steps = compare(plan, tokenizer, runner, tiny_trace(seed=3, count=8), reads)
    runner.close()
    chunks = [chunk for step in steps for chunk in (*step.plan.decodes, *step.plan.prefills)]
    assert any(chunk.host_pages for chunk in chunks) == bool(kv)
    assert any(not step.together for step in steps)  # Steps that ran in a block.


def compare(
    plan: EnginePlan,
    tokenizer: Tokenizer,
    runner: TimedRunner,
    trace: Sequence[Arrival],
    reads: LayerReads | None = None,
) -> list[DispatchedStep]:
    """Serves a trace by an engine and by its simulation, and compares every decision and event.
    Returns the engine's steps, as it read them."""
    clock, metrics = VirtualClock(), Metrics()
    log = EventLog(metrics.fold, clock=clock.now, keep_all=True)
    engine = Engine(plan, tokenizer, runner, log, metrics)
    buckets = plan.shapes.buckets
    runner.simulate(
        SimulatedExecutor(buckets, 1, TIMES, clock, lambda seq, index: 0, reads=reads), clock
    )
    decided, requests = [], []
    with decisions(engine._core, decided):
        for number, arrival in enumerate(trace):
            while engine.has_work and clock.now() < arrival.time_us:
                engine.step()
            clock.advance_to(arrival.time_us)
            requests.append(engine.add(str(number), arrival.token_ids, arrival.params))
        while engine.has_work:
            engine.step()
    outputs = {
        (request.request_id, output.seq.index): output.seq.output_token_ids
        for request in requests
        for output in request.sequence_outputs
    }
    simulated = Simulation(
        plan.config,
        plan.shapes.buckets,
        plan.memory.num_pages,
        TIMES,
        token_of=lambda seq, index: outputs[seq.request_id, seq.index][index],
        reads=reads,
        host_kv=plan.memory.host_kv,
        keep_events=True,
    )
    expected = []
    with decisions(simulated.core, expected):
        simulated.run(trace)
    for number, (ours, theirs) in enumerate(zip(decided, expected)):
        assert ours == theirs, f"step {number}"
    assert len(decided) == len(expected) > len(trace)
    assert log.records == simulated.log.records
    assert metrics.get_metrics(0) == simulated.metrics.get_metrics(0)
    return runner.read_steps


class _Seen:
    """The acceptance that an engine had, by request and output."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int, int], Verified] = {}

    def verified(self, seq: Sequence, output_index: int, num_drafts: int) -> Verified:
        return self.rows[seq.request_id, seq.index, output_index]


class DraftingRunner(TimedRunner):
    """One that notes which drafts were accepted."""

    seen: _Seen

    def read(self, step: DeviceStep) -> StepResults:
        results = super().read(step)
        for row, chunk in enumerate(results.sampled):
            seq = chunk.seq
            place = seq.request_id, seq.index
            # Of a decode the devices know how far it is, of the others the host does.
            first = chunk.output_index
            if row < len(step.plan.decodes):
                first = self.sampled_by.get(place, first)
            kept = len(results.token_ids[row])
            self.seen.rows[*place, first] = Verified(results.num_drafts[row], kept - 1)
            self.sampled_by[place] = first + kept
        return results


def without_trees(record: Any) -> Any:
    """The record without the tokens of drafts, which no simulation has."""
    if not isinstance(record, Collected):
        return record
    return record._replace(drafts=tuple(each._replace(tree=None) for each in record.drafts))


def predictable(params: SamplingParams) -> SamplingParams:
    """As `params`, of an answer that repeats itself, so that drafts are found and accepted: also
    those of a step that was dispatched before its sequence had finished."""
    longer = params.max_tokens + 20
    two = {"temperature": 0.0, "n": 1, "allowed_token_ids": (97, 98), "max_tokens": longer}
    return dataclasses.replace(params, **two)


def test_decisions_are_those_of_the_engine_that_speculates(llama):
    """With the same drafts accepted, the numbers of drafts, the pages and the steps are the
    same."""
    speculative = {"num_speculative_tokens": "auto", "prompt_lookup_min": 1}
    settings = llama.settings(debug_kv=True, host_kv_bytes=0)
    settings |= {"speculative_config": speculative, "max_num_seqs": 2}
    settings["max_num_batched_tokens"] = 2 * (1 + AUTO_LENGTHS[-1]) + 16
    plan, tokenizer, runner = start(EngineConfig(str(llama.path), **settings), EventLog())
    runner.__class__, runner.seen, runner.sampled_by = DraftingRunner, _Seen(), {}
    clock, metrics = VirtualClock(), Metrics()
    log = EventLog(metrics.fold, clock=clock.now, keep_all=True)
    engine = Engine(plan, tokenizer, runner, log, metrics)
    shadow = SimulatedExecutor(plan.shapes.buckets, 1, TIMES, clock, lambda seq, index: 0)
    runner.simulate(shadow, clock)
    greedy = [
        dataclasses.replace(each, params=predictable(each.params)) for each in tiny_trace(seed=3)
    ]
    decided, requests = [], []
    with decisions(engine._core, decided):
        for number, arrival in enumerate(greedy):
            while engine.has_work and clock.now() < arrival.time_us:
                engine.step()
            clock.advance_to(arrival.time_us)
            requests.append(engine.add(str(number), arrival.token_ids, arrival.params))
        while engine.has_work:
            engine.step()
    outputs = {
        request.request_id: request.sequence_outputs[0].seq.output_token_ids for request in requests
    }

    def token_of(seq: Sequence, index: int) -> int:
        tokens = outputs[seq.request_id]
        return tokens[index] if index < len(tokens) else 0  # The surplus, which is dropped.

    simulated = Simulation(
        plan.config,
        plan.shapes.buckets,
        plan.memory.num_pages,
        TIMES,
        token_of=token_of,
        acceptance=runner.seen,
        prefix_cost=prefix_cost(plan.shapes),
        keep_events=True,
    )
    expected = []
    with decisions(simulated.core, expected):
        simulated.run(greedy)
    for number, (ours, theirs) in enumerate(zip(decided, expected)):
        assert ours == theirs, f"step {number}"
    assert len(decided) == len(expected)
    assert [*map(without_trees, log.records)] == simulated.log.records
    assert sum(seen.num_accepted for seen in runner.seen.rows.values()) > 0
    assert any(chunk[-2] for _, (decodes, _), *_ in decided for chunk in decodes)
