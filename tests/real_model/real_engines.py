"""Engines of SmolLM2 with few and small programs, on one device and on meshes."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

from golden_prompts import golden_prompts
from mesh_engines import load
from tiny_engines import Arrival, drive

from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.llm import LLM
from jaxserve.models.loading.checkpoint import open_checkpoint

CONTEXT = 704
"""For the longest golden prompt and its continuation."""
MAX_SEQS = 4
PAGE_SIZE = 16
NUM_PAGES = 48
"""A longest request fits, four requests of its kind do not."""
MESH_PAGES = 40
MESH_TOKENS = 16
MESH_PREFILL = 32
MESH_PROMPTS = ("chat_capital", "chat_many_turns", "code_python", "french", "chinese", "emoji")
GREEDY = SamplingParams(temperature=0, max_tokens=MESH_TOKENS)
SCORED = dataclasses.replace(GREEDY, logprobs=0, max_tokens=MESH_TOKENS // 2)
SEVERAL = SamplingParams(temperature=0.8, top_p=0.95, seed=7, n=2, max_tokens=12, logprobs=2)
CHOSEN = SamplingParams(
    temperature=1.0, seed=3, max_tokens=12, structured_outputs={"choice": ["Madrid", "Paris"]}
)


def page_bytes(path: Path) -> int:
    """Bytes of a page in float32."""
    return open_checkpoint(path).config.kv_bytes_per_token(4) * PAGE_SIZE


def load_alone(path: Path, **changes: Any) -> LLM:
    """An engine on one device. `host_pages` is how many pages host memory may hold."""
    settings = {
        "max_model_len": CONTEXT,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": MAX_SEQS + 64,
        "page_size": PAGE_SIZE,
        "kv_cache_memory_bytes": NUM_PAGES * page_bytes(path),
    } | changes
    if "host_pages" in settings:
        settings["host_kv_bytes"] = settings.pop("host_pages") * page_bytes(path)
    return LLM(path, **settings)


def answer(mesh: str, path: Path, target: Path, dtype: str, snapshot: Path | None = None) -> None:
    """Writes to `target` what an engine on `mesh` answers: the golden prompts, scored in bfloat16,
    sampled requests in float32, and what the requests of a snapshot end with."""
    settings = {"max_num_batched_tokens": 2 + MESH_PREFILL, "pages": MESH_PAGES}
    with load(open_checkpoint(path), mesh, dtype=dtype, program_scope=None, **settings) as llm:
        golden = golden_prompts(*MESH_PROMPTS)
        arrivals = [Arrival(entry.prompt_token_ids, GREEDY) for entry in golden]
        if dtype == "bfloat16":  # Fewer, for CPUs that have no products of bfloat16.
            arrivals = [Arrival(entry.prompt_token_ids, SCORED) for entry in golden[::3]]
        answers: dict[str, list[RequestOutput]] = {"greedy": drive(llm.engine, arrivals)}
        if dtype == "float32":
            capital, _, code, *_ = golden
            options = [(code, SEVERAL), (capital, CHOSEN)]
            answers["sampled"] = drive(
                llm.engine, [Arrival(entry.prompt_token_ids, each) for entry, each in options]
            )
        if snapshot is not None:
            answers["moved"] = [stream.result() for stream in llm.restore(snapshot)]
    with open(target, "wb") as file:
        pickle.dump(answers, file)
