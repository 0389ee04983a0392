"""Goodput of disaggregated prefill and decode against engines that do both, in virtual time.

As DistServe compares them (Zhong et al., OSDI 2024): the rate of requests per device at which both
limits are met, of the best split of some engines and of as many that do both, with chunked prefill.
Apart pays where times between tokens must be short, and not where they may be long. Engines
are those of `migrate_tail.py`, LLaMA-7B on A10s; moves of KV take no time.

    python benchmarks/disaggregation.py
"""

from __future__ import annotations

import argparse
import random

from migrate_tail import A10, PAGE_BYTES, WORK, deployment
from table import print_table

from jaxserve.cli.planning.disaggregation import Split
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.simulator.deployments.capacity import Load
from jaxserve.simulator.deployments.phases import goodput_by_role
from jaxserve.simulator.deployments.slo import Slo
from jaxserve.simulator.roofline import Roofline
from jaxserve.simulator.simulation import Arrival

ITL_MS = (45, 80, 120, 200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--ttft-ms", type=int, default=1000)
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, now_s, arrivals = random.Random(args.seed), 0.0, []
    params = SamplingParams(max_tokens=args.output, ignore_eos=True)
    for number in range(args.num_requests):
        arrivals.append(Arrival(round(now_s * 1e6), [number] * args.prompt, params))
        now_s += draw.expovariate(1.0)
    rows = []
    for itl_ms in ITL_MS:
        slo = Slo.of(f"ttft_p90={args.ttft_ms}ms,itl_p90={itl_ms}ms")
        times = Roofline(A10, WORK, PAGE_BYTES)
        engine = goodput_by_role(deployment(), times, Load(arrivals, 1.0), slo)
        split = Split.of(engine, args.engines)
        apart, both = split.goodput, split.goodput_otherwise
        if not split.num_prefill:
            apart, both = both, apart
        chosen = f"{split.num_prefill} + {split.num_decode}" if split.num_prefill else "both"
        row = (engine.prefill, engine.decode, engine.both)
        rows.append((itl_ms, *row, apart / args.engines, both / args.engines, apart / both, chosen))
    print_table(
        f"prompts of {args.prompt} and outputs of {args.output} tokens, first token within "
        f"{args.ttft_ms:,} ms, requests/s of {args.engines} engines within the SLO",
        (
            "ITL ms",
            "one prefills",
            "one decodes",
            "one does both",
            "apart, each",
            "both, each",
            "apart / both",
            "chosen",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
