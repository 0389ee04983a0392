"""Quantized KV on meshes: split over heads, stages and the tokens of a page, scales included."""

from __future__ import annotations

from pathlib import Path

import pytest
from exhaustive import exhaustive
from mesh_engines import load, on_mesh
from mesh_workload import GREEDY, greedy
from tiny_engines import Arrival, TinyModel, drive

pytestmark = pytest.mark.meshes

PAGES = 40
STEPS = 5
LONG = 3
"""The last prompts, of several pages."""


@exhaustive
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_mesh_answers_as_the_oracle(answered, kind):
    """On eight devices; int8 is on the meshes below."""
    on_mesh("TP4 PP2", check_greedy, answered, kind)


def check_greedy(mesh: str, answered: Path, kind: str) -> None:
    model = TinyModel.open(answered / "model").with_kv(kind)
    with load(model, mesh) as llm:
        for output in drive(llm.engine, greedy(model)):
            model.check_greedy(output)


def test_scales_go_around_a_ring_and_into_a_snapshot_for_another_mesh(answered, tmp_path):
    """A page is 8 tokens of one device, then 16 of two stages: its bytes are laid out anew."""
    on_mesh("TP2 CP2", begin, answered, tmp_path)
    on_mesh("PP2", end, answered, tmp_path, page_size=16)


def begin(mesh: str, answered: Path, target: Path) -> None:
    model = TinyModel.open(answered / "model").with_kv("int8")
    chunks = {"max_num_batched_tokens": 2 + 32, "program_scope": "layer"}
    with load(model, mesh, pages=PAGES, **chunks) as llm:
        runner, ring = llm.engine._runner, []
        forward = runner._forward

        def counted(key):
            ring.append(key.ring)
            return forward(key)

        runner._forward = counted
        for output in drive(llm.engine, [Arrival(prompt, GREEDY) for prompt in model.prompts]):
            model.check_greedy(output)
        assert any(ring) and not all(ring)
        for index in range(-LONG, 0):
            llm.engine.add(f"prompt {index}", model.prompts[index], GREEDY)
        for _ in range(STEPS):
            llm.engine.step()
        llm.snapshot(target)


def end(mesh: str, answered: Path, source: Path, **settings: object) -> None:
    model = TinyModel.open(answered / "model").with_kv("int8")
    with load(model, mesh, pages=PAGES, **settings) as llm:
        outputs = [stream.result() for stream in llm.restore(source)]
        assert len(outputs) == LONG
        assert sum(output.metrics.cached_tokens for output in outputs) > 0
        for output in outputs:
            model.check_greedy(output)
