"""How uniform the steps are, and how many compiled programs they use, during a backlog.

Fixed-size steps have two advantages for a compiler: no padding, and one program in the steady
state. Only steps planned while requests wait are counted; the end of the run is not steady.
"""

from __future__ import annotations

from statistics import fmean, pstdev

from simulated import linear_times, simulate
from table import print_table
from workloads import backlog, from_arguments

from jaxserve.core.steps.buckets import Buckets
from jaxserve.kv.pages import PagePool
from jaxserve.scheduler.policies import POLICIES
from jaxserve.scheduler.scheduler import SchedulerConfig

ROWS = 128
BUDGET = 640


def main() -> None:
    jobs = backlog(from_arguments(__doc__, count=1024, rate_per_s=1))
    buckets = Buckets.from_config(ROWS, BUDGET)
    rows = []
    for policy in POLICIES:
        config = SchedulerConfig(
            policy=policy,
            max_num_seqs=ROWS,
            max_num_batched_tokens=BUDGET,
            max_prefill_tokens=buckets.max_prefill_tokens,
            max_model_len=8192,
            target_step_us=10 if POLICIES[policy].chunk == "timed" else None,
            buckets=buckets,
        )
        run = simulate(jobs, config, PagePool(20_001, 16), linear_times(1, 0))
        steady = [step for step in run.steps if step.num_waiting]
        tokens = [step.num_tokens for step in steady]
        keys = [buckets.pick(step.num_decodes, step.num_prefill_tokens) for step in steady]
        padded = sum(key.num_tokens for key in keys)
        rows.append(
            (
                policy,
                len(steady),
                fmean(tokens),
                pstdev(tokens) / fmean(tokens),
                100 * (1 - sum(tokens) / padded),
                len(set(keys)),
                100 * max(map(keys.count, set(keys))) / len(keys),
                padded,
            )
        )
    unsplit = next(row[-1] for row in rows if row[0] == "orca")
    print_table(
        f"{len(jobs)} requests, {ROWS} rows, {BUDGET} tokens a step, "
        f"{len(buckets.keys())} programs compiled",
        (
            "scheduler",
            "steps",
            "tokens/step",
            "CV",
            "padding %",
            "programs",
            "most used %",
            "orca / this, padded",
        ),
        [(*row[:-1], unsplit / row[-1]) for row in rows],
    )


if __name__ == "__main__":
    main()
