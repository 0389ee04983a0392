"""Two replicas in this process behind a router; and what the tests of Ray have of others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "batch"))
sys.path.insert(0, str(Path(__file__).parents[1] / "simulator"))
sys.path.insert(0, str(Path(__file__).parent))

from mortal import Mortal

from jaxserve.cluster.router import Router
from jaxserve.core.settings.config import EngineConfig


@pytest.fixture(scope="module")
def cluster(llama):
    replicas = [Mortal(), Mortal()]
    router = Router(
        lambda: replicas, EngineConfig.of(model=llama.path, fair_share=True, **llama.settings())
    )
    yield router, replicas
    router.close()
    router.close()
    assert not router.stuck and router.failure is None and router.ended.done()
