"""jaxserve: LLM inference in JAX, compiled ahead of time."""

from jaxserve.async_engine import AsyncEngine
from jaxserve.config import EngineConfig
from jaxserve.llm import LLM
from jaxserve.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from jaxserve.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "Delta",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]
