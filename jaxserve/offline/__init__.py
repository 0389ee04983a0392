"""Offline jobs, where every prompt is known before the first is run. Imports no JAX."""

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
    "saved_tokens",
]
