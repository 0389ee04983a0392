"""`jaxserve plan` on a mesh: what each device holds, and what lies where."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from mesh_engines import degrees, on_mesh, write_llama

from jaxserve.cli.arguments.options import ModelSettings
from jaxserve.cli.plan import Plan
from jaxserve.cli.terminal.text import size
from jaxserve.runtime.startup import engine_plan

pytestmark = pytest.mark.meshes


def test_plan_on_a_mesh(tmp_path):
    on_mesh("TP2 PP2", check_plan, write_llama(tmp_path / "model"))


def check_plan(mesh: str, path: Path) -> None:
    """The table's bytes are the plan's: the same parameters and pages."""
    settings = ModelSettings(model=path, max_num_seqs=1, max_num_batched_tokens=17, **degrees(mesh))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert Plan(settings).run() == 0
    memory = engine_plan.plan_engine(settings).memory
    total = re.search(
        r"each of 4 devices \(.*stage 2 .* tensor 2\): ([\d,]+) bytes", printed.getvalue()
    )
    assert int(total[1].replace(",", "")) == memory.weights_bytes + memory.kv_bytes
    assert re.search(rf"weights +{re.escape(size(memory.weights_bytes))}\n", printed.getvalue())
    assert "4 x cpu" in printed.getvalue()
