"""KV on the host: a context of ten times the pool against a pool that holds it.

    python benchmarks/host_kv.py [MODEL] [--dtype float32] [--context 2560] [--tokens 16]

Two engines generate the same tokens greedily after the same prompt, of as many tokens as leave room
for these in the context: one whose pool holds all, and one with a tenth of the pool, whose older
pages are on the host. The bytes are those of the formula (docs/offload.md).
"""

from __future__ import annotations

import argparse
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
    read_bytes: int
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
    small = run(options, pages // TIMES, kv_on="host")
    rows = [
        (
            name,
            found.pool_pages,
            found.host_pages,
            found.read_bytes / MIB,
            found.prefill_s / whole.prefill_s,
            found.decode_s / whole.decode_s,
        )
        for name, found in (("device", whole), ("host", small))
    ]
    print_table(
        f"After {options.context - options.tokens:,} tokens, with kv_on device: prefill "
        f"{whole.prefill_s:.2f} s, decode {1000 * whole.decode_s:.1f} ms. "
        f"{'All' if whole.token_ids == small.token_ids else 'NOT ALL'} tokens are the same.",
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
    page_bytes = token_bytes(options.model, settings) * PAGE_SIZE
    with LLM(options.model, **settings, kv_cache_memory_bytes=(1 + pool_pages) * page_bytes) as llm:
        prompt = [token % 40_000 + 100 for token in range(7, options.context - options.tokens + 8)]
        first = SamplingParams(temperature=0, max_tokens=1)
        llm.generate(prompt[:200], first, use_tqdm=False)  # Warms up.
        prefill_s, _ = busy(llm, prompt, first)
        rest = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
        both_s, token_ids = busy(llm, prompt, rest)
        memory = llm.plan().memory
        on_host = memory.host_kv.on_host(pool_pages * TIMES) if memory.host_kv else 0
        return Found(
            token_ids,
            pool_pages,
            on_host,
            on_host * memory.whole_page_bytes,
            prefill_s,
            (both_s - prefill_s) / (options.tokens - 1),
        )


def busy(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[float, tuple[int, ...]]:
    """Seconds of the steps of a request alone, and its tokens."""
    name = "jaxserve:device_busy_seconds_total"
    before = llm.get_metrics()[name].value
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return llm.get_metrics()[name].value - before, tuple(output.outputs[0].token_ids)


def token_bytes(model: Path, settings: dict[str, Any]) -> int:
    """Bytes of a token's KV."""
    from jaxserve.core.settings.config import EngineConfig
    from jaxserve.runtime.startup import engine_plan

    memory = engine_plan.decide(EngineConfig(model=model, **settings)).memory
    return memory.page_bytes // PAGE_SIZE


if __name__ == "__main__":
    main()
