"""jaxserve: LLM inference in JAX, compiled ahead of time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxserve.core.logs import configure_logging, level_from_environment
from jaxserve.core.version import __version__

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from jaxserve.core.config import EngineConfig
    from jaxserve.core.outputs import CompletionOutput, Delta, Logprob, RequestOutput
    from jaxserve.core.sampling_params import SamplingParams
    from jaxserve.core.structured_outputs import StructuredOutputs
    from jaxserve.llm import LLM
    from jaxserve.models.registry import register_family
    from jaxserve.resume import resumable

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
    "__version__",
    "register_family",
    "resumable",
]

_HOMES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "BeamSearchOutput": "beam_search",
    "BeamSearchParams": "beam_search",
    "BeamSearchSequence": "beam_search",
    "CompletionOutput": "core.outputs",
    "Delta": "core.outputs",
    "EngineConfig": "core.config",
    "Logprob": "core.outputs",
    "RequestOutput": "core.outputs",
    "SamplingParams": "core.sampling_params",
    "StructuredOutputs": "core.structured_outputs",
    "register_family": "models.registry",
    "resumable": "resume",
}


if (_level := level_from_environment()) is not None:
    configure_logging(_level)


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: JAX takes a second that `--help` need not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)
