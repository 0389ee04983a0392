"""`jaxserve bench offline`: throughput, compared with the roofline of the device."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.cli.progress import TerminalProgress
from jaxserve.cli.text import device_name, milliseconds, size, table
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, ModelError
from jaxserve.core.events import Dispatched
from jaxserve.core.output_file import check_output_file
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.metrics.metrics import Metrics
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import Percentiles, RunSummary
from jaxserve.metrics.trace import write_trace

if TYPE_CHECKING:
    from jaxserve.cli.limits import Limits
    from jaxserve.engine.engine import Engine


@dataclasses.dataclass(frozen=True)
class Offline:
    """Benchmark an engine in this process, and compare it with the roofline of the device.

    All requests arrive at the start. Prompts are random tokens, and every output has the full
    length. With --load-format dummy only the model's config is needed.

    Attributes:
        num_prompts: number of requests.
        input_len: tokens per prompt.
        output_len: tokens generated per request.
        trace_file: write a trace of the run, to open in ui.perfetto.dev.
    """

    num_prompts: int = 32
    input_len: int = 128
    output_len: int = 64
    trace_file: Path | None = None
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        """Raises ConfigError for a number below 1, or a trace file that cannot be written."""
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        if self.trace_file is not None:
            check_output_file("trace_file", self.trace_file)

    def run(self) -> int:
        from jaxserve.cli.limits import measure
        from jaxserve.engine.engine import Engine

        with TerminalProgress() as progress:
            engine = Engine.load(self.engine, progress=progress, keep_events=True)
            try:
                self._serve(engine, progress)
            finally:
                engine.close()
                if self.trace_file is not None:
                    write_trace(self.trace_file, engine.log.records)
        limits = measure(engine.plan.device, engine.plan.shapes.dtype)
        print(_report(engine, limits))
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


def _report(engine: Engine, limits: Limits) -> str:
    """Three tables: throughput, latencies, and the roofline."""
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
    bound_s = sum(limits.seconds(engine.plan, step) for step in steps)
    elapsed_s = run.elapsed_us / 1e6
    served = [
        ("requests", f"{run.sequences:,}"),
        ("prompt tokens", f"{run.prompt_tokens:,}"),
        ("output tokens", f"{run.output_tokens:,}"),
        ("time", f"{elapsed_s:,.2f} s"),
        ("output tokens/s", f"{run.output_tokens_per_s:,.1f}"),
        ("all tokens/s", f"{(run.prompt_tokens + run.output_tokens) / elapsed_s:,.1f}"),
        ("steps", f"{len(steps):,}"),
        ("padding, of the rows computed", f"{padded / (computed + padded):.1%}"),
        ("preemptions", f"{sum(sequence.preemptions for sequence in sequences):,}"),
        ("scheduler", engine.plan.config.scheduler),
        ("dtype", engine.plan.config.dtype),
        ("device", device_name(engine.plan.device)),
    ]
    waits = [("", "p50", "p90", "p99"), ("time to first token", *map(milliseconds, run.ttft_us))]
    if gaps:
        percentiles = Percentiles(*(percentile(gaps, p) for p in (50, 90, 99)))
        waits.append(("between tokens", *map(milliseconds, percentiles)))
    distance = [
        ("matmul rate, measured now", f"{limits.flops_per_s / 1e9:,.0f} GFLOP/s"),
        ("weight reading rate, measured now", f"{size(int(limits.bytes_per_s))}/s"),
        ("least time for these steps", f"{bound_s:,.2f} s"),
        ("share of the limit reached", f"{bound_s / elapsed_s:.1%}"),
    ]
    return "\n\n".join(map(table, (served, waits, distance)))
