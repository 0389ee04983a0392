"""Steps in two halves, compiled for eight H200s: sums beside products."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import jax
import pytest

pytest.importorskip("flax", reason="needs what jaxserve itself needs")
pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-plugin")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import scale

from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.runtime.programs.forward.forward_programs import Forward

pytestmark = pytest.mark.deviceless

LAYERS = 2
MIXED = ProgramKey(scale.ROWS, scale.PREFILL_TOKENS)
_PRODUCT = re.compile(r"^ *(ROOT )?%gemm_fusion|__cublas")


@pytest.fixture
def shapes(monkeypatch):
    """Of two layers of a model of 70B on eight GPUs."""
    raw = scale.MODELS["Llama-3.1-70B"] | {"num_hidden_layers": LAYERS}
    monkeypatch.setitem(scale.MODELS, "two layers", raw)
    return scale.Deployment("two layers", "H200:8", tensor=8, max_model_len=8192).shapes()


def compiled(shapes, key: ProgramKey, **settings) -> jax.stages.Compiled:
    config = dataclasses.replace(shapes.config, **settings)
    spec = Forward(dataclasses.replace(shapes, config=config)).spec(key)
    with jax.sharding.use_abstract_mesh(shapes.mesh.abstract_mesh):
        return spec.lower().compile()


def sums(program: jax.stages.Compiled) -> list[bool]:
    """Of each all-reduce, in their order, whether a product is between its start and its end."""
    text = program.as_text()
    lines = text[text.index("\nENTRY") :].splitlines()
    starts, found = {}, []
    for at, line in enumerate(lines):
        if match := re.search(r"(%[\w.-]+) = .* all-reduce-start\(", line):
            starts[match[1]] = at
        elif match := re.search(r" all-reduce-done\((%[\w.-]+)\)", line):
            between = lines[starts[match[1]] : at]
            found.append(any(map(_PRODUCT.search, between)))
    return found


def test_halves_hide_sums_behind_products(shapes):
    """Of four sums of halves in a layer two. The pool is not copied for the second half."""
    whole = compiled(shapes, MIXED, dual_batch_overlap="off")
    halves = compiled(shapes, MIXED, dual_batch_overlap="auto")
    assert sums(whole) == [False] * (2 * LAYERS + 1)
    assert len(sums(halves)) == 4 * LAYERS + 1
    assert sum(sums(halves)) >= 2 * LAYERS
    pool = shapes.num_pages * scale.page_bytes(shapes)
    assert halves.memory_analysis().temp_size_in_bytes < pool // 2


def test_decodes_stay_whole(shapes):
    """They are bound by weights, which each half would read."""
    program = compiled(shapes, ProgramKey(scale.ROWS, 0), dual_batch_overlap="auto")
    assert len(sums(program)) == 2 * LAYERS + 1
