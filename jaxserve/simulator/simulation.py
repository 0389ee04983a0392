"""A simulated engine: arrivals in, the requests and the events of the engine out."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf

from jaxserve.core.commands import Abort
from jaxserve.core.errors import ConfigError
from jaxserve.core.events import EventLog, Record
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.local_commands import Resume
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot.requests import RequestSnapshot
from jaxserve.kv.host_pages import HostKV, HostPages
from jaxserve.kv.kv_executor import KVExecutor
from jaxserve.kv.layout import KVLayout
from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.pages import PagePool
from jaxserve.kv.tier import Tier
from jaxserve.metrics.fluidity import INTERACTIVE, Deadlines
from jaxserve.metrics.metrics import Metrics
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.decode_groups import PrefixCost
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulator.acceptance import AcceptanceModel
from jaxserve.simulator.executor import SimulatedExecutor, VirtualClock
from jaxserve.simulator.layer_reads import LayerReads
from jaxserve.simulator.step_times import StepTimes
from jaxserve.simulator.transfer_worker import Link, SimulatedTransferWorker

_VOCAB_SIZE = 2**31
"""Larger than any model's: token ids are those of the trace."""


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request that arrives at `time_us`."""

    time_us: int
    token_ids: SequenceOf[int]
    params: SamplingParams
    priority: int | None = None
    tenant: str | None = None


@dataclasses.dataclass(frozen=True)
class LowerTier:
    """A tier of the KV cache below the device, and its link with the tier above."""

    num_pages: int
    link: Link


def new_tokens(seq: Sequence, output_index: int) -> int:
    """Tokens that no other sequence samples: no sampled text is ever found in the prefix cache."""
    return 2**32 - 1 - seq.seq_id


class Simulation:
    """An engine of `config`, resolved, with its scheduler, KV manager, metrics and events, over
    devices that exist only as `times`.

    Attributes:
        core: the engine core, as `Engine` has it.
        metrics: what `Engine.get_metrics` is made of, with the token times of every sequence.
        log: all events, on the virtual clock.
    """

    def __init__(
        self,
        config: EngineConfig,
        buckets: Buckets,
        num_pages: int,
        times: StepTimes,
        *,
        layout: KVLayout | None = None,
        page_bytes: int = 0,
        tiers: Mapping[Tier, LowerTier] | None = None,
        token_of: Callable[[Sequence, int], int] = new_tokens,
        acceptance: AcceptanceModel | None = None,
        prefix_cost: PrefixCost | None = None,
        reads: LayerReads | None = None,
        host_kv: HostKV | None = None,
        deadlines: Deadlines = INTERACTIVE,
        sinks: SequenceOf[Callable[[Record], None]] = (),
        keep_events: bool = False,
    ) -> None:
        """`num_pages` as in the memory plan, the trash page included. `layout` has the KV groups,
        one without a window by default. `tiers` are from the top down. `token_of` gives the token
        that a sequence samples at a position of its output; with speculation `acceptance` says
        which drafts are accepted. `prefix_cost`: of decodes that read shared pages together, if
        they do. `reads` are those of steps from below the device, with `weights_on` or `kv_on`;
        `host_kv` is what sequences longer than the pool may take. `deadlines` are those of the
        fluidity index; `sinks` are called with every event.

        Raises ConfigError for speculation without `acceptance`.
        """
        if config.speculative_config is None:
            acceptance = None
        elif acceptance is None:
            raise ConfigError(
                "draft_acceptance is missing, and speculative_config needs it: which drafts are "
                "accepted depends on the text; give the share of them, such as 0.7."
            )
        tiers = tiers or {}
        self._ids = itertools.count()
        self._max_model_len = config.max_model_len
        self.clock = VirtualClock()
        self.metrics = Metrics(deadlines, keep_finished=sys.maxsize, keep_tokens=True)
        self.log = EventLog(self.metrics.fold, *sinks, clock=self.clock.now, keep_all=keep_events)
        worker = None
        if tiers:
            links = {tier: lower.link for tier, lower in tiers.items()}
            worker = SimulatedTransferWorker(links, page_bytes=page_bytes, clock=self.clock)
        manager = KVManager(
            PagePool(num_pages, config.page_size),
            layout=layout,
            prefix_caching=config.enable_prefix_caching,
            preemption=config.preemption,
            tiers={tier: lower.num_pages for tier, lower in tiers.items()},
            page_bytes=page_bytes,
            transfer_worker=worker,
            host_pages=host_kv and HostPages(host_kv),
        )
        if worker is not None:
            worker.calibrate(manager.rates)
        stages = config.pipeline_parallel_size
        executor = SimulatedExecutor(
            buckets, stages, times, self.clock, token_of, acceptance, reads
        )
        self.scheduler = Scheduler(SchedulerConfig.of(config, buckets, prefix_cost), manager)
        self._input = InputProcessor(config, None, _VOCAB_SIZE, frozenset(), self.log.now)
        kv = KVExecutor(manager, worker, executor, self.log, debug=config.debug_kv)
        self.core = EngineCore(self.scheduler, kv, executor, self._input, self.log, ())

    def run(self, arrivals: Iterable[Arrival]) -> list[Request]:
        """Serves requests to the end, in order of arrival. The engine takes them between steps.

        Raises RequestError, as the engine does, for a request that can never run.
        """
        return list(self.serve(sorted(arrivals, key=lambda arrival: arrival.time_us)))

    def serve(
        self, arrivals: Iterable[Arrival], stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Request]:
        """As `run`, for arrivals in order of time, which are taken one by one: yields each request
        when it is added. It keeps none. Once `stop()` holds, it ends before the next step."""
        for arrival in arrivals:
            while self.core.has_work and self.clock.now() < arrival.time_us and not stop():
                self.core.step()
            if stop():
                return
            self.clock.advance_to(arrival.time_us)
            yield self._add(arrival)
        while self.core.has_work and not stop():
            self.core.step()

    def run_to(self, time_us: int) -> None:
        """Makes the steps that begin before then. The last of them may end later, and so may the
        clock be."""
        while self.core.has_work and self.clock.now() < time_us:
            self.core.step()

    def add(self, arrival: Arrival, time_us: int | None = None) -> Request:
        """Queues a request, by default when it arrives; an engine that is idle waits for it. Raises
        RequestError."""
        self.clock.advance_to(arrival.time_us if time_us is None else time_us)
        return self._add(arrival)

    def num_staged(self, request: Request) -> int:
        """How many tokens of a request of this simulation a stage of its copy would have the KV of:
        of a prompt that is being computed, those on full pages. Models with attention windows have
        none, nor have sequences longer than the pool."""
        kv, seq = self.core.kv, request.sequence_outputs[0].seq
        table = self.scheduler.tables.get(seq.seq_id)
        alone = kv.windowed or table is None or table.num_host_pages
        num_tokens = 0 if seq.slot is None or alone else seq.num_written
        if num_tokens < seq.num_prompt:
            num_tokens -= num_tokens % kv.pool.page_size
        return num_tokens

    def stage(
        self, request: Request, num_tokens: int, before: PageTable | None = None
    ) -> PageTable | None:
        """Takes the KV of the first tokens of a request of another simulation, for `resume`, of
        which the stages `before` have brought some. Returns `before` if there is no room for
        more."""
        kv, seq = self.core.kv, request.sequence_outputs[0].seq
        table = PageTable(seq.token_ids, seq.salt)
        if kv.windowed or not num_tokens:
            return before
        match = kv.match_on_device(table, num_tokens)
        if not kv.fits(match, num_tokens, 0):
            return before
        kv.allocate(table, match, num_tokens)
        kv.release(table, num_tokens, pin=True)
        self.unstage(before)
        return table

    def unstage(self, table: PageTable | None) -> None:
        """Gives up what `stage` returned."""
        if table is not None:
            self.core.kv.unpin_table(table)

    def num_cached(self, token_ids: SequenceOf[int], tenant: str | None, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens of a prompt are cached, on any tier."""
        return self.core.kv.known(self._cached(token_ids, tenant), num_tokens)[1]

    def take_prefix(self, token_ids: SequenceOf[int], tenant: str | None, num_tokens: int) -> int:
        """Caches the first tokens of a prompt, of another simulation, if there is room; returns how
        many of these are cached now. Models with attention windows have none."""
        kv = self.core.kv
        table = self._cached(token_ids, tenant)
        match = kv.match_on_device(table, num_tokens)
        if not kv.windowed and kv.fits(match, num_tokens, 0):
            kv.allocate(table, match, num_tokens)
            kv.release(table, num_tokens)
        return self.num_cached(token_ids, tenant, num_tokens)

    def _cached(self, token_ids: SequenceOf[int], tenant: str | None) -> PageTable:
        salt = self._input.salt(tenant, None)
        return PageTable(lambda start, stop: token_ids[start:stop], salt)

    def resume(self, request: Request, table: PageTable | None, time_us: int) -> Request:
        """Queues a request of another simulation with the tokens that it has; the KV of those that
        `table` lacks is computed again. Raises RequestError when it cannot run here."""
        self.clock.advance_to(time_us)
        state = RequestSnapshot.of(request, None, time_us)
        first = request.sequence_outputs[0].seq
        resumed = self._input.build(
            self._input.process(
                str(next(self._ids)),
                TokenizedPrompt(None, request.prompt_token_ids),
                request.params,
                first.priority,
                first.tenant,
                None,
                None,
            )
        )
        state.apply(resumed, None, self.clock.now(), self._max_model_len, self.core.kv)
        try:
            self.core.apply(Resume(resumed))
        except BaseException:
            self.unstage(table)
            raise
        if table is not None:
            (output,) = resumed.sequence_outputs
            self.core.kv.hand_over_pins(table, self.scheduler.tables[output.seq.seq_id])
        return resumed

    def abort(self, request: Request) -> None:
        """Ends a request early."""
        self.core.apply(Abort(request.request_id))

    def _add(self, arrival: Arrival) -> Request:
        added = self._input.process(
            str(next(self._ids)),
            TokenizedPrompt(None, list(arrival.token_ids)),
            arrival.params,
            arrival.priority,
            arrival.tenant,
            None,
            None,
        )
        return self.core.apply(added)
