"""The cost of `jaxserve search`: a Llama 70B on 16 devices, and what its bounds save.

First the whole grid, by the command itself: 648 deployments by default, of three kinds of GPUs,
every mesh of 16 devices, two schedulers, three limits of sequences and three of tokens. Then 40
deployments on 16 of the first kind twice, with and without bounds: the number of simulations of
each, and whether the winner and the Pareto front are the same.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from table import print_table

from jaxserve.cli.search.deployments import Planned, Planner, SearchLoad, SharedLoad
from jaxserve.cli.search.space import FixedSettings, Space
from jaxserve.simulator.deployments.search import Outcome, Processes, front, outcomes, winner
from jaxserve.simulator.deployments.slo import Slo

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
DEVICES = 16
FORTY = Space(
    tensor_parallel_size=(2, 4, 8, 16),
    pipeline_parallel_size=(1, 2),
    scheduler=("sarathi",),
    max_num_batched_tokens=(384, 640, 1152),
    max_num_seqs=(64, 128),
)
"""TP16 takes all devices, and so one stage only: 42 of them, of which the first 40 are taken."""


def whole(args: argparse.Namespace, model: Path) -> None:
    """The command, which takes the time that a user waits."""
    words = ["--device", args.device, "--devices", str(DEVICES), "--slo", args.slo, "--json"]
    words += ["--max-num-seqs", args.max_num_seqs, "--scheduler", args.scheduler]
    words += ["--num-requests", str(args.num_requests), "--processes", str(args.processes)]
    words += load_words(args)
    begin_s = time.monotonic()
    command = [sys.executable, "-m", "jaxserve", "search", str(model), *words]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - begin_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not run.stdout:
        sys.exit(run.returncode)
    found = json.loads(run.stdout)
    deployments, dropped = found["deployments"], found["dropped"]
    simulations = [each["simulations"] for each in deployments]
    rows = [
        ("deployments", len(deployments) + len(dropped)),
        ("that do not fit, or do not combine", len(dropped)),
        ("left out by bounds", sum(1 for count in simulations if not count)),
        ("simulated", sum(1 for count in simulations if count)),
        ("simulations", sum(simulations)),
        ("on the Pareto front", len(found["front"])),
        ("seconds", seconds),
        ("processor seconds, of all processes", used.ru_utime + used.ru_stime),
        ("600 s / seconds", 600 / seconds),
    ]
    print_table(f"A search in {args.processes} processes", ("", ""), rows)
    if found["winner"] is not None:
        print("\nbest:", deployments[found["winner"]]["command"].replace(str(model), model.name))


def load_words(args: argparse.Namespace) -> list[str]:
    lengths = ["--input-len", str(args.input_len), "--output-len", str(args.output_len)]
    if args.trace is not None:
        lengths = ["--trace", str(args.trace), "--max-input-tokens", "8000"]
    return [*lengths, "--request-rate", str(args.request_rate)]


def forty(args: argparse.Namespace, model: Path) -> None:
    """With and without bounds."""
    slo = Slo.of(args.slo)
    lengths: dict[str, Any] = {"trace": args.trace, "max_input_tokens": 8000}
    if args.trace is None:
        lengths = {"input_len": args.input_len, "output_len": args.output_len}
    load = SearchLoad(
        request_rate=args.request_rate, num_requests=args.num_requests_of_forty, **lengths
    )
    shared = SharedLoad.of(load, DEVICES, 0)
    planner = Planner(FixedSettings(str(model)), shared, slo, None)
    device = args.device.split(",")[0]
    choices = list(FORTY.choices([device], [DEVICES], experts=False))[:40]
    planned = [plan for choice in choices if isinstance(plan := planner.plan(choice), Planned)]
    pruned, full = (searched(planned, slo, args.processes, prune) for prune in (True, False))
    candidates = [each.candidate for each in planned]
    best = [winner(candidates, found) for found in (pruned, full)]
    fronts = [front(candidates, found) for found in (pruned, full)]
    counts = [sum(each.simulations for each in found.values()) for found in (pruned, full)]
    print()
    print_table(
        f"{len(choices)} deployments, of which {len(planned)} fit, {args.num_requests_of_forty} "
        "requests to each engine",
        ("", "with bounds", "exhaustive", "ratio", "same winner", "same front"),
        [
            (
                "simulations",
                *counts,
                counts[0] / counts[1],
                best[0] == best[1],
                fronts[0] == fronts[1],
            )
        ],
    )


def searched(
    planned: Sequence[Planned], slo: Slo, processes: int, prune: bool
) -> dict[int, Outcome]:
    with Processes(slo, processes) as pool:
        return dict(
            outcomes(
                [each.candidate for each in planned],
                lambda number, above, last: pool.submit(planned[number].engine, above, last),
                slo,
                prune=prune,
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="a100,h100,h200")
    parser.add_argument("--scheduler", default="sarathi,vllm")
    parser.add_argument("--max-num-seqs", default="32,128,512")
    parser.add_argument("--slo", default="ttft=2s,itl_p90=50ms")
    parser.add_argument("--trace", type=Path, help="a trace for the lengths; else fixed ones")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--request-rate", type=float, default=5.0)
    parser.add_argument("--num-requests", type=int, default=500, help="to each engine")
    parser.add_argument("--num-requests-of-forty", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", choices=["whole", "forty"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "llama-70b"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(LLAMA_70B))
        if args.only != "forty":
            whole(args, model)
        if args.only != "whole":
            forty(args, model)


if __name__ == "__main__":
    main()
