"""The engine's own decode step at full size, compiled for many target devices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from exhaustive import combination

pytest.importorskip("flax", reason="needs what jaxserve itself needs")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import scale

from jaxserve.core.steps.buckets import ProgramKey

pytestmark = pytest.mark.deviceless

LAYERS = 32


@pytest.mark.parametrize(
    ("devices", "plugin", "sums"),
    [
        # A layer's two, and two more to merge what ranks of `seq` found.
        ("v5e:4x4", "libtpu", 4 * LAYERS + 2),
        combination("H200:8", "jax_plugins.xla_cuda13", 2 * LAYERS + 1),
    ],
)
def test_llama_8b_decodes_on_a_mesh(devices, plugin, sums):
    """It fits, its pool is not copied, and nothing but sums is said: no weight is gathered."""
    pytest.importorskip(plugin)
    (deployment,) = (
        one for one in scale.DEPLOYMENTS if (one.model, one.devices) == ("Llama-3.1-8B", devices)
    )
    shapes = deployment.shapes()
    compiled = scale.Compiled.of(shapes, ProgramKey(scale.ROWS, 0))
    pool = shapes.num_pages * scale.page_bytes(shapes)
    assert compiled.collectives == {"all-reduce": sums}
    assert compiled.argument_bytes + compiled.scratch_bytes <= deployment.budget_bytes
    assert compiled.scratch_bytes < pool // 20
