"""Time from a preemption to the next token, for a request whose KV is swapped or recomputed.

Runs the real engine on SmolLM2. A request of each length loses its slot and all its pages, as to a
new request that needs them, several times in turn: with its KV swapped, with it recomputed, and
with `preemption="auto"`. Each time the host has no earlier copy, so that every page is copied out
and back.

On a CPU a transfer is a memory copy and swapping always wins. So the benchmark is repeated with a
slowed link: every copy between device and host then sleeps for as long as its bytes would take at
`--link` megabytes per second. The engine measures its link at startup in either case, and does not
know which it is.

    python benchmarks/swap_vs_recompute.py
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.engine.request import Request
from jaxserve.runtime.open_kv import Staging

MODES = ("swap", "recompute", "auto")


@contextmanager
def slowed_link(bytes_per_s: float) -> Iterator[None]:
    """Has engines loaded meanwhile copy to and from the host at a given rate at most."""
    fast = Staging.download, Staging.upload

    def slowed(copy: Callable) -> Callable:
        @functools.wraps(copy)
        def slow(self, payload):
            time.sleep(payload.nbytes / bytes_per_s)
            return copy(self, payload)

        return slow

    Staging.download, Staging.upload = map(slowed, fast)
    try:
        yield
    finally:
        Staging.download, Staging.upload = fast


def choose(llm: LLM, mode: str) -> None:
    """Has an engine treat the preempted as if loaded with `preemption=mode`."""
    kv = llm.engine.kv
    kv._preemption = kv._matcher._preemption = mode


def preempt(llm: LLM, request: Request) -> float:
    """Takes all a request has, and returns the milliseconds until its next token."""
    engine, kv = llm.engine, llm.engine.kv
    seq = request.sequence_outputs[0].seq
    for node in list(kv.tree):
        kv.forget(node)
    wanted = len(seq.output_token_ids) + seq.num_in_flight + 1
    time.sleep(0.1)  # The step in flight ends: it would delay all three by the same.
    begin = time.perf_counter()
    engine.scheduler.preempt(seq)
    kv.evict(kv.pool.num_cached)
    while len(seq.output_token_ids) < wanted:
        engine.step()
    return 1000 * (time.perf_counter() - begin)


def measure(llm: LLM, prompt: list[int], rounds: int) -> tuple[dict[str, float], list[str]]:
    """Median milliseconds by mode, and what `auto` chose in each round."""
    engine, kv = llm.engine, llm.engine.kv
    params = SamplingParams(temperature=0, max_tokens=8 * rounds + 8, ignore_eos=True)
    request = engine.add(f"{len(prompt)} tokens", prompt, params)
    seen: dict[str, list[float]] = {mode: [] for mode in MODES}
    chosen = []
    while len(request.sequence_outputs[0].seq.output_token_ids) < 2:
        engine.step()
    for _, mode in itertools.product(range(rounds), MODES):
        choose(llm, mode)
        swaps = kv.counters.swaps
        seen[mode].append(preempt(llm, request))
        if mode == "auto":
            chosen.append("swap" if kv.counters.swaps > swaps else "recompute")
    engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    return {mode: statistics.median(times) for mode, times in seen.items()}, chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=2048, help="tokens")
    parser.add_argument("--link", type=float, default=35, help="megabytes a second")
    arguments = parser.parse_args()
    tokens = np.random.default_rng(0).integers(1000, 49000, arguments.longest).tolist()
    rows = []
    for name, rate in (("as it is", float("inf")), (f"{arguments.link:g} MB/s", arguments.link)):
        with slowed_link(1e6 * rate), LLM(host_kv_bytes=512 << 20) as llm:
            length = 64
            while length <= arguments.longest:
                ms, chosen = measure(llm, tokens[:length], arguments.rounds)
                rows.append(
                    (
                        name,
                        length,
                        *ms.values(),
                        ms["recompute"] / ms["swap"],
                        "/".join(dict.fromkeys(chosen)),
                        ms["auto"] / min(ms["swap"], ms["recompute"]),
                    )
                )
                length *= 2
    columns = (
        "link to the host",
        "tokens",
        *(f"{mode} ms" for mode in MODES),
        "recompute / swap",
        "auto chose",
        "auto / better one",
    )
    title = f"From preemption to the next token, medians of {arguments.rounds} rounds"
    print_table(title, columns, rows)


if __name__ == "__main__":
    main()
