"""Prompt tokens computed for prompts with shared prefixes, in two orders, with a small pool.

In arrival order, a prefix cache evicts pages that it needs again. The planned order runs prompts
with a common prefix together (BatchLLM, Zheng et al. 2025), as `LLM.generate` does. Both are
compared with the optimum of one level of sharing, each prefix computed once, and with a cache that
evicts nothing. With nested prefixes the planned order can save more than one level does, for
neighbours also share longer cached prefixes.

The first workload has the shape of BatchLLM's microbenchmark, with a tenth of its prompts: 16
share each context of 2,000 tokens, and have 200 more of their own. A *valley* is a step of less
than the token budget. Steps cost the same as in `stall_free`.
"""

from __future__ import annotations

import dataclasses
import random
from itertools import count, pairwise, takewhile

from simulated import Run, linear_times, simulate
from stall_free import BASE_US, PER_TOKEN_US
from table import print_table
from workloads import Job

from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import PagePool
from jaxserve.scheduler.prefix_groups import plan_prefix_groups, planned_order
from jaxserve.scheduler.scheduler import SchedulerConfig

PAGE_SIZE = 16
POOL_TOKENS = 32_768
ROWS = 128
BUDGET = 2048


class Texts:
    """Texts no two of which begin alike."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._ids = count()

    def new(self, num_tokens: int) -> list[int]:
        return [next(self._ids)] * num_tokens


def flat(texts: Texts, contexts: int = 40, members: int = 16) -> list[Job]:
    """Contexts of 2,000 tokens, each followed by tails of 200."""
    prompts = []
    for _ in range(contexts):
        context = texts.new(2000)
        prompts += [context + texts.new(200) for _ in range(members)]
    return _shuffled(texts, prompts)


def nested(texts: Texts) -> list[Job]:
    """Instructions of 300 tokens, under each of them some documents of about 1,500, and under each
    of those some examples of 300 and questions of about 60."""
    prompts = []
    for _ in range(4):
        instruction = texts.new(300)
        for _ in range(8):
            document = instruction + texts.new(texts.rng.randint(1000, 2000))
            for _ in range(3):
                examples = document + texts.new(300)
                prompts += [examples + texts.new(texts.rng.randint(20, 100)) for _ in range(6)]
    return _shuffled(texts, prompts)


def _shuffled(texts: Texts, prompts: list[list[int]]) -> list[Job]:
    texts.rng.shuffle(prompts)
    lengths = [min(round(texts.rng.lognormvariate(4, 0.8)) + 1, 512) for _ in prompts]
    return [
        Job(0, len(prompt), length, max_tokens=length, token_ids=prompt)
        for prompt, length in zip(prompts, lengths)
    ]


def planned(jobs: list[Job]) -> list[Job]:
    order = planned_order(
        [job.token_ids for job in jobs], [job.max_tokens for job in jobs], PAGE_SIZE
    )
    return [dataclasses.replace(jobs[index], shared_prefix=shared) for index, shared in order]


def serve(jobs: list[Job]) -> Run:
    config = SchedulerConfig(
        policy="sarathi",
        max_num_seqs=ROWS,
        max_num_batched_tokens=BUDGET,
        max_prefill_tokens=BUDGET,
        max_model_len=8192,
    )
    pool = PagePool(POOL_TOKENS // PAGE_SIZE + 1, PAGE_SIZE)
    return simulate(jobs, config, KVManager(pool), linear_times(BASE_US, PER_TOKEN_US))


def most_saved(jobs: list[Job]) -> int:
    """Tokens that need not be computed if nothing is ever forgotten."""
    prompts = sorted(job.token_ids for job in jobs)
    return sum(
        sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*neighbours)))
        for neighbours in pairwise(prompts)
    )


def main() -> None:
    rows = []
    for name, jobs in {"flat": flat(Texts(0)), "nested": nested(Texts(1))}.items():
        total = sum(job.prompt_tokens for job in jobs)
        groups = plan_prefix_groups([job.token_ids for job in jobs], None, min_prefix_tokens=1)
        optimum = sum(group.prefix_tokens * (len(group.members) - 1) for group in groups)
        runs = {"as they came": serve(jobs), "planned": serve(planned(jobs))}
        first = runs["as they came"]
        for order, run in runs.items():
            computed = run.num_prefill_tokens
            rows.append(
                (
                    f"{name}, {order}",
                    computed,
                    100 * (total - computed) / total,
                    100 * (total - computed) / optimum,
                    first.num_prefill_tokens / computed,
                    len(run.steps),
                    sum(step.num_tokens < BUDGET for step in run.steps),
                    run.num_preemptions,
                    run.steps[-1].end_us / 1e6,
                    first.steps[-1].end_us / run.steps[-1].end_us,
                )
            )
        for limit, saved in (("one level", optimum), ("unlimited cache", most_saved(jobs))):
            computed = total - saved
            rows.append(
                (
                    f"{name}, {limit}",
                    computed,
                    100 * saved / total,
                    100 * saved / optimum,
                    first.num_prefill_tokens / computed,
                    *[None] * 5,
                )
            )
    print_table(
        f"KV memory for {POOL_TOKENS:,} tokens, {ROWS} rows, {BUDGET:,} tokens a step at most",
        (
            "prompts, order",
            "prompt tokens computed",
            "saved %",
            "of optimum %",
            "as they came / this, tokens",
            "steps",
            "valleys",
            "preempted",
            "time s",
            "as they came / this, time",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
