"""Offline jobs, where every prompt is known before the first is run. Imports no JAX."""

from __future__ import annotations

from typing import Any

from jaxserve.offline.planned_order import planned_order
from jaxserve.offline.prefix_groups import (
    PrefixGroup,
    computed_tokens,
    plan_prefix_groups,
    saved_tokens,
)

__all__ = [
    "PrefixGroup",
    "computed_tokens",
    "plan_prefix_groups",
    "planned_order",
    "run_batch",
    "saved_tokens",
]


def __getattr__(name: str) -> Any:
    """`run_batch` is imported when first used: what it needs takes a while that LLM need not."""
    if name != "run_batch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxserve.offline.run import run_batch

    return run_batch
