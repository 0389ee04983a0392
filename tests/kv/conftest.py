"""A bench for every test of the KV manager."""

from __future__ import annotations

import contextlib

import pytest
from kv_bench import Bench


@pytest.fixture
def make(tmp_path):
    """Makes a bench whose invariants hold in the end, and which then has lost nothing."""
    with contextlib.ExitStack() as stack:

        def bench(**settings) -> Bench:
            made = stack.enter_context(
                contextlib.closing(Bench(tmp_path, **{"page_size": 4, "num_pages": 17} | settings))
            )
            stack.callback(made.end)
            return made

        yield bench
