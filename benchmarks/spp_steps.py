"""Steps until a prompt's first token, when its chunks follow each other through pipeline stages.

A chunk depends only on the previous chunk's results on the same stage, so stage s works on chunk c
while stage s - 1 works on c + 1 (sequence pipeline parallelism, Medha, 2409.17264): m chunks on p
stages take m + p - 1 calls of the devices, each of one stage's time. Sequentially they would take
m * p.

    python benchmarks/spp_steps.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from induction_model import write_induction_model
from table import print_table
from virtual_devices import on_devices

from jaxserve import LLM, SamplingParams
from jaxserve.engine.engine import Engine

CHUNK_TOKENS = 16
CHUNKS = (1, 4, 16, 64)


def steps_by_chunks(model: Path, stages: int) -> list[int]:
    """Calls of the devices for a prompt of each of CHUNKS."""
    with LLM(
        model,
        max_num_seqs=1,
        max_num_batched_tokens=1 + CHUNK_TOKENS,
        pipeline_parallel_size=stages,
        program_scope="step",
        enable_prefix_caching=False,
    ) as llm:
        return [_count_calls(llm.engine, chunks * CHUNK_TOKENS) for chunks in CHUNKS]


def _count_calls(engine: Engine, num_tokens: int) -> int:
    calls, runner = [], engine._runner
    dispatch = runner.dispatch

    def counted(packed, *begun_us):
        calls.append(packed)
        dispatch(packed, *begun_us)

    runner.dispatch = counted
    prompt = [token % 100 for token in range(num_tokens)]
    engine.add(str(num_tokens), prompt, SamplingParams(temperature=0, max_tokens=1))
    while engine.has_work:
        engine.step()
    runner.dispatch = dispatch
    return len(calls)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = write_induction_model(Path(directory), 1 << 13, hops=4)
        for stages in (1, 2, 4):
            for chunks, steps in zip(CHUNKS, on_devices(stages, steps_by_chunks, model, stages)):
                in_turn = chunks * stages
                rows.append((stages, chunks, steps, chunks + stages - 1, in_turn, in_turn / steps))
    print_table(
        "Steps of one stage's time until the first token",
        ("stages", "chunks", "steps", "m + p - 1", "m * p", "m * p / steps"),
        rows,
    )


if __name__ == "__main__":
    main()
