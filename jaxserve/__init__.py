"""jaxserve: LLM inference in JAX, compiled ahead of time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxserve.core.process.logs import configure_logging, level_from_environment
from jaxserve.core.version import __version__

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.core.requests.lora import LoRARequest
    from jaxserve.core.requests.outputs import CompletionOutput, Delta, Logprob, RequestOutput
    from jaxserve.core.requests.pooling import PoolingParams
    from jaxserve.core.requests.sampling_params import SamplingParams
    from jaxserve.core.requests.structured_outputs import StructuredOutputs
    from jaxserve.core.settings.config import EngineConfig
    from jaxserve.engine.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from jaxserve.llm import LLM
    from jaxserve.models.loading.live import load_weights
    from jaxserve.models.loading.nnx import from_flax
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
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
    "from_flax",
    "load_weights",
    "register_family",
    "resumable",
]

_HOMES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "BeamSearchOutput": "engine.beam_search",
    "BeamSearchParams": "engine.beam_search",
    "BeamSearchSequence": "engine.beam_search",
    "CompletionOutput": "core.requests.outputs",
    "Delta": "core.requests.outputs",
    "EngineConfig": "core.settings.config",
    "LoRARequest": "core.requests.lora",
    "Logprob": "core.requests.outputs",
    "PoolingParams": "core.requests.pooling",
    "RequestOutput": "core.requests.outputs",
    "SamplingParams": "core.requests.sampling_params",
    "StructuredOutputs": "core.requests.structured_outputs",
    "from_flax": "models.loading.nnx",
    "load_weights": "models.loading.live",
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
