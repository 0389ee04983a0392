"""The order in which a list of prompts is best run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxserve.engine.shared_prefix import SharedPrefix
from jaxserve.offline.prefix_groups import plan_prefix_groups


def planned_order(
    prompts: Sequence[Sequence[int]], decode_tokens: Sequence[int], page_size: int
) -> Iterator[tuple[int, SharedPrefix | None]]:
    """Indices of prompts in the order to run them, each with the prefix it shares with others.

    Prompts of a group follow one another, so that their prefix is computed once and held until the
    last of them has ended; groups that decode much for what they prefill come first (BatchLLM,
    Zheng et al. 2025). A prefix of less than a page is not worth planning for.
    """
    for group in plan_prefix_groups(prompts, decode_tokens, min_prefix_tokens=page_size):
        shared = SharedPrefix(group.prefix_tokens) if group.prefix_tokens else None
        for index in group.members:
            yield index, shared
