"""Copies and bytes between the host's memory and staging, for conversations that alternate.

Runs the real engine on SmolLM2 with so few pages that turns preempt each other and every
conversation leaves the device between two of its turns. Pages with consecutive numbers are copied
together (block groups), and a page that the host already holds is not saved again (reuse), both
after FastSwitch (Shen et al. 2024).

The trace is run twice. First every host copy is dropped once its page is back on the device, so
that nothing can be reused; page by page, this run would take one copy for each page that it
transferred.

    python benchmarks/swap_extents.py
"""

from __future__ import annotations

import argparse

import numpy as np
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.kv.tier import Tier

POOL_PAGES = 20
TURN_TOKENS = 96
ANSWER = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def converse(llm: LLM, conversations: int, turns: int, reuse: bool) -> tuple[list[list[int]], int]:
    """All conversations at once, turn by turn. Their tokens, and how often one was preempted."""
    engine, kv = llm.engine, llm.engine.kv
    rng = np.random.default_rng(0)
    contexts: list[list[int]] = [[] for _ in range(conversations)]
    preempted = 0
    for turn in range(turns):
        for context in contexts:
            context += rng.integers(1000, 49000, TURN_TOKENS).tolist()
        requests = [
            engine.add(f"{reuse} {turn} {index}", context, ANSWER)
            for index, context in enumerate(contexts)
        ]
        while engine.has_work or kv.num_in_flight_transfers:
            if not reuse:
                for node in [node for node in kv.tree if node.device is not None]:
                    kv.forget(node)
            engine.step()
        for context, request in zip(contexts, requests):
            (generation,) = request.sequence_outputs
            context += generation.seq.output_token_ids
            preempted += generation.seq.num_preemptions
    return contexts, preempted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6)
    arguments = parser.parse_args()
    rows = []
    with LLM(host_kv_bytes=512 << 20, preemption="swap") as llm:
        kv = llm.engine.kv
        moves, page_bytes = kv.transfer_counters, kv.page_bytes
        store = llm.engine._kv_executor.stores[Tier.HOST]
        # Few pages are left to use, and the programs are those of any other engine.
        kv.pool.allocate(kv.pool.num_free - POOL_PAGES)
        said = []
        for name, reuse in (("grouped", False), ("grouped, reused", True)):
            llm.reset_prefix_cache()
            before = store.num_copies, *(dict(m) for m in (moves.saved_pages, moves.fetched_pages))
            contexts, preempted = converse(llm, arguments.conversations, arguments.turns, reuse)
            said.append(contexts)
            out = moves.saved_pages[Tier.HOST] - before[1].get(Tier.HOST, 0)
            back = moves.fetched_pages[Tier.HOST] - before[2].get(Tier.HOST, 0)
            run = out, back, (out + back) * page_bytes / 1e6, preempted
            if not reuse:
                rows.append(("page by page", out + back, *run))
            rows.append((name, store.num_copies - before[0], *run))
    same = "the same" if said[0] == said[1] else "DIFFERENT"
    first = rows[0]
    print_table(
        f"{arguments.conversations} conversations of {arguments.turns} turns, {POOL_PAGES} pages, "
        f"{same} answers in both runs",
        (
            "",
            "copies",
            "pages out",
            "pages back",
            "MB",
            "preempted",
            "page by page / this, copies",
            "page by page / this, MB",
        ),
        [(*row, first[1] / row[1], first[4] / row[4]) for row in rows],
    )


if __name__ == "__main__":
    main()
