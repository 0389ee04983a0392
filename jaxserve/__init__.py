"""jaxserve: LLM inference in JAX, compiled ahead of time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from jaxserve.config import EngineConfig
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, Delta, Logprob, RequestOutput
    from jaxserve.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Delta",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "register_family",
    "resumable",
]

_HOMES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "BeamSearchOutput": "beam_search",
    "BeamSearchParams": "beam_search",
    "BeamSearchSequence": "beam_search",
    "CompletionOutput": "outputs",
    "Delta": "outputs",
    "EngineConfig": "config",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutputs": "structured.params",
    "register_family": "models.registry",
    "resumable": "resume",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: JAX takes a second that `--help` need not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
