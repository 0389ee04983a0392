"""Runs the real scheduler on a virtual clock advanced by a cost function."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
from workloads import Job

from jaxserve.core.buckets import Buckets
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.step_plan import StepPlan
from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import PagePool
from jaxserve.kv.transfer_worker import TransferWorker
from jaxserve.scheduler.scheduler import Scheduler, SchedulerConfig
from jaxserve.scheduler.step_time import StepLoad


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

    steps: list[Step]
    sequences: list[Sequence]
    token_us: list[list[int]]
    cached_tokens: dict[int, int]

    @property
    def first_token_us(self) -> list[int]:
        """Time to first token of every job that got one."""
        return [
            times[0] - seq.arrival_us for seq, times in zip(self.sequences, self.token_us) if times
        ]

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


def linear_us(base_us: int, per_token_us: int) -> Callable[[StepPlan], int]:
    """Step time a + b · tokens."""
    return lambda plan: base_us + per_token_us * plan.num_tokens


def attention_us(
    buckets: Buckets, base_us: int, per_token_us: float, per_pair_us: float
) -> Callable[[StepPlan], int]:
    """Step time a + b · tokens + c · pairs of a query and a key that it sees, where tokens include
    the padding of the compiled program."""

    def step_us(plan: StepPlan) -> int:
        load = StepLoad.of(plan)
        tokens = buckets.pick(load.num_decodes, load.prefill_tokens).num_tokens
        pairs = load.context_tokens + load.num_pairs
        return round(base_us + per_token_us * tokens + per_pair_us * pairs)

    return step_us


def simulate(
    jobs: Iterable[Job],
    config: SchedulerConfig,
    memory: PagePool | KVManager,
    step_us: Callable[[StepPlan], int],
    delay: int = 1,
    on_step: Callable[[Scheduler, StepPlan], None] | None = None,
    transfer_worker: TransferWorker | None = None,
) -> Run:
    """Serves the jobs to the end.

    Tokens are collected `delay` steps late: with 1, step N+1 is planned before step N is read, as
    the engine does. A job's n-th token has the id n. `on_step` sees each plan as it is made.

    `memory` is a KV manager, or a pool for one that keeps no prefixes. A manager with tiers comes
    with the `transfer_worker` that it was given, whose clock must stand at 0: a transfer takes no
    time and ends before the next step is planned, and its bytes mean nothing.
    """
    kv = memory if isinstance(memory, KVManager) else KVManager(memory, prefix_caching=False)
    scheduler = Scheduler(config, kv)
    jobs = list(jobs)
    sequences = [_sequence(seq_id, job) for seq_id, job in enumerate(jobs)]
    arrivals = deque(sorted(sequences, key=lambda seq: seq.arrival_us))
    aborts = deque(sorted((j.abort_us, i) for i, j in enumerate(jobs) if j.abort_us is not None))
    in_flight: deque[tuple[StepPlan, int, int]] = deque()
    run = Run([], sequences, [[] for _ in jobs], {})
    now = 0

    def collect() -> None:
        plan, start_us, end_us = in_flight.popleft()
        scheduler.observe_step_time((plan,), end_us - start_us)
        for chunk in (*plan.decodes, *plan.prefills):
            if chunk.samples and scheduler.collect(chunk, chunk.output_index):
                seq = chunk.seq
                run.token_us[seq.seq_id].append(end_us)
                if len(seq.output_token_ids) == jobs[seq.seq_id].output_tokens:
                    scheduler.finish(seq, "stop")
                elif len(seq.output_token_ids) == seq.max_tokens:
                    scheduler.finish(seq, "length")

    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0].arrival_us <= now:
            scheduler.add(arrivals.popleft())
        while aborts and aborts[0][0] <= now:
            scheduler.abort(aborts.popleft()[1])
        while len(in_flight) > delay:
            collect()
        if transfer_worker is not None:
            _end_moves(kv, transfer_worker)
        plan = scheduler.schedule(now)
        _begin_moves(kv, transfer_worker)
        for chunk in plan.prefills:
            run.cached_tokens.setdefault(chunk.seq.seq_id, chunk.start)
        if on_step is not None:
            on_step(scheduler, plan)
        if not plan.empty:
            end_us = now + step_us(plan)
            run.steps.append(_step(scheduler, plan, now, end_us))
            in_flight.append((plan, now, end_us))
            now = end_us
        elif in_flight:
            collect()
        elif kv.num_in_flight_transfers:
            continue
        elif arrivals:
            now = arrivals[0].arrival_us
        elif scheduler.has_work:
            raise RuntimeError(f"{scheduler.num_waiting} sequences wait and none can run")
    return run


def _begin_moves(kv: KVManager, transfer_worker: TransferWorker | None) -> None:
    """Does what the engine would do on the device before a step."""
    operations = kv.operations()
    for load in operations.loads:
        load.handle.consume()
    for save in operations.saves:
        images = np.zeros((len(save.nodes), kv.page_bytes), np.uint8)
        kv.begin(save, images if transfer_worker.reserve() else None)


def _end_moves(kv: KVManager, transfer_worker: TransferWorker) -> None:
    while kv.num_in_flight_transfers:
        transfer_worker.wait(timeout_us=1_000_000)
        kv.poll(now_us=0)


def _sequence(seq_id: int, job: Job) -> Sequence:
    alike = job.token_ids is not None
    return Sequence(
        seq_id=seq_id,
        request_id=str(seq_id),
        index=0,
        prompt_token_ids=list(job.token_ids) if alike else [0] * job.prompt_tokens,
        params=SamplingParams(max_tokens=job.max_tokens),
        arrival_us=job.arrival_us,
        priority=job.priority,
        tenant=job.tenant,
        salt=b"" if alike else str(seq_id).encode(),
        prefixes=() if job.shared_prefix is None else (job.shared_prefix,),
    )


def _step(scheduler: Scheduler, plan: StepPlan, start_us: int, end_us: int) -> Step:
    return Step(
        start_us=start_us,
        end_us=end_us,
        num_decodes=len(plan.decodes),
        num_prefill_tokens=plan.num_prefill_tokens,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_used_pages=scheduler.pool.num_used,
        num_kv_tokens=sum(seq.num_computed for seq in scheduler.running),
    )
