"""Pages in use with parallel samples of one prompt and with beams, against no sharing.

Runs the real engine on SmolLM2 and counts after each plan: the pages in use, and the pages of all
running sequences as if each owned its own.

    python benchmarks/sharing.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from table import print_table

from jaxserve import LLM, BeamSearchParams, SamplingParams

WIDTH = 4
NEW_TOKENS = 32


class PageCount:
    """The most pages in use at once, and the most that tables have entries for."""

    def __init__(self, llm: LLM) -> None:
        self.used = self.entries = 0
        self._scheduler = llm.engine.scheduler
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._count

    def _count(self):
        plan = self._schedule()
        self.used = max(self.used, self._scheduler.pool.num_used)
        self.entries = max(self.entries, sum(len(t.pages) for t in self._scheduler.tables.values()))
        return plan

    def stop(self) -> None:
        self._scheduler.schedule = self._schedule


def count_pages(llm: LLM, serve: Callable[[], object]) -> tuple[int, int, int]:
    """Peak pages with sharing and without it, and pages copied for a second writer."""
    llm.reset_prefix_cache()
    copied = llm.engine.kv.counters.copied_pages
    peak = PageCount(llm)
    serve()
    peak.stop()
    return peak.used, peak.entries, llm.engine.kv.counters.copied_pages - copied


def main() -> None:
    rng = np.random.default_rng(0)
    samples = SamplingParams(n=WIDTH, seed=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    beams = BeamSearchParams(WIDTH, NEW_TOKENS, ignore_eos=True)
    rows = []
    with LLM() as llm:
        page_size = llm.plan().config.page_size
        for length in (100, 1000):
            prompt = rng.integers(1000, 49000, length).tolist()
            for name, serve in (
                (f"n = {WIDTH}", partial(llm.generate, prompt, samples, use_tqdm=False)),
                (f"beam {WIDTH}", partial(llm.beam_search, prompt, beams, use_tqdm=False)),
            ):
                used, entries, copied = count_pages(llm, serve)
                rows.append((name, length, used, entries, entries / used, copied))
    print_table(
        f"Most pages of {page_size} tokens in use at once, {NEW_TOKENS} new tokens",
        ("", "prompt tokens", "shared", "not shared", "not shared / shared", "pages copied"),
        rows,
    )


if __name__ == "__main__":
    main()
