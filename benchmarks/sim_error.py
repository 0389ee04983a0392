"""The error of simulations: a real engine under a load, and the simulation of the same load.

Measures the steps of the engine first, or takes what `jaxserve profile` measured, then serves each
load for real and on the virtual clock, and compares percentiles. A load is Poisson arrivals, or a
trace whose lengths are scaled to the engine's context, at each of the request rates. Run it on an
idle machine. The row of steps compares what the engine's own steps took with what the profile says
of the very same ones, and the last columns are a simulation with all times of the profile
multiplied by that ratio: what remains is not from a machine that has become faster or slower since.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from table import print_table

from jaxserve.cli.planning.described import sizes
from jaxserve.cli.profile import measured_profile
from jaxserve.core.events import EventLog, monotonic_us
from jaxserve.core.process.terminal_progress import TerminalProgress
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.results import DispatchedStep, StepResults
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.loadgen.lengths import uniform_lengths
from jaxserve.loadgen.prompts import PromptMaker
from jaxserve.loadgen.trace import Fit, TraceRequest, drawn, read_trace
from jaxserve.metrics.metrics import Metrics
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import SequenceSummary
from jaxserve.runtime.startup.engine_plan import EnginePlan
from jaxserve.runtime.startup.start import start
from jaxserve.simulator.profile import Profile, ProgramTime
from jaxserve.simulator.simulation import Arrival, Simulation

Prompts = Sequence[list[int]]


class ReadSteps:
    """The steps that an engine core reads, observed beside its own observer."""

    def __init__(self, core: EngineCore) -> None:
        self._observer = core.observer
        core.observer = self
        self._read: list[tuple[DispatchedStep, int]] = []

    def dispatched(self, plan: StepPlan) -> None:
        self._observer.dispatched(plan)

    def read(self, step: DispatchedStep, results: StepResults, us: int) -> None:
        self._observer.read(step, results, us)
        self._read.append((step, us))

    def mean_ms(self, profile: Profile) -> tuple[float, float]:
        """Means of the steps since the last call: what they took, and what the profile says."""
        read, self._read = self._read, []
        predicted_s = [profile.step(step.key, step.together) for step, _ in read]
        return fmean(us for _, us in read) / 1e3, 1e3 * fmean(predicted_s)


def loads(args: argparse.Namespace) -> Iterator[tuple[str, list[TraceRequest]]]:
    """Each load and its name."""
    for rate in args.request_rate:
        if not args.trace:
            load = drawn(rate, uniform_lengths(args.input_len, args.output_len, seed=0), seed=0)
            lengths = f"{args.input_len} and {args.output_len} tokens"
            yield f"{rate:g}/s of {lengths}", [next(load) for _ in range(args.num_requests)]
    for trace in args.trace:
        rows = read_trace(trace)[: args.num_requests]
        trace_rate = (len(rows) - 1) / max(row.arrival_us for row in rows) * 1e6
        for rate in args.request_rate:
            fit = Fit(
                rate_scale=rate / trace_rate,
                length_scale=args.length_scale,
                max_prompt_tokens=args.max_model_len * 3 // 4,
                max_output_tokens=args.max_model_len // 4,
            )
            yield f"{trace.stem}, {rate:g}/s", fit(rows)


def params(request: TraceRequest) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)


def serve(engine: Engine, name: str, prompts: Prompts, requests: Sequence[TraceRequest]) -> float:
    """The loop of a server, without clients. Returns the seconds that it took."""
    begin_us, waiting = monotonic_us(), list(enumerate(requests))
    while waiting or engine.has_work:
        while waiting and monotonic_us() - begin_us >= waiting[0][1].arrival_us:
            number, request = waiting.pop(0)
            tokens = TokenizedPrompt(None, prompts[number])
            engine.add(f"{name} {number}", tokens, params(request))
        if engine.has_work:
            engine.step()
        else:
            time.sleep(1e-3)
    return (monotonic_us() - begin_us) / 1e6


def simulate(
    plan: EnginePlan, profile: Profile, prompts: Prompts, requests: Sequence[TraceRequest]
) -> Simulation:
    buckets, memory = plan.shapes.buckets, plan.memory
    simulation = Simulation(plan.config, buckets, memory.num_pages, profile, layout=memory.layout)
    simulation.run(
        Arrival(request.arrival_us, prompt, params(request))
        for prompt, request in zip(prompts, requests)
    )
    return simulation


def latencies(summaries: Sequence[SequenceSummary]) -> dict[str, float]:
    """Percentiles, and a mean, in milliseconds."""
    times = {
        "TTFT": [summary.ttft_us for summary in summaries],
        "ITL": [us for summary in summaries for us in summary.inter_token_us],
        "e2e": [summary.e2e_us for summary in summaries],
    }
    found = {
        f"{name} P{percent} ms": percentile(of, percent) / 1e3
        for name, of in times.items()
        for percent in (50, 90)
    }
    # A percentile may lie between steps that only decode and those that prefill; the mean does not.
    return found | {"ITL mean ms": fmean(times["ITL"]) / 1e3}


def scaled(profile: Profile, factor: float) -> Profile:
    """All programs take so many times as long."""
    programs = {
        key: ProgramTime(*(factor * seconds for seconds in time))
        for key, time in profile.programs.items()
    }
    return dataclasses.replace(profile, programs=programs)


def error(found: float, expected: float) -> float:
    """In percent."""
    return 100 * (found / expected - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--dtype", default=EngineConfig.dtype)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--request-rate", type=float, nargs="+", default=[1.0], help="per second")
    parser.add_argument("--num-requests", type=int, default=40)
    parser.add_argument("--input-len", type=int, default=100, help="of Poisson arrivals")
    parser.add_argument("--output-len", type=int, default=20, help="of Poisson arrivals")
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--length-scale", type=float, default=0.1, help="of traces")
    parser.add_argument("--profile", type=Path, help="a file of `jaxserve profile`")
    args = parser.parse_args()
    config = EngineConfig(
        args.model,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=128 + args.max_num_seqs,
        max_model_len=args.max_model_len,
    )
    metrics = Metrics(keep_tokens=True)
    log = EventLog(metrics.fold)
    with TerminalProgress() as progress:
        plan, tokenizer, runner = start(config, log, progress)
        if args.profile:
            profile = Profile.read(args.profile)
            profile.check(plan.config, sizes(plan.shapes))
        else:
            profile = measured_profile(plan, runner, progress)
    held_out = profile.held_out
    print(
        f"{held_out.samples} held-out steps are predicted with a median error of "
        f"{held_out.median:.1%}, at most {held_out.most:.1%}"
    )
    engine = Engine(plan, tokenizer, runner, log, metrics)
    steps = ReadSteps(engine._core)
    vocabulary = range(plan.shapes.model.vocab_size)
    for seed, (name, requests) in enumerate(loads(args)):
        maker = PromptMaker(vocabulary, seed)
        prompts = [maker.units(number, request) for number, request in enumerate(requests)]
        before = len(metrics.finished())
        seconds = serve(engine, name, prompts, requests)
        real = latencies(metrics.finished()[before:])
        step_ms, predicted_ms = steps.mean_ms(profile)
        of_now = scaled(profile, step_ms / predicted_ms)
        models = [simulate(plan, times, prompts, requests) for times in (profile, of_now)]
        tokens = sum(request.output_tokens for request in requests)
        real |= {"step, mean ms": step_ms, "output tokens/s": tokens / seconds}
        found = [latencies(model.metrics.finished()) for model in models]
        for model, rows, mean_ms in zip(models, found, (predicted_ms, step_ms)):
            rows["step, mean ms"] = mean_ms
            rows["output tokens/s"] = tokens / (model.clock.now() / 1e6)
        print_table(
            f"{name}: {len(requests)} requests",
            ("", "engine", "simulation", "error %", "at its speed", "error %"),
            [
                (
                    row,
                    of_engine,
                    *itertools.chain(*((rows[row], error(rows[row], of_engine)) for rows in found)),
                )
                for row, of_engine in real.items()
            ],
        )
    engine.close()


if __name__ == "__main__":
    main()
