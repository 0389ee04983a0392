"""`jaxserve batch`: run a file of requests, writing exactly one result per line."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from jaxserve.cli.arguments.options import Common, EngineOptions, load
from jaxserve.cli.arguments.values import Texts
from jaxserve.cli.follow import follow
from jaxserve.cli.planning.batch_offload import ChosenOffload, choose
from jaxserve.cli.replicas import check_replicas, platform_of_replicas
from jaxserve.cli.terminal.batch_progress import BatchProgress
from jaxserve.cli.terminal.text import size
from jaxserve.core.errors import BatchError, ConfigError
from jaxserve.core.process.output_file import check_output_file
from jaxserve.core.process.signals import signals_handled
from jaxserve.core.process.tables import table
from jaxserve.core.settings.chat_settings import ChatSettings, ReasoningParser

if TYPE_CHECKING:
    from jaxserve.core.steps.counters import WeightReads
    from jaxserve.offline.job import BatchJob
    from jaxserve.offline.run import BatchRun


@dataclasses.dataclass(frozen=True)
class Batch(Common):
    """Run every request in a file, and append each result to another file.

    A line is an OpenAI batch request (custom_id, url, body), or just a body with `prompt` or
    `messages`. To resume an interrupted or killed job, run the same command again.

    Attributes:
        data_parallel_size: replicas of the engine that share the lines, each on devices of its own,
            on CPUs on its share of the cores; more than one needs jaxserve[cluster]
            (docs/cluster.md).
        input: a .jsonl, .parquet or .array_record file.
        output: a .jsonl file; OUTPUT.job next to it identifies the job.
        report: an .html file for a report of the job, with plots; with several hosts, the last to
            finish writes it.
        offload: auto: measure this machine, and decide what of weights and KV is kept on the host
            or on disk, and how many sequences a step and how many steps a read of the weights have
            (docs/offload.md); none leaves that to the settings.
        shard: I/N: this process is host I, from 0, of N hosts that share the input and the output.
        served_model_name: names that requests may use for the model, instead of its own.
        reasoning_parser: how reasoning is split from content, by vLLM's name for the model; auto
            looks for <think> or channels in the chat template, none leaves it in the content.
        trust_request_chat_template: let requests bring a chat_template of their own.
        trace_file: write a trace of the run, to open in ui.perfetto.dev.
    """

    input: Annotated[Positional[Path], arg(metavar="INPUT")]
    output: Annotated[Positional[Path], arg(metavar="OUTPUT")]
    data_parallel_size: int = 1
    report: Path | None = None
    offload: Literal["none", "auto"] = "none"
    shard: str = "0/1"
    served_model_name: Texts = ()
    reasoning_parser: ReasoningParser = "auto"
    trust_request_chat_template: bool = False
    trace_file: Path | None = None
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        """Raises BatchError for an invalid shard."""
        from jaxserve.offline.shards import Shard

        Shard.parse(self.shard)

    def run(self) -> int:
        if self.report is not None:
            self._check_report()
        self._check_replicas()
        if self.data_parallel_size > 1:
            with self._job(platform_of_replicas()) as job:
                return self._run(job)
        import jax

        if jax.process_count() > 1 and self.engine.num_devices < jax.device_count():
            raise BatchError(
                f"{jax.process_count()} hosts with {jax.device_count()} devices form one engine, "
                f"but its settings are for {self.engine.num_devices}. For one engine per host: "
                "jaxserve launch --independent ... -- batch ... --shard '{host}/{hosts}'."
            )
        if jax.process_index() > 0:  # Host 0 reads and writes for all hosts.
            return follow(self.engine)
        with self._job(jax.default_backend()) as job:
            return self._run(job, alone=jax.process_count() == 1)

    def _check_replicas(self) -> None:
        """Raises ConfigError for a number of replicas, or settings that are not for several, and
        MissingDependencyError without Ray."""
        if self.data_parallel_size < 1:
            raise ConfigError(
                f"data_parallel_size is {self.data_parallel_size}; it must be 1 or more."
            )
        if self.data_parallel_size > 1:
            check_replicas(self.data_parallel_size, {"trace_file": self.trace_file})
        if self.offload == "auto" and (self.data_parallel_size > 1 or self.engine.num_devices > 1):
            raise ConfigError(
                "offload is 'auto', which is for one device and one engine, but data_parallel_size "
                f"is {self.data_parallel_size}, and {self.engine.sizes}; leave one of them out."
            )

    def _check_report(self) -> None:
        """Raises BatchError or ConfigError if the report would overwrite another file, and
        MissingDependencyError if it could not be drawn."""
        import jaxserve.offline.reports.report  # noqa: F401  Fails now, and not after the job.

        check_output_file("report", self.report)
        if self.report.suffix != ".html" or self.report.resolve() == self.output.resolve():
            raise BatchError(
                f"report is {str(self.report)!r}; its name must end in .html and differ from "
                "the output."
            )

    def _job(self, platform: str) -> BatchJob:
        """Open the job. Raises all validation errors before the model is loaded."""
        from jaxserve.models.loading.checkpoint import open_checkpoint
        from jaxserve.offline.job import BatchJob, settings_of
        from jaxserve.offline.shards import Shard

        engine = self.engine
        checkpoint = open_checkpoint(engine.model, engine.load_format, seed=engine.seed)
        config = engine.resolve(checkpoint.config, platform)
        settings = settings_of(
            config,
            checkpoint.fingerprint,
            checkpoint.tokenizer(),
            self.served_model_name,
            self._chat,
        )
        return BatchJob(self.input, self.output, settings, Shard.parse(self.shard))

    @property
    def _chat(self) -> ChatSettings:
        return ChatSettings(self.reasoning_parser, self.trust_request_chat_template)

    def _run(self, job: BatchJob, alone: bool = True) -> int:
        from jaxserve.offline.run import BatchRun

        run, reads, chosen = BatchRun(job), None, None
        if job.earlier:
            _say(f"{job.earlier:,} of {len(job.lines):,} lines are already done.")
        status = 0
        # Hosts that share an engine wait for host 0, even if no work is left.
        if run.num_left or not alone:
            with _stop_signals():
                try:
                    if self.data_parallel_size > 1:
                        self._run_on_replicas(run)
                    else:
                        engine = self.engine
                        if self.offload == "auto":
                            chosen = choose(engine, job, self.served_model_name, self._chat)
                            _say(str(chosen))
                            engine = chosen.engine
                        with load(engine, self.trace_file) as llm, BatchProgress() as progress:
                            reads = llm.engine.counters.weight_reads
                            run.run(llm.engine, self.served_model_name, progress, self._chat)
                except _Stopped as stopped:
                    status = 128 + stopped.number
        else:
            run.complete = job.end()
        if status:
            _say("Stopped. Run the same command again to resume.")
        elif not run.complete:
            _say("This host's shard is done. The last host to finish merges the output.")
        if self.report is not None and (run.complete or job.shard.count == 1):
            from jaxserve.offline.reports.report import write_report

            write_report(self.report, run, shlex.join(["jaxserve", *sys.argv[1:]]))
        print(_summary(run, reads, chosen))
        return status

    def _run_on_replicas(self, run: BatchRun) -> None:
        """Raises BatchError when their answers would not be those of the job."""
        from jaxserve.cluster.ray_replicas import load_replicas
        from jaxserve.offline.workers import ReplicasWorker, check_answers

        _say(f"Loading {self.data_parallel_size} replicas.")
        with contextlib.closing(load_replicas(self.engine, self.data_parallel_size)) as router:
            check_answers(router, run.job.settings)
            with ReplicasWorker(router) as worker, BatchProgress() as progress:
                run.run(worker, self.served_model_name, progress, self._chat)


def _summary(run: BatchRun, reads: WeightReads | None, chosen: ChosenOffload | None) -> str:
    from jaxserve.offline.timeline import duration

    totals = run.totals
    rows = [
        ("lines", f"{totals.lines:,} of {len(run.job.lines):,}"),
        ("errors", f"{totals.num_errors:,}"),
        *((f"  {code}", f"{count:,}") for code, count in totals.errors.most_common()),
        ("prompt tokens", f"{totals.num_prompt_tokens:,}"),
        ("output tokens", f"{totals.num_output_tokens:,}"),
    ]
    if run.done:
        last = run.timeline.samples[-1]
        rows += [
            ("lines of this run", f"{run.done:,}"),
            ("time of this run", duration(last.elapsed_s)),
            ("tokens/s", f"{last.tokens / last.elapsed_s:,.1f}"),
            ("output tokens/s", f"{last.output_tokens / last.elapsed_s:,.1f}"),
            ("prompt tokens from the cache", f"{run.cached_share:.1%}"),
        ]
    if run.replicas:
        finished = ", ".join(f"{each.num_finished:,}" for each in run.replicas)
        losses = sum(each.num_losses for each in run.replicas)
        rows += [
            ("replicas", f"{len(run.replicas)}, lost {losses:,} times"),
            ("requests of each", finished),
        ]
    if reads is not None:
        rows += [
            (f"weights read from {reads.tier} a pass", size(reads.bytes_per_pass)),
            ("time waiting for weights", f"{reads.stall_share:.1%}"),
        ]
        if run.done and last.output_tokens:
            rows.append(
                ("weights read an output token", size(reads.num_bytes / last.output_tokens))
            )
    if chosen is not None and run.done and run.output_tokens:
        computed = last.prompt_tokens - run.cached_tokens
        modelled = chosen.tokens_per_s_of(computed, run.output_tokens)
        rows.append(("output tokens/s as modelled, of these lengths", f"{modelled:,.1f}"))
    return table(rows)


class _Stopped(BaseException):
    """The process received the signal `number`."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise _Stopped, once, so that cleanup is not interrupted."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise _Stopped(number)

    with signals_handled(stop, signal.SIGINT, signal.SIGTERM):
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr)
