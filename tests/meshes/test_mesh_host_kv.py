"""KV on the host on meshes: it has the heads of all devices, each of which merges its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from exhaustive import EXHAUSTIVE
from mesh_engines import load, on_mesh, write_llama
from mesh_workload import GREEDY
from tiny_engines import Arrival, TinyModel, drive

pytestmark = pytest.mark.meshes

POOL = 4


def test_the_host_attends_for_all_devices(tmp_path):
    """Four devices share two KV heads, so each is there twice."""
    on_mesh("TP4", check, write_llama(tmp_path / "model", num_key_value_heads=2))


def check(mesh: str, path: Path) -> None:
    model = TinyModel.open(path)
    for changes in WAYS if EXHAUSTIVE else WAYS[:1]:
        settings = {"kv_on": "host", "debug_kv": True, "program_scope": "layer"} | changes
        with load(model, mesh, pages=1 + POOL, host_pages=2 * 16, **settings) as llm:
            for output in drive(llm.engine, [Arrival(p, GREEDY) for p in model.prompts[-4:]]):
                model.check_greedy(output)
            copies = llm.engine.counters.host_kv_copies
            by_queries = changes.get("host_attention") != "disabled"
            assert (copies.query_bytes > 0, copies.page_bytes > 0) == (by_queries, not by_queries)


WAYS = (
    {"host_attention": "enabled"},
    {"host_attention": "disabled"},
    {"weights_on": "disk"},
    {"kv_compression": "sparf", "sparf_components": 16, "sparf_budget": 128},
)
"""Settings; of SparF those that attend to everything."""
