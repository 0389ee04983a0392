"""`jaxserve bench offline`: throughput, compared with the roofline of the device."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli.arguments.options import Common, EngineOptions
from jaxserve.cli.terminal.text import device_name, milliseconds, size
from jaxserve.core.errors import ConfigError, ModelError
from jaxserve.core.events import Dispatched
from jaxserve.core.process.output_file import check_output_file
from jaxserve.core.process.tables import table
from jaxserve.core.process.terminal_progress import TerminalProgress
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.metrics.device_idle import DeviceIdle
from jaxserve.metrics.metrics import Metrics
from jaxserve.metrics.perfetto import write_trace
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import Percentiles, RunSummary

if TYPE_CHECKING:
    from jaxserve.cli.planning.limits import Limits
    from jaxserve.core.settings.config import EngineConfig
    from jaxserve.engine.engine import Engine


@dataclasses.dataclass(frozen=True)
class Offline(Common):
    """Benchmark an engine in this process, and compare it with the roofline of the device.

    All requests arrive at the start. Prompts are random tokens, and every output has the full
    length. With --load-format dummy only the model's config is needed.

    Attributes:
        num_prompts: number of requests.
        input_len: tokens per prompt.
        output_len: tokens generated per request.
        trace_file: write a trace of the run, to open in ui.perfetto.dev.
        json: print one JSON object instead of tables, with times in seconds.
    """

    num_prompts: int = 32
    input_len: int = 128
    output_len: int = 64
    json: bool = False
    trace_file: Path | None = None
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        """Raises ConfigError for a number below 1, or a trace file that cannot be written."""
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        if self.trace_file is not None:
            check_output_file("trace_file", self.trace_file)

    def run(self) -> int:
        from jaxserve.cli.planning.limits import measure
        from jaxserve.engine.engine import Engine

        with TerminalProgress() as progress:
            engine = Engine.load(self.engine, progress=progress, keep_events=True)
            try:
                self._serve(engine, progress)
            finally:
                engine.close()
                if self.trace_file is not None:
                    write_trace(self.trace_file, engine.log.records)
        measured = _Measured.of(engine, measure(engine.plan.device, engine.plan.shapes.dtype))
        print(json.dumps(measured.document()) if self.json else measured.report())
        return 0

    def _serve(self, engine: Engine, progress: TerminalProgress) -> None:
        """The loop of LLM.generate, on an engine that records the time of every token."""
        draw = random.Random(self.engine.seed)
        vocab_size = engine.plan.shapes.model.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=self.output_len, ignore_eos=True)
        for number in range(self.num_prompts):
            prompt = [draw.randrange(vocab_size) for _ in range(self.input_len)]
            engine.add(str(number), prompt, params)
        done = 0
        while engine.has_work:
            done += sum(request.finished for request in engine.step())
            progress("requests", done, self.num_prompts)


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What a run has measured. `between_us` is None without a second token; `bound_s` is the least
    time for the steps of the run at the device's measured rates."""

    run: RunSummary
    between_us: Percentiles | None
    steps: int
    padding: float
    preemptions: int
    device_idle: DeviceIdle | None
    bound_s: float
    limits: Limits
    config: EngineConfig
    device: str

    @classmethod
    def of(cls, engine: Engine, limits: Limits) -> _Measured:
        """Raises ModelError if no request received a token."""
        records = engine.log.records
        replayed = Metrics(keep_finished=len(records), keep_tokens=True)
        for record in records:
            replayed.fold(record)
        sequences = replayed.finished()
        run = RunSummary.of(sequences)
        if run is None:
            raise ModelError("no request received a token: the model's logits are not finite.")
        gaps = [gap for sequence in sequences for gap in sequence.inter_token_us]
        steps = [record for record in records if isinstance(record, Dispatched)]
        computed = sum(step.decode_rows + step.prefill_tokens for step in steps)
        padded = sum(step.padded_tokens for step in steps)
        return cls(
            run=run,
            between_us=Percentiles(*(percentile(gaps, p) for p in (50, 90, 99))) if gaps else None,
            steps=len(steps),
            padding=padded / (computed + padded),
            preemptions=sum(sequence.preemptions for sequence in sequences),
            device_idle=DeviceIdle.of(records),
            bound_s=sum(limits.seconds(engine.plan, step) for step in steps),
            limits=limits,
            config=engine.plan.config,
            device=device_name(engine.plan.device),
        )

    @property
    def elapsed_s(self) -> float:
        return self.run.elapsed_us / 1e6

    @property
    def tokens_per_s(self) -> float:
        """Of prompts and outputs."""
        return (self.run.prompt_tokens + self.run.output_tokens) / self.elapsed_s

    def report(self) -> str:
        """Three tables: throughput, latencies, and the roofline."""
        run, limits = self.run, self.limits
        served = [
            ("requests", f"{run.sequences:,}"),
            ("prompt tokens", f"{run.prompt_tokens:,}"),
            ("output tokens", f"{run.output_tokens:,}"),
            ("time", f"{self.elapsed_s:,.2f} s"),
            ("output tokens/s", f"{run.output_tokens_per_s:,.1f}"),
            ("all tokens/s", f"{self.tokens_per_s:,.1f}"),
            ("steps", f"{self.steps:,}"),
            *self._drafts(),
            ("padding, of the rows computed", f"{self.padding:.1%}"),
            ("preemptions", f"{self.preemptions:,}"),
            ("device idle, of the time", str(self.device_idle or "")),
            ("scheduler", self.config.scheduler),
            ("dtype", self.config.dtype),
            ("device", self.device),
        ]
        waits = [
            ("", "p50", "p90", "p99"),
            ("time to first token", *map(milliseconds, run.ttft_us)),
        ]
        if self.between_us is not None:
            waits.append(("between tokens", *map(milliseconds, self.between_us)))
        distance = [
            ("matmul rate, measured now", f"{limits.flops_per_s / 1e9:,.0f} GFLOP/s"),
            ("weight reading rate, measured now", f"{size(int(limits.bytes_per_s))}/s"),
            ("least time for these steps", f"{self.bound_s:,.2f} s"),
            ("share of the limit reached", f"{self.bound_s / self.elapsed_s:.1%}"),
        ]
        return "\n\n".join(map(table, (served, waits, distance)))

    def _drafts(self) -> list[tuple[str, str]]:
        """Rows about speculation, if there was any."""
        drafts = self.run.drafts
        if not drafts.num_drafts:
            return []
        share = drafts.num_accepted_tokens / drafts.num_draft_tokens
        mean = 1 + drafts.num_accepted_tokens / drafts.num_drafts
        return [
            ("draft tokens", f"{drafts.num_draft_tokens:,}"),
            ("of which accepted", f"{drafts.num_accepted_tokens:,} ({share:.1%})"),
            ("tokens of a sequence and step with drafts", f"{mean:.2f}"),
        ]

    def document(self) -> dict[str, Any]:
        """What --json prints."""
        return {
            "model": str(self.config.model),
            "device": self.device,
            "dtype": self.config.dtype,
            "scheduler": self.config.scheduler,
            "requests": self.run.sequences,
            "prompt_tokens": self.run.prompt_tokens,
            "output_tokens": self.run.output_tokens,
            "time_s": self.elapsed_s,
            "output_tokens_per_s": self.run.output_tokens_per_s,
            "tokens_per_s": self.tokens_per_s,
            "steps": self.steps,
            **self.run.drafts._asdict(),
            "padding": self.padding,
            "preemptions": self.preemptions,
            "device_idle": None if self.device_idle is None else self.device_idle._asdict(),
            "time_to_first_token_s": _seconds(self.run.ttft_us),
            "between_tokens_s": None if self.between_us is None else _seconds(self.between_us),
            "flops_per_s": self.limits.flops_per_s,
            "bytes_per_s": self.limits.bytes_per_s,
            "least_time_s": self.bound_s,
            "share_of_limit": self.bound_s / self.elapsed_s,
        }


def _seconds(values_us: Percentiles) -> dict[str, float]:
    return {name: us / 1e6 for name, us in values_us._asdict().items()}
