"""Streamed weights on meshes: every device reads its own shards, for one step or several."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from exhaustive import EXHAUSTIVE
from mesh_engines import load, on_mesh, write_llama
from mesh_workload import GREEDY
from tiny_engines import Arrival, TinyModel, drive

pytestmark = pytest.mark.meshes


def test_a_mesh_streams_its_shards(tmp_path):
    path = write_llama(tmp_path / "model", num_hidden_layers=4)
    on_mesh("TP2 CP2", check, path)


def check(mesh: str, path: Path) -> None:
    model = TinyModel.open(path)
    resident = sum(array.nbytes for array in jax.tree.leaves(model.params["layers"][0]))
    for tier, steps in (("disk", 1), ("host", 2)) if EXHAUSTIVE else (("disk", 2),):
        shared = {"steps_per_weight_read": steps, "program_scope": "layer"}
        with load(model, mesh, weights_on=tier, **shared) as llm:
            placement = llm.plan().shapes.placement
            # A quarter of the window is not: norms are whole, and `seq` ranks have all weights.
            assert placement.window_bytes < 1.1 * resident
            for output in drive(llm.engine, [Arrival(p, GREEDY) for p in model.prompts[::3]]):
                model.check_greedy(output)
            assert llm.engine.counters.weight_reads.num_bytes > 0
