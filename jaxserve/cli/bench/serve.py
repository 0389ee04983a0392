"""`jaxserve bench serve`: benchmark any OpenAI endpoint under load."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import OmitArgPrefixes

from jaxserve.cli.arguments.load_options import NOTABLE_LAG_US, Deadline, LoadOptions, SloOptions
from jaxserve.cli.arguments.options import Common, check_base_url
from jaxserve.cli.bench.find_capacity import CapacityFinder, Probe, Stopped
from jaxserve.cli.bench.report import report
from jaxserve.cli.terminal.text import milliseconds
from jaxserve.core.errors import ConfigError
from jaxserve.core.process.output_file import check_output_file
from jaxserve.core.process.signals import INTERRUPTED
from jaxserve.core.process.terminal_progress import TerminalProgress
from jaxserve.loadgen.results import RequestResult, Summary
from jaxserve.loadgen.trace import TraceRequest
from jaxserve.simulator.deployments import slo as limits

if TYPE_CHECKING:
    from jaxserve.loadgen.draft_counts import ServerDraftCounts
    from jaxserve.loadgen.endpoint import LoadEndpoint


@dataclasses.dataclass(frozen=True)
class BenchServe(Common):
    """Benchmark any OpenAI endpoint under load, as clients see it.

    The load is open-loop: each request is sent at its arrival time and never waits for another.
    Outputs have the full length if the server supports ignore_eos. Ctrl-C or SIGTERM ends the load
    and prints what was measured.

    With --find-capacity the load is sent again and again, at other rates, until the highest is
    known at which it meets the SLO.

    Attributes:
        base_url: URL of the server, including /v1.
        model_name: the server's name for the model; by default the one it serves.
        api_key: sent as a bearer token.
        endpoint: which kind of request to send.
        prompt_format: auto sends token ids if the server can tokenize, else text.
        timeout_s: a request that takes longer has failed.
        seed: for prompts and arrival times. By default one is drawn, so that a second run does not
            hit the first run's prompts in the server's prefix cache.
        find_capacity: search for the highest rate of requests that meets --slo.
        slo: with find_capacity, limits of percentiles, such as ttft=2s,itl_p90=50ms: of ttft, itl,
            tpot, e2e, and at least of fluidity; without _pN of the 99th.
        json: print one JSON object instead of tables.
        output: write the summary, and the time of every token, to this JSON file; with
            find_capacity, the object that --json prints.
        plot: draw distributions and the run over time into this .html, .svg or .png file.
    """

    base_url: str = "http://127.0.0.1:8000/v1"
    model_name: str | None = None
    api_key: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    prompt_format: Literal["auto", "text", "token_ids"] = "auto"
    timeout_s: float = 600.0
    seed: int | None = None
    find_capacity: bool = False
    slo: str = ""
    json: bool = False
    output: Path | None = None
    plot: Path | None = None
    load: OmitArgPrefixes[LoadOptions] = dataclasses.field(default_factory=LoadOptions)
    objectives: OmitArgPrefixes[SloOptions] = dataclasses.field(default_factory=SloOptions)
    deadline: Deadline = dataclasses.field(default_factory=Deadline)

    def __post_init__(self) -> None:
        """Raises ConfigError before anything is sent."""
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be more than 0.")
        check_base_url(self.base_url)
        if self.plot is not None:
            check_output_file("plot", self.plot, ".html", ".svg", ".png")
        if self.find_capacity:
            self._check_search()
        elif self.slo:
            raise ConfigError(
                "slo has no effect without find_capacity; for goodput give slo_ttft_ms, "
                "slo_itl_ms, slo_tpot_ms or slo_e2e_ms."
            )
        if self.output is not None:
            check_output_file("output", self.output)

    def _check_search(self) -> None:
        """Raises ConfigError."""
        if not self.slo:
            raise ConfigError(
                "find_capacity needs limits; give --slo, such as --slo ttft=2s,itl_p90=50ms."
            )
        if limits.Slo.of(self.slo).queue_us:
            raise ConfigError(
                f"slo is {self.slo!r}, but clients do not see how long a request waits for its "
                "first step; give a limit of ttft in the place of queue."
            )
        if any(vars(self.objectives).values()):
            raise ConfigError(
                "slo_ttft_ms, slo_itl_ms, slo_tpot_ms and slo_e2e_ms have no effect with "
                "find_capacity; put the limits into --slo, such as --slo ttft=2s."
            )
        if self.plot is not None:
            raise ConfigError("plot has no effect with find_capacity; leave it out.")

    def run(self) -> int:
        if self.plot is not None:
            from jaxserve.loadgen.plot import write_plot  # Fails now, and not after the load.

        seed = secrets.randbits(32) if self.seed is None else self.seed
        if self.find_capacity:
            return self._search(seed)
        requests = self.load.requests(seed)
        try:
            endpoint, results, drafts = self._served(requests, seed)
        except asyncio.CancelledError:  # SIGTERM, before anything was sent.
            return INTERRUPTED
        if len(results) < len(requests):
            print(f"stopped after {len(results)} of {len(requests)} requests", file=sys.stderr)
            if not results:
                return INTERRUPTED
        objectives, deadlines = self.objectives.objectives(), self.deadline.deadlines()
        summary = Summary.of(results, objectives, deadlines)
        text = report(_facts(endpoint, seed), summary, objectives, drafts)
        document = self._settings(endpoint, seed) | {
            "fields": endpoint.fields,
            "summary": dataclasses.asdict(summary),
            "drafts": drafts and dataclasses.asdict(drafts),
        }
        print(_as_text(document) if self.json else text)
        self._tell_troubles(results, summary)
        if self.output is not None:
            document["requests"] = [result.as_json() for result in results]
            self._write(document)
        if self.plot is not None:
            title = f"{endpoint.model} at {self.base_url}"
            write_plot(self.plot, results, objectives, deadlines, title, text)
        if len(results) < len(requests):
            return INTERRUPTED
        return 0 if summary.completed else 1

    def _search(self, seed: int) -> int:
        """Find the capacity, and print each probe when it has ended."""
        requests = self.load.requests_to_search(seed)
        slo = limits.Slo.of(self.slo, self.deadline.deadlines())
        endpoint: LoadEndpoint | None = None

        def serve(asked: Sequence[TraceRequest], number: int) -> Sequence[RequestResult]:
            nonlocal endpoint
            endpoint, results, _ = self._served(asked, seed + number, endpoint)
            return results

        finder = CapacityFinder(serve, requests, self.load.rate_of(requests), slo, self._tell)
        try:
            found, stopped = finder.find(), False
        except (Stopped, asyncio.CancelledError, KeyboardInterrupt):  # The last between two loads.
            found, stopped = finder.so_far(), True
        if endpoint is None:
            return INTERRUPTED
        document = self._settings(endpoint, seed) | found.as_json()
        if self.output is not None:
            self._write(document)
        if self.json:
            print(_as_text(document))
        elif found.rate is not None:
            print(f"\n{found.text()}")
        if stopped:
            print(f"stopped after {len(found.probes)} probes", file=sys.stderr)
            return INTERRUPTED
        if found.rate is None:
            print(f"error: {found.text()}", file=sys.stderr)
            return 1
        return 0

    def _tell(self, probe: Probe) -> None:
        """One line; of --json to standard error, where progress goes."""
        print(probe.text(), file=sys.stderr if self.json else sys.stdout, flush=True)

    def _served(
        self, requests: Sequence[TraceRequest], seed: int, endpoint: LoadEndpoint | None = None
    ) -> tuple[LoadEndpoint, list[RequestResult], ServerDraftCounts | None]:
        """One load, until all of its requests have ended, and what was drafted in that time."""
        with TerminalProgress() as progress:
            return asyncio.run(self._measure(requests, seed, progress, endpoint))

    async def _measure(
        self,
        requests: Sequence[TraceRequest],
        seed: int,
        progress: TerminalProgress,
        endpoint: LoadEndpoint | None,
    ) -> tuple[LoadEndpoint, list[RequestResult], ServerDraftCounts | None]:
        from jaxserve.loadgen.client import open_session, stream
        from jaxserve.loadgen.draft_counts import draft_counts
        from jaxserve.loadgen.endpoint import find_out
        from jaxserve.loadgen.prompts import prompt_maker
        from jaxserve.loadgen.replay import replay

        # As Ctrl-C does: batch systems and `timeout` send SIGTERM.
        stop = asyncio.current_task().cancel
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        async with open_session(self.api_key, self.timeout_s) as http:
            if endpoint is None:
                endpoint = await find_out(
                    http, self.base_url, self.endpoint, self.model_name, self.prompt_format
                )
            prompt = prompt_maker(seed, endpoint.token_ids, endpoint.text_length)

            def body(place: int, request: TraceRequest) -> bytes:
                return endpoint.body(prompt(place, request), request.output_tokens)

            before = await draft_counts(http, endpoint.base_url)
            results = await replay(
                requests,
                body,
                lambda made: stream(http, endpoint.url, made),
                lambda done, total: progress("requests", done, total),
            )
            after = before and await draft_counts(http, endpoint.base_url)
        return endpoint, results, after and after.since(before)

    def _tell_troubles(self, results: Sequence[RequestResult], summary: Summary) -> None:
        for reason in summary.failures:
            first = next(result for result in results if result.response.failure == reason)
            detail = " ".join((first.response.detail or "").split())
            print(f"failed, {reason}: {detail}", file=sys.stderr)
        if summary.lag_us.p99 > NOTABLE_LAG_US:
            print(
                f"warning: this load generator sent 1% of requests at least "
                f"{milliseconds(summary.lag_us.p99)} late, so the server saw less than the "
                "requested load. Give the generator more CPU, or run it on another machine.",
                file=sys.stderr,
            )

    def _settings(self, endpoint: LoadEndpoint, seed: int) -> dict[str, Any]:
        """What was measured, without the key."""
        settings = dataclasses.asdict(self) | {"model_name": endpoint.model, "seed": seed}
        del settings["api_key"]
        return {"settings": settings}

    def _write(self, document: dict[str, Any]) -> None:
        self.output.write_text(_as_text(document) + "\n", encoding="utf-8")


def _as_text(document: dict[str, Any]) -> str:
    return json.dumps(document, default=str)


def _facts(endpoint: LoadEndpoint, seed: int) -> list[tuple[str, str]]:
    return [
        ("endpoint", endpoint.url),
        ("model", endpoint.model),
        ("prompts", "text" if endpoint.token_ids is None else "token ids"),
        ("seed", str(seed)),
    ]
