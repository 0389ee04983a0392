"""Jobs on the simulated engine, with a scheduler config and a pool of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from itertools import pairwise

from workloads import Job

from jaxserve.core.commands import Abort
from jaxserve.core.events import EventLog
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets, ProgramKey, StepShape
from jaxserve.core.steps.plan import StepPlan
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.engine.request import Request
from jaxserve.kv.kv_executor import KVExecutor
from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import PagePool
from jaxserve.metrics.metrics import Metrics
from jaxserve.scheduler.scheduler import Scheduler, SchedulerConfig
from jaxserve.simulator.executor import SimulatedExecutor, VirtualClock
from jaxserve.simulator.step_times import LinearTimes, StepTimes
from jaxserve.simulator.transfer_worker import SimulatedTransferWorker


@dataclasses.dataclass(frozen=True)
class Step:
    """One step that ran, and the state it was planned in."""

    start_us: int
    end_us: int
    num_decodes: int
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    num_used_pages: int
    num_kv_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens


@dataclasses.dataclass
class Run:
    """What happened: every step, every job's sequence, when each of its tokens was ready, and how
    many tokens of its prompt were found computed when it first ran."""

    jobs: list[Job]
    steps: list[Step]
    sequences: list[Sequence]
    token_us: list[list[int]]
    cached_tokens: dict[int, int]

    @property
    def first_token_us(self) -> list[int]:
        """Time to first token of every job that got one."""
        return [times[0] - job.arrival_us for job, times in zip(self.jobs, self.token_us) if times]

    @property
    def between_tokens_us(self) -> list[int]:
        """Every time between two tokens of one job."""
        return [b - a for times in self.token_us for a, b in pairwise(times)]

    @property
    def num_preemptions(self) -> int:
        return sum(seq.num_preemptions for seq in self.sequences)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(step.num_prefill_tokens for step in self.steps)

    @property
    def output_tokens_per_s(self) -> float:
        return sum(map(len, self.token_us)) * 1e6 / self.steps[-1].end_us

    @property
    def mean_running(self) -> float:
        """Sequences that hold memory, averaged over steps."""
        return sum(step.num_running for step in self.steps) / len(self.steps)


def linear_times(base_us: float, per_token_us: float, per_pair_us: float = 0.0) -> LinearTimes:
    """Step time a + b · tokens + c · pairs of a query and a key that it sees."""
    return LinearTimes(base_us / 1e6, per_token_us / 1e6, per_pair_us / 1e6)


class _Unpadded(Buckets):
    """A program for every step, without padding."""

    def program(self, steps: Iterable[StepShape]) -> ProgramKey:
        num_decodes, prefill_tokens, *_ = map(max, zip(*steps))
        return ProgramKey(num_decodes, prefill_tokens)


class _Recorder:
    """Step times that record each step, in the state that the scheduler left."""

    def __init__(self, times: StepTimes, clock: VirtualClock, scheduler: Scheduler) -> None:
        self.steps: list[Step] = []
        self._times, self._clock, self._scheduler = times, clock, scheduler
        self._free_us = 0

    def step(self, key: ProgramKey, plans: tuple[StepPlan, ...]) -> float:
        seconds, entering, scheduler = self._times.step(key, plans), plans[-1], self._scheduler
        start_us = max(self._free_us, self._clock.now())
        self._free_us = start_us + round(seconds * 1e6)
        if not entering.empty:
            step = Step(
                start_us=start_us,
                end_us=self._free_us,
                num_decodes=len(entering.decodes),
                num_prefill_tokens=entering.num_prefill_tokens,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_used_pages=scheduler.pool.num_used,
                num_kv_tokens=sum(seq.num_computed for seq in scheduler.running),
            )
            self.steps.append(step)
        return seconds

    def copy(self, num_pages: int) -> float:
        return self._times.copy(num_pages)


def simulate(
    jobs: Iterable[Job],
    config: SchedulerConfig,
    memory: PagePool | KVManager,
    times: StepTimes,
    *,
    buckets: Buckets | None = None,
    on_step: Callable[[Scheduler, StepPlan], None] | None = None,
    clock: VirtualClock | None = None,
    worker: SimulatedTransferWorker | None = None,
) -> Run:
    """Serves the jobs to the end. A job's n-th token has the id n.

    `memory` is a KV manager, or a pool for one that keeps no prefixes; a manager with tiers comes
    with its `worker`, on the same `clock`. Steps are padded to `buckets`, by default not at all.
    `on_step` sees each plan as it is made. Raises RuntimeError when jobs wait that can never run.
    """
    jobs, clock = list(jobs), clock or VirtualClock()
    kv = memory if isinstance(memory, KVManager) else KVManager(memory, prefix_caching=False)
    scheduler = Scheduler(config, kv)
    recorder, cached = _Recorder(times, clock, scheduler), {}
    executor = SimulatedExecutor(
        buckets or _Unpadded((), (), ()),
        config.num_stages,
        recorder,
        clock,
        lambda seq, output_index: output_index,
    )
    metrics = Metrics(keep_finished=max(1, len(jobs)), keep_tokens=True)
    log = EventLog(metrics.fold, clock=clock.now)
    inputs = InputProcessor(EngineConfig(), None, 1 << 62, frozenset(), log.now)
    core = EngineCore(scheduler, KVExecutor(kv, worker, executor, log), executor, inputs, log, ())
    schedule = scheduler.schedule

    def watched(now_us: int) -> StepPlan:
        plan = schedule(now_us)
        for chunk in plan.prefills:
            cached.setdefault(int(chunk.seq.request_id), chunk.start)
        if on_step is not None:
            on_step(scheduler, plan)
        return plan

    def step() -> None:
        before = clock.now(), executor.num_dispatches, len(executor.in_flight)
        core.step()
        idle = before == (clock.now(), executor.num_dispatches, len(executor.in_flight))
        if idle and core.has_work and not kv.num_in_flight_transfers:
            raise RuntimeError(f"{scheduler.num_waiting} sequences wait and none can run")

    scheduler.schedule = watched
    changes = [(job.arrival_us, False, number) for number, job in enumerate(jobs)]
    changes += [
        (job.abort_us, True, number) for number, job in enumerate(jobs) if job.abort_us is not None
    ]
    requests: dict[int, Request] = {}
    for time_us, aborts, number in sorted(changes):
        while core.has_work and clock.now() < time_us:
            step()
        clock.advance_to(time_us)
        if aborts:
            core.apply(Abort(str(number)))
        else:
            requests[number] = _add(core, inputs, number, jobs[number])
    while core.has_work:
        step()
    token_us = {int(summary.request_id): summary.token_us for summary in metrics.finished()}
    return Run(
        jobs,
        recorder.steps,
        [requests[number].sequence_outputs[0].seq for number in range(len(jobs))],
        [list(token_us[number]) for number in range(len(jobs))],
        cached,
    )


def _add(core: EngineCore, inputs: InputProcessor, number: int, job: Job) -> Request:
    alike = job.token_ids is not None
    tokens = list(job.token_ids) if alike else [0] * job.prompt_tokens
    params = SamplingParams(max_tokens=job.max_tokens, stop_token_ids=(job.output_tokens - 1,))
    added = inputs.process(
        str(number),
        TokenizedPrompt(None, tokens),
        params,
        job.priority,
        job.tenant,
        job.shared_prefix,
        None if alike else f"job {number}",
    )
    return core.apply(added)
