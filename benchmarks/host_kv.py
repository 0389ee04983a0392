"""KV on the host: a context of ten times the pool against a pool that holds it.

    python benchmarks/host_kv.py [MODEL] [--dtype float32] [--context 2560] [--tokens 16]

Three engines generate the same tokens greedily after the same prompt, of as many tokens as leave
room for these in the context: one whose pool holds all, and two with a tenth of the pool, whose
older pages are on the host: one copies these to the device, one sends queries to them. The bytes
are counted; the time of a decode is the median of their steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.models.loading.fetch import default_model_path

PAGE_SIZE = 32
CHUNK = 128
TIMES = 10
MIB = 1 << 20


class Found(NamedTuple):
    token_ids: tuple[int, ...]
    pool_pages: int
    host_pages: int
    decode_bytes: int
    prefill_s: float
    decode_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=default_model_path())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=2560)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    pages = -(-options.context // PAGE_SIZE)
    whole = run(options, pages)
    small = {
        f"host, {what}": run(options, pages // TIMES, kv_on="host", host_attention=way)
        for what, way in (("pages", "disabled"), ("queries", "enabled"))
    }
    same = all(found.token_ids == whole.token_ids for found in small.values())
    rows = [
        (
            name,
            found.pool_pages,
            found.host_pages,
            found.decode_bytes / MIB,
            found.prefill_s / whole.prefill_s,
            found.decode_s / whole.decode_s,
        )
        for name, found in ({"device": whole} | small).items()
    ]
    print_table(
        f"{options.dtype}, after {options.context - options.tokens:,} tokens, with kv_on device: "
        f"prefill {whole.prefill_s:.2f} s, decode {1000 * whole.decode_s:.1f} ms. "
        f"{'All' if same else 'NOT ALL'} tokens are the same.",
        ("kv_on", "pool pages", "host pages", "MiB a decode", "prefill", "decode"),
        rows,
    )


def run(options: argparse.Namespace, pool_pages: int, **changes: Any) -> Found:
    settings: dict[str, Any] = {
        "dtype": options.dtype,
        "max_model_len": options.context + 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1 + CHUNK,
        "page_size": PAGE_SIZE,
        "enable_prefix_caching": False,
    } | changes
    page_bytes = token_bytes(options.model, settings, PAGE_SIZE) * PAGE_SIZE
    with LLM(options.model, **settings, kv_cache_memory_bytes=(1 + pool_pages) * page_bytes) as llm:
        prompt = [token % 40_000 + 100 for token in range(7, options.context - options.tokens + 8)]
        first = SamplingParams(temperature=0, max_tokens=1)
        llm.generate(prompt[:200], first, use_tqdm=False)  # Warms up.
        params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
        token_ids, prefill_s, decodes_s, num_bytes = timed(llm, prompt, params)
        memory = llm.plan().memory
        on_host = memory.host_kv.on_host(options.context) if memory.host_kv else 0
        decode_s = statistics.median(decodes_s)
        return Found(token_ids, pool_pages, on_host, num_bytes, prefill_s, decode_s)


def timed(
    llm: LLM, prompt: list[int], params: SamplingParams
) -> tuple[tuple[int, ...], float, list[float], int]:
    """A request alone: its tokens, seconds of its prefill and of each decode, and the bytes that
    the last decode copies."""
    engine, seconds, num_bytes = llm.engine, [], [copied(llm)]
    request = engine.add("timed", prompt, params)
    while engine.has_work:
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
        num_bytes.append(copied(llm))
    token_ids = tuple(engine.output(request).outputs[0].token_ids)
    chunks = len(seconds) - params.max_tokens + 1
    last = max(after - before for before, after in zip(num_bytes[chunks:], num_bytes[chunks + 1 :]))
    return token_ids, sum(seconds[:chunks]), seconds[chunks:], last


def copied(llm: LLM) -> int:
    copies = llm.engine.counters.host_kv_copies
    return copies.page_bytes + copies.query_bytes if copies else 0


def token_bytes(model: Path, settings: dict[str, Any], page_size: int) -> int:
    """Bytes of a token's KV."""
    from jaxserve.core.settings.config import EngineConfig
    from jaxserve.runtime.startup import engine_plan

    memory = engine_plan.plan_engine(EngineConfig(model=model, **settings)).memory
    return memory.page_bytes // page_size


if __name__ == "__main__":
    main()
