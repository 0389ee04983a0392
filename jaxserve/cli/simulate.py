"""`jaxserve simulate`: serve a load by the real scheduler on a virtual clock."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tyro.conf import OmitArgPrefixes

from jaxserve.cli.arguments.load_options import Deadline, LoadOptions, SloOptions
from jaxserve.cli.arguments.options import Common, ModelSettings
from jaxserve.cli.arguments.values import Floats
from jaxserve.cli.bench.report import report
from jaxserve.cli.planning.described import Described, draft_acceptance
from jaxserve.cli.planning.simulated_load import arrivals, check_lengths, result
from jaxserve.cli.replicas import check_replica_counts
from jaxserve.cli.terminal.text import milliseconds
from jaxserve.cluster.policies.autoscale import Autoscaler
from jaxserve.cluster.simulated import SimulatedCluster
from jaxserve.core.errors import ConfigError
from jaxserve.core.process.output_file import check_output_file
from jaxserve.core.process.progress_bar import ProgressBar
from jaxserve.core.process.tables import table
from jaxserve.loadgen.results import RequestResult, Summary
from jaxserve.loadgen.trace import TraceRequest
from jaxserve.metrics.perfetto import write_trace
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import Percentiles, SequenceSummary
from jaxserve.simulator.profile import Profile
from jaxserve.simulator.replicas import SimulatedReplica, shares


@dataclasses.dataclass(frozen=True)
class Simulate(Common):
    """Simulate a load: the real scheduler on a virtual clock, for devices that need not be here.

    Reads the model's config only. Step times are modelled from the device's data sheet, or those
    that `jaxserve profile` measured. Outputs have the full length of the load, which --seed draws.

    Attributes:
        device: a100, b200, h100, h200, l4, v5e, v5p, v6e, or a TOML file with the fields of those;
            its step times are modelled.
        profile: a file of `jaxserve profile`, for measured step times.
        draft_acceptance: with speculative_config, the share of drafts that are accepted: of the
            first of a step, the second and so on, comma-separated, the last of all further ones.
        replicas: number of engines.
        routing: which engine gets a request: round_robin, each in its turn, or freeness, as the
            router of `jaxserve serve --data-parallel-size`, which also moves running requests.
        prefill_replicas: engines that only compute prompts, with decode_replicas, as by `jaxserve
            serve --prefill-replicas`; instead of replicas, and with the routing freeness.
        decode_replicas: engines to which requests move, with their KV, once they have a token.
        min_replicas: engines from the start, with max_replicas; by default 1.
        max_replicas: most engines, added and removed with the load as by `jaxserve serve
            --max-replicas`; instead of replicas, and with the routing freeness.
        json: print one JSON object instead of tables, with times in microseconds.
        report: write the tables, distributions and the run over time into this .html file.
        trace_file: write the steps of the first engine, to open in ui.perfetto.dev.
    """

    engine: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    device: str | None = None
    profile: Path | None = None
    draft_acceptance: Floats = ()
    replicas: int = 1
    routing: Literal["round_robin", "freeness"] | None = None
    prefill_replicas: int = 0
    decode_replicas: int = 0
    min_replicas: int | None = None
    max_replicas: int | None = None
    json: bool = False
    report: Path | None = None
    trace_file: Path | None = None
    load: OmitArgPrefixes[LoadOptions] = dataclasses.field(default_factory=LoadOptions)
    slo: SloOptions = dataclasses.field(default_factory=SloOptions)
    deadline: Deadline = dataclasses.field(default_factory=Deadline)

    def __post_init__(self) -> None:
        """Raises ConfigError before anything is simulated."""
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}; it must be 1 or more.")
        check_replica_counts(self, "replicas")
        self._check_routing()
        if self.report is not None:
            check_output_file("report", self.report, ".html")
        if self.trace_file is not None:
            check_output_file("trace_file", self.trace_file)

    def run(self) -> int:
        if self.report is not None:
            from jaxserve.loadgen.plot import write_plot  # Fails now, and not after the run.

        requests = self.load.requests(self.engine.seed)
        profile = None if self.profile is None else Profile.read(self.profile)
        described = Described.of(self.engine, self.device, profile)
        check_lengths(requests, described.plan.config.max_model_len)
        begin_s = time.monotonic()
        replicas, cluster = self._serve(requests, described)
        spent_s = time.monotonic() - begin_s
        if cluster is None:
            in_turn = itertools.zip_longest(*(replica.summaries() for replica in replicas))
            summaries = [each for row in in_turn for each in row if each is not None]
        else:
            summaries = cluster.summaries(self.deadline.deadlines())
        served = _Served.of(requests, summaries)
        objectives, deadlines = self.slo.objectives(), self.deadline.deadlines()
        summary = Summary.of(served.results, objectives, deadlines)
        engines = _Engines.of(replicas, described, summary.elapsed_us, cluster)
        tables = report(self._facts(described), summary, objectives)
        tables += "\n\n" + engines.table(served.queue_us)
        if self.json:
            document = {
                "settings": dataclasses.asdict(self) | {"engine": _settings(described)},
                "step_times": described.source,
                "device": described.device_name,
                "summary": dataclasses.asdict(summary),
                "engines": dataclasses.asdict(engines) | {"queue_us": served.queue_us},
                "kv_pool_use": [replica.pool.points for replica in replicas],
            }
            print(json.dumps(document, default=str))
        else:
            print(tables)
        print(
            f"simulated {engines.scheduled_tokens:,} tokens in {spent_s:,.1f} s, "
            f"{engines.scheduled_tokens / max(spent_s, 1e-3):,.0f} tokens/s of this machine",
            file=sys.stderr,
        )
        if self.report is not None:
            title = f"{described.plan.checkpoint.path.name} on {described.device_name}, simulated"
            write_plot(
                self.report,
                served.results,
                objectives,
                deadlines,
                title,
                tables,
                pool=replicas[0].pool.curve,
            )
        if self.trace_file is not None:
            write_trace(self.trace_file, replicas[0].simulation.log.records)
        return 0

    def _check_routing(self) -> None:
        """Raises ConfigError for turns where requests or engines go by freeness."""
        if self.routing != "round_robin":
            return
        if self.prefill_replicas:
            raise ConfigError(
                "routing is round_robin, but requests move from prefill_replicas to "
                "decode_replicas by their freeness; leave routing out."
            )
        if self.max_replicas is not None:
            raise ConfigError(
                "routing is round_robin, but max_replicas adds and removes engines by their "
                "freeness; leave routing out."
            )

    def _serve(
        self, requests: Sequence[TraceRequest], described: Described
    ) -> tuple[list[SimulatedReplica], SimulatedCluster | None]:
        """All engines, and what routed requests to them if not their turns."""
        acceptance = draft_acceptance(described.plan.config, self.draft_acceptance)
        deployment = dataclasses.replace(described.deployment, acceptance=acceptance)
        times, work = described.times, described.work
        replicas: list[SimulatedReplica] = []
        done = itertools.count(1)
        with ProgressBar("Simulating requests", len(requests)) as bar:

            def new_replica() -> SimulatedReplica:
                replica = SimulatedReplica.of(
                    deployment,
                    times,
                    work,
                    self.deadline.deadlines(),
                    keep_events=self.trace_file is not None and not replicas,
                    on_finished=lambda: bar.update(min(next(done), len(requests))),
                )
                replicas.append(replica)
                return replica

            apart = self.prefill_replicas + self.decode_replicas
            if not apart and self.max_replicas is None and self.routing != "freeness":
                for share in shares(lambda: arrivals(requests), self.replicas):
                    new_replica().serve(share)
                return replicas, None
            least, scaler = self.min_replicas or 1, None
            if self.max_replicas is not None:
                scaler = Autoscaler(least, self.max_replicas)
            count = apart or (self.replicas if scaler is None else least)
            cluster = SimulatedCluster(
                deployment,
                new_replica,
                count,
                scaler,
                described.load_us,
                num_prefill=self.prefill_replicas,
            )
            cluster.serve(arrivals(requests))
        return replicas, cluster

    def _facts(self, described: Described) -> list[tuple[str, str]]:
        engines = "" if self.replicas == 1 else f", {self.replicas} engines"
        if self.prefill_replicas:
            engines = f", {self.prefill_replicas} prefill and {self.decode_replicas} decode engines"
        if self.max_replicas is not None:
            engines = f", {self.min_replicas or 1} to {self.max_replicas} engines"
        return [
            ("model", described.plan.checkpoint.path.name),
            ("devices", described.device_name + engines),
            ("step times", described.source),
        ]


@dataclasses.dataclass(frozen=True)
class _Served:
    """The results of all requests, in order of arrival; and how long each waited to be admitted."""

    results: list[RequestResult]
    queue_us: Percentiles

    @classmethod
    def of(cls, requests: Sequence[TraceRequest], summaries: Sequence[SequenceSummary]) -> _Served:
        results, waits = [], []
        for place, (request, summary) in enumerate(zip(requests, summaries, strict=True)):
            results.append(result(place, request, summary))
            waits.append(summary.admitted_us - request.arrival_us)
        return cls(results, Percentiles(*(percentile(waits, p) for p in (50, 90, 99))))


@dataclasses.dataclass(frozen=True)
class _Engines:
    """What the engines did, in all. `kv_pool_mean` is over the time that each was there. `mfu` and
    `mbu` are None where the device has no peak rates, `mean_replicas` and what follows where
    engines get requests in turn."""

    steps: int
    scheduled_tokens: int
    preemptions: int
    prefix_cache_hit_rate: float
    kv_pool_mean: float
    kv_pool_peak: float
    mfu: float | None
    mbu: float | None
    mean_replicas: float | None
    added: int | None
    removed: int | None
    moved: int | None

    @classmethod
    def of(
        cls,
        replicas: Sequence[SimulatedReplica],
        described: Described,
        elapsed_us: int,
        cluster: SimulatedCluster | None,
    ) -> _Engines:
        all_metrics = [replica.simulation.metrics.get_metrics() for replica in replicas]

        def total(name: str) -> float:
            return sum(metrics[f"vllm:{name}_total"].value for metrics in all_metrics)

        mfu = mbu = None
        spec, dtype = described.spec, described.plan.config.dtype
        replica_us = len(replicas) * elapsed_us if cluster is None else cluster.replica_us
        if spec is not None and dtype in spec.flops:
            device_s = replica_us / 1e6
            flops = sum(replica.counted.flops for replica in replicas)
            mfu = flops / (device_s * spec.flops[dtype])
            num_bytes = sum(replica.counted.num_bytes for replica in replicas)
            mbu = num_bytes / (device_s * spec.memory_bytes_per_s)
        return cls(
            steps=sum(replica.counted.num_steps for replica in replicas),
            scheduled_tokens=sum(replica.counted.num_tokens for replica in replicas),
            preemptions=round(total("num_preemptions")),
            prefix_cache_hit_rate=total("prefix_cache_hits")
            / max(1, total("prefix_cache_queries")),
            kv_pool_mean=sum(replica.pool.share_us for replica in replicas) / replica_us,
            kv_pool_peak=max(replica.pool.peak for replica in replicas),
            mfu=mfu,
            mbu=mbu,
            mean_replicas=cluster and cluster.mean_replicas,
            added=cluster and cluster.num_added,
            removed=cluster and cluster.num_removed,
            moved=cluster and cluster.num_moved,
        )

    def table(self, queue_us: Percentiles) -> str:
        rows = [
            ("scheduling delay p50", milliseconds(queue_us.p50)),
            ("scheduling delay p90", milliseconds(queue_us.p90)),
            ("scheduling delay p99", milliseconds(queue_us.p99)),
            ("steps", f"{self.steps:,}"),
            ("scheduled tokens", f"{self.scheduled_tokens:,}"),
            ("preemptions", f"{self.preemptions:,}"),
            ("prefix cache hit rate", f"{self.prefix_cache_hit_rate:.1%}"),
            ("KV pool in use, mean", f"{self.kv_pool_mean:.1%}"),
            ("KV pool in use, peak", f"{self.kv_pool_peak:.1%}"),
        ]
        if self.mfu is not None:
            rows += [("MFU", f"{self.mfu:.1%}"), ("MBU", f"{self.mbu:.1%}")]
        if self.moved is not None:
            rows.append(("requests moved", f"{self.moved:,}"))
        if self.added or self.removed:
            rows.append(("engines, mean", f"{self.mean_replicas:.2f}"))
            rows.append(("engines added, removed", f"{self.added}, {self.removed}"))
        return table(rows)


def _settings(described: Described) -> dict[str, Any]:
    config = dataclasses.asdict(described.plan.config)
    return config | {"model": str(described.plan.checkpoint.path)}
