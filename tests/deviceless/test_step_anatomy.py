"""The engine's own decode step compiled for an H200: kernels, copies, loops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from exhaustive import combination

pytest.importorskip("flax", reason="needs what jaxserve itself needs")
pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-plugin")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from step_anatomy import Anatomy

pytestmark = pytest.mark.deviceless


@pytest.mark.parametrize(("batch", "kernels"), [combination(1, 12), (64, 12)])
def test_a_decode_step_of_llama_8b(batch, kernels):
    """docs/roofline.md has these counts."""
    found = Anatomy.of(batch)
    assert found.layer_kernels == kernels
    assert found.general_kernels < 150
    assert (found.pool_copies, found.transposes, found.loops) == (0, 0, 0)
    assert found.uploads == 2, "the step's vector, and the slots that sample"
    assert found.moved_bytes <= 1.1 * found.floor_bytes
