"""The error of simulations: a real engine under a load, and the simulation of the same load.

Measures the steps of the engine first (as `jaxserve profile`), then serves Poisson arrivals for
real and on the virtual clock, and compares percentiles. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from table import print_table

from jaxserve.cli.profile import measured_profile
from jaxserve.core.config import EngineConfig
from jaxserve.core.events import EventLog, monotonic_us
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.loadgen.trace import TraceRequest, drawn
from jaxserve.metrics.metrics import Metrics
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import SequenceSummary
from jaxserve.runtime.planning.engine_plan import EnginePlan
from jaxserve.runtime.progress import TerminalProgress
from jaxserve.runtime.startup import start
from jaxserve.simulator.profile import Profile
from jaxserve.simulator.simulation import Arrival, Simulation

Times = dict[str, list[int]]


def params(request: TraceRequest) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)


def prompt(number: int, request: TraceRequest) -> list[int]:
    """Like that of no other request."""
    return [100 + number] * request.prompt_tokens


def serve(engine: Engine, requests: Sequence[TraceRequest]) -> None:
    """The loop of a server, without clients."""
    begin_us, waiting = monotonic_us(), list(enumerate(requests))
    while waiting or engine.has_work:
        while waiting and monotonic_us() - begin_us >= waiting[0][1].arrival_us:
            number, request = waiting.pop(0)
            tokens = TokenizedPrompt(None, prompt(number, request))
            engine.add(str(number), tokens, params(request))
        if engine.has_work:
            engine.step()
        else:
            time.sleep(1e-3)


def simulate(plan: EnginePlan, profile: Profile, requests: Sequence[TraceRequest]) -> Simulation:
    buckets, memory = plan.shapes.buckets, plan.memory
    simulation = Simulation(plan.config, buckets, memory.num_pages, profile, layout=memory.layout)
    simulation.run(
        Arrival(request.arrival_us, prompt(number, request), params(request))
        for number, request in enumerate(requests)
    )
    return simulation


def times(summaries: Sequence[SequenceSummary]) -> Times:
    return {
        "TTFT": [summary.ttft_us for summary in summaries],
        "ITL": [us for summary in summaries for us in summary.inter_token_us],
        "e2e": [summary.e2e_us for summary in summaries],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--request-rate", type=float, default=1.0, help="per second")
    parser.add_argument("--num-requests", type=int, default=40)
    parser.add_argument("--input-len", type=int, default=100)
    parser.add_argument("--output-len", type=int, default=20)
    args = parser.parse_args()
    config = EngineConfig(
        args.model, max_num_seqs=4, max_num_batched_tokens=132, max_model_len=1024
    )
    metrics = Metrics(keep_tokens=True)
    log = EventLog(metrics.fold)
    with TerminalProgress() as progress:
        plan, tokenizer, runner = start(config, log, progress)
        profile = measured_profile(plan, runner, progress)
    held_out = profile.held_out
    load = drawn(args.request_rate, args.input_len, args.output_len, seed=0)
    requests = [next(load) for _ in range(args.num_requests)]
    engine = Engine(plan, tokenizer, runner, log, metrics)
    serve(engine, requests)
    simulation = simulate(plan, profile, requests)
    real, simulated = times(metrics.finished()), times(simulation.metrics.finished())
    rows = []
    for name in real:
        for percent in (50, 90):
            measured, modelled = (percentile(of[name], percent) / 1e3 for of in (real, simulated))
            rows.append((f"{name} P{percent}", measured, modelled, 100 * (modelled / measured - 1)))
    print_table(
        f"{len(requests)} requests, {args.request_rate:g}/s, of {args.input_len} and "
        f"{args.output_len} tokens; {held_out.samples} held-out steps are predicted with a median "
        f"error of {held_out.median:.1%}",
        ("", "engine ms", "simulation ms", "error %"),
        rows,
    )
    engine.close()


if __name__ == "__main__":
    main()
