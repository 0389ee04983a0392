"""Kernels' tests: room for the GPU's interpreter."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """A warpgroup that waits for another one holds a thread of XLA's pool, which has one for each
    core: with two cores all may wait for ever. The pool is made when JAX is first used."""
    if any(item.get_closest_marker("interpreted") for item in items):
        os.environ["NPROC"] = "8"
