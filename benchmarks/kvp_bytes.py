"""KV bytes on each device as more of them share every sequence (KV-cache parallelism).

Engines of one model with the same pool, for one sequence as long as the model's context. The
formula is 2 x layers x KV heads x head_dim x element bytes x tokens / devices; the bytes held are
read from the arrays. A pool has one more page than its tokens fill, the trash page.

    python benchmarks/kvp_bytes.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import jax
from induction_model import write_induction_model
from table import print_table
from virtual_devices import on_devices

from jaxserve import LLM

PAGE_SIZE = 64


def kv_bytes(model: Path, seq: int) -> tuple[int, int, int]:
    """KV bytes on one of `seq` devices: by the formula, as planned, and as the fullest has them."""
    with LLM(
        model,
        max_num_seqs=1,
        max_num_batched_tokens=17,
        page_size=PAGE_SIZE,
        context_parallel_size=seq,
    ) as llm:
        plan, held = llm.plan(), dict.fromkeys(jax.devices(), 0)
        for array in jax.tree.leaves(llm.engine._runner._state.kv):
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
        tokens = plan.memory.num_pages * plan.memory.page_size
        formula = plan.checkpoint.config.kv_bytes_per_token(4) * tokens // seq
        return formula, plan.memory.kv_bytes, max(held.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1 << 20)
    tokens = parser.parse_args().tokens
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = write_induction_model(Path(directory), tokens)
        for seq in (1, 2, 4, 8):
            formula, planned, held = on_devices(seq, kv_bytes, model, seq)
            first = rows[0][3] if rows else held
            rows.append((seq, formula, planned, held, held / formula, first / held))
    print_table(
        f"KV bytes on each device, for {tokens:,} tokens",
        ("devices", "formula", "planned", "held", "held / formula", "on one / this"),
        rows,
    )


if __name__ == "__main__":
    main()
