"""Kernels' tests: room for the GPU's interpreter."""

from __future__ import annotations

import os

import pytest
from jax._src.xla_bridge import backends_are_initialized


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """A warpgroup that waits for another one holds a thread of XLA's pool, which has one for each
    core: with two cores all may wait for ever. The pool is made when JAX is first used."""
    if any(item.get_closest_marker("interpreted") for item in items):
        if backends_are_initialized():
            raise pytest.UsageError("a test module made a JAX array while it was imported")
        os.environ["NPROC"] = "8"
