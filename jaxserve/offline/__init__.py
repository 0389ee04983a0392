"""Offline batch jobs, where all prompts are known in advance. Imports no JAX."""

from __future__ import annotations

from typing import Any

__all__ = ["run_batch"]


def __getattr__(name: str) -> Any:
    """Import `run_batch` lazily: its dependencies are slow to import and unused by LLM."""
    if name != "run_batch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxserve.offline.run import run_batch

    return run_batch
