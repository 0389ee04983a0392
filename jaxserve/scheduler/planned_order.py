"""Execution order of an offline list of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxserve.core.sequence import SharedPrefix
from jaxserve.scheduler.prefix_groups import plan_prefix_groups


def planned_order(
    prompts: Sequence[Sequence[int]], decode_tokens: Sequence[int], page_size: int
) -> Iterator[tuple[int, SharedPrefix | None]]:
    """Yields indices of prompts in execution order, each with the prefix it shares with others.

    Prompts of a group are consecutive, so that their prefix is computed once and pinned until the
    last of them has finished; groups with a high decode-to-prefill ratio come first (BatchLLM,
    Zheng et al. 2025). Prefixes of less than a page are not shared.
    """
    for group in plan_prefix_groups(prompts, decode_tokens, min_prefix_tokens=page_size):
        shared = SharedPrefix(group.prefix_tokens) if group.prefix_tokens else None
        for index in group.members:
            yield index, shared
