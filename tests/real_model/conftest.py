"""SmolLM2 for the oracle, and engines of it that share their programs."""

from __future__ import annotations

import pytest
from real_engines import load_alone
from tiny_engines import TinyModel, assert_idle


@pytest.fixture(scope="session")
def smollm2(smollm2_path) -> TinyModel:
    """The model with its parameters in float32."""
    return TinyModel.open(smollm2_path)


@pytest.fixture(scope="session")
def session_llm(smollm2_path):
    with load_alone(smollm2_path) as llm:
        yield llm


@pytest.fixture
def llm(session_llm):
    """An engine of one device with nothing in its prefix cache; the test must leave it idle."""
    session_llm.reset_prefix_cache()
    yield session_llm
    assert_idle(session_llm.engine)
