"""What groups of prompts compute, if each computes its prefix once."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.scheduler.prefix_groups import PrefixGroup


def computed_tokens(prompts: Sequence[Sequence[int]], groups: Sequence[PrefixGroup]) -> int:
    """Prompt tokens that are computed."""
    return sum(
        group.prefix_tokens + sum(len(prompts[i]) - group.prefix_tokens for i in group.members)
        for group in groups
    )


def saved_tokens(groups: Sequence[PrefixGroup]) -> int:
    """Prompt tokens that are not, because another member of the group computes them."""
    return sum(group.prefix_tokens * (len(group.members) - 1) for group in groups)
