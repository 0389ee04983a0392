"""An engine to simulate, as its memory plan decides it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxserve.core.events import Record
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets
from jaxserve.kv.host_pages import HostKV
from jaxserve.kv.layout import KVLayout
from jaxserve.kv.tier import Tier
from jaxserve.metrics.fluidity import INTERACTIVE, Deadlines
from jaxserve.scheduler.decode_groups import PrefixCost
from jaxserve.simulator.acceptance import DraftAcceptance
from jaxserve.simulator.layer_reads import LayerReads
from jaxserve.simulator.simulation import Arrival, LowerTier, Simulation
from jaxserve.simulator.step_times import StepTimes
from jaxserve.simulator.transfer_worker import Link


@dataclasses.dataclass(frozen=True)
class Deployment:
    """One engine, resolved and planned: `num_pages` with the trash page, `page_bytes` of a whole
    page, and the links that its lower tiers would have; `acceptance` of drafts, `prefix_cost` of
    decodes that read shared pages together, `reads` of steps from below the device and `host_kv` of
    sequences longer than the pool, where the engine has them."""

    config: EngineConfig
    buckets: Buckets
    layout: KVLayout
    num_pages: int
    page_bytes: int
    host_pages: int
    disk_pages: int
    host_link: Link
    disk_link: Link
    acceptance: DraftAcceptance | None = None
    prefix_cost: PrefixCost | None = None
    reads: LayerReads | None = None
    host_kv: HostKV | None = None

    def simulation(
        self,
        times: StepTimes,
        deadlines: Deadlines = INTERACTIVE,
        *,
        sinks: Sequence[Callable[[Record], None]] = (),
        keep_events: bool = False,
    ) -> Simulation:
        """Raises ConfigError for speculation without `acceptance`."""
        tiers = {}
        if self.host_pages:
            tiers[Tier.HOST] = LowerTier(self.host_pages, self.host_link)
        if self.disk_pages:
            tiers[Tier.DISK] = LowerTier(self.disk_pages, self.disk_link)
        return Simulation(
            self.config,
            self.buckets,
            self.num_pages,
            times,
            layout=self.layout,
            page_bytes=self.page_bytes,
            tiers=tiers,
            acceptance=self.acceptance,
            prefix_cost=self.prefix_cost,
            reads=self.reads,
            host_kv=self.host_kv,
            deadlines=deadlines,
            sinks=sinks,
            keep_events=keep_events,
        )

    def session(self, times: StepTimes, prompt_tokens: int, output_tokens: int) -> SessionTimes:
        """The times of one request alone, whose KV is swapped afterwards; without `acceptance` of
        drafts it has none.

        Raises RequestError when the request does not fit the engine.
        """
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        engine = self
        if self.acceptance is None:
            plain = dataclasses.replace(self.config, speculative_config=None)
            engine = dataclasses.replace(self, config=plain)
        simulation = engine.simulation(times)
        simulation.run([Arrival(0, range(prompt_tokens), params)])
        (summary,) = simulation.metrics.finished()
        stop = prompt_tokens + output_tokens - 1
        # As many pages at its end; out for it, and in for the one that runs instead.
        whole_page_bytes = self.layout.pages_at(stop - 1, stop) * self.page_bytes
        return SessionTimes(
            prefill_s=summary.ttft_us / 1e6,
            decode_s=(summary.last_token_us - summary.first_token_us) / 1e6,
            switch_s=2 * self.host_link.us(whole_page_bytes) / 1e6,
        )


@dataclasses.dataclass(frozen=True)
class SessionTimes:
    """Seconds of one user's turn: to its first token, from there to its last, and of swapping its
    KV out and another's in (Fu, "Challenges in Deploying Long-Context Transformers", 2024)."""

    prefill_s: float
    decode_s: float
    switch_s: float
