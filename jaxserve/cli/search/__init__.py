"""`jaxserve search`: the best deployment for a load, among many that need not be here."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tyro.conf import OmitArgPrefixes

from jaxserve.cli.arguments.load_options import Deadline
from jaxserve.cli.arguments.options import Common
from jaxserve.cli.arguments.values import Floats, Names
from jaxserve.cli.search.deployments import Dropped, Planned, Planner, SearchLoad, SharedLoad
from jaxserve.cli.search.journal import Journal
from jaxserve.cli.search.prices import read_prices
from jaxserve.cli.search.report import Findings
from jaxserve.cli.search.space import FixedSettings, Space
from jaxserve.core.devices import DeviceSpec, device_names
from jaxserve.core.errors import ConfigError
from jaxserve.core.process.output_file import check_output_file
from jaxserve.core.process.progress_bar import ProgressBar
from jaxserve.core.version import __version__
from jaxserve.simulator.deployments.search import Outcome, Processes, outcomes
from jaxserve.simulator.deployments.slo import Slo
from jaxserve.simulator.profile import Profile

_MOST_REASONS = 3


@dataclasses.dataclass(frozen=True)
class Search(Common):
    """Find the best deployment for a load: devices, mesh, replicas, scheduler, limits of a step.

    The capacity of a deployment is the highest rate of requests at which the load meets the SLO, by
    simulations. The best is the cheapest that serves the load at its own rate. Exits with 1 if none
    does, and prints the best that there is.

    Attributes:
        device: kinds of devices to try, each a100, b200, h100, h200, l4, v5e, v5p, v6e, or a TOML
            file with the fields of those; comma-separated.
        devices: numbers of devices to try.
        profile: files of `jaxserve profile`, comma-separated: deployments with the device and the
            settings that one was measured with have its step times, the others modelled ones.
        slo: limits of percentiles, such as ttft=2s,itl_p90=50ms: of queue, ttft, itl, tpot, e2e,
            and at least of fluidity; without _pN of the 99th.
        draft_acceptance: with speculative_config, the share of drafts that are accepted, as in
            `jaxserve simulate`.
        prices: a TOML file with the price of each device for an hour, with lines such as
            h200 = 3.50; without it the cost is the number of devices.
        out: a file for the outcomes, from which the same command continues if it was stopped.
        processes: simulations at once; by default one for each core.
        json: print one JSON object with every deployment instead of tables.
        report: write the tables with plots into this .html file.
        manifest: write the best deployment as a Kubernetes manifest into this file; only those that
            have one are searched.
        image: of the manifest, a container image with jaxserve that the cluster can pull.
    """

    engine: FixedSettings = dataclasses.field(default_factory=FixedSettings)
    device: Names = ()
    devices: tuple[int, ...] = (1, 2, 4, 8)
    profile: Names = ()
    slo: str = ""
    space: OmitArgPrefixes[Space] = dataclasses.field(default_factory=Space)
    load: OmitArgPrefixes[SearchLoad] = dataclasses.field(default_factory=SearchLoad)
    deadline: Deadline = dataclasses.field(default_factory=Deadline)
    draft_acceptance: Floats = ()
    prices: Path | None = None
    out: Path | None = None
    processes: int | None = None
    json: bool = False
    report: Path | None = None
    manifest: Path | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError before anything is planned."""
        if not self.device:
            raise ConfigError(f"give --device: one or more of {', '.join(device_names())}.")
        for device in self.device:
            DeviceSpec.of(device)
        if not self.devices or min(self.devices) < 1:
            raise ConfigError(f"devices is {self.devices}; each number must be 1 or more.")
        if not self.slo:
            raise ConfigError("give --slo: limits that the load must meet, such as ttft=2s.")
        Slo.of(self.slo)
        if self.draft_acceptance and self.engine.speculative_config is None:
            raise ConfigError(
                "draft_acceptance needs speculative_config, which makes the drafts; give both."
            )
        if self.processes is not None and self.processes < 1:
            raise ConfigError(f"processes is {self.processes}; it must be 1 or more.")
        if self.report is not None:
            check_output_file("report", self.report, ".html")
        if (self.manifest is None) != (self.image is None):
            raise ConfigError(
                "--manifest and --image go together; give --manifest serving.yaml --image NAME, "
                "an image such as docker/cuda.Dockerfile builds."
            )
        for name in ("out", "manifest"):
            if getattr(self, name) is not None:
                check_output_file(name, getattr(self, name))

    def run(self) -> int:
        if self.report is not None:
            from jaxserve.cli.search.page import write_page  # Fails now, and not after the search.

        begin_s = time.monotonic()
        findings = self._searched()
        for warning in findings.warnings():
            print(f"warning: {warning}", file=sys.stderr)
        print(json.dumps(self._document(findings), default=str) if self.json else findings.tables())
        spent_s = time.monotonic() - begin_s
        print(f"searched {len(findings.found):,} deployments in {spent_s:,.1f} s", file=sys.stderr)
        if self.report is not None:
            name = findings.planned[0].described.plan.checkpoint.path.name
            write_page(self.report, findings, f"{name}: {self.slo} at {findings.load.rate:,.3g}/s")
        if (shortfall := findings.shortfall()) is not None:
            print(f"error: {shortfall}", file=sys.stderr)
            return 1
        if self.manifest is not None:
            self.manifest.write_text(findings.manifest(self.image), encoding="utf-8")
        return 0

    def _searched(self) -> Findings:
        slo = Slo.of(self.slo, self.deadline.deadlines())
        prices = None if self.prices is None else read_prices(self.prices, self.device)
        load = SharedLoad.of(self.load, max(self.devices), self.engine.seed)
        acceptance = self.draft_acceptance
        profiles = [Profile.read(Path(name)) for name in self.profile]
        for first, second in itertools.combinations(range(len(profiles)), 2):
            if profiles[first].is_of_same_engine(profiles[second]):
                raise ConfigError(
                    f"--profile has {self.profile[first]} and {self.profile[second]}, which are of "
                    "the same device, model and settings; leave one out."
                )
        planner = Planner(self.engine, load, slo, prices, self.image, acceptance, profiles)
        planned, dropped = self._planned(planner)
        candidates = [each.candidate for each in planned]
        found: dict[int, Outcome] = {}
        searched = self._document_of_search(load, planned[0])
        deployments = [each.as_json() for each in planned]
        with (
            Journal(self.out, searched, deployments) as journal,
            Processes(slo, self.processes or _cores()) as processes,
            ProgressBar("Searching deployments", len(planned)) as bar,
        ):
            done = outcomes(
                candidates,
                lambda number, above, last: processes.submit(planned[number].engine, above, last),
                slo,
                journal.known,
            )
            for number, outcome in done:
                found[number] = outcome
                journal.add(number, outcome)
                bar.update(len(found))
        return Findings(planned, dropped, found, load, slo, prices is not None)

    def _planned(self, planner: Planner) -> tuple[list[Planned], list[Dropped]]:
        """Raises ConfigError when no deployment can be."""
        from jaxserve.models.loading.checkpoint import open_checkpoint

        model = open_checkpoint(self.engine.model, "dummy").config
        experts, speculative = model.moe is not None, self.engine.speculative_config
        choices = list(
            self.space.choices(self.device, self.devices, experts=experts, speculative=speculative)
        )
        planned, dropped = [], []
        with ProgressBar("Planning deployments", len(choices)) as bar:
            for done, choice in enumerate(choices, start=1):
                plan = planner.plan(choice)
                (planned if isinstance(plan, Planned) else dropped).append(plan)
                bar.update(done)
        for number, why in planner.mismatches.items():
            if why:
                raise ConfigError(
                    f"profile {self.profile[number]!r} is of none of the {len(choices)} "
                    f"deployments: {why}"
                )
        if not planned:
            raise ConfigError(_none_of(dropped))
        return planned, dropped

    def _document_of_search(self, load: SharedLoad, one: Planned) -> dict[str, Any]:
        """What outcomes depend on, besides the deployments."""
        return {
            "jaxserve": __version__,
            "model": one.described.plan.checkpoint.config,
            "fixed": dataclasses.asdict(self.engine),
            "devices": [DeviceSpec.of(device) for device in self.device],
            "slo": self.slo,
            "draft_acceptance": self.draft_acceptance,
            "profiles": [Path(name).read_text(encoding="utf-8") for name in self.profile],
            "deadline": self.deadline,
            "requests": load.requests,
            "rate": load.rate,
            "count": load.count,
        }

    def _document(self, findings: Findings) -> dict[str, Any]:
        return {"settings": dataclasses.asdict(self)} | findings.as_json()


def _none_of(dropped: Sequence[Dropped]) -> str:
    """Why no deployment is possible: reasons that differ in more than numbers, the most frequent
    first."""
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for each in dropped:
        kinds[re.sub(r"\d[\d,.]*", "", each.reason)].append(each.reason.rstrip("."))
    most = sorted(kinds.values(), key=len, reverse=True)
    reasons = [f"{len(same)} of them, for instance: {same[0]}" for same in most[:_MOST_REASONS]]
    if rest := most[_MOST_REASONS:]:
        reasons.append(f"{sum(map(len, rest))} of them for other reasons")
    count = len(dropped)
    head = f"none of the {count} deployments" if count > 1 else "the only deployment"
    return f"{head} to search is possible; {'; '.join(reasons)}."


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
