"""Masks of the tokens after drafts, and drafts that a grammar forces.

A matcher is copied, and the copy consumes the drafts. Where a grammar leaves no choice the next
tokens are known before any step computes them (compressed finite state machines, Zheng et al.,
"SGLang", 2024, section 4): they are drafts that are always right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxserve.structured.bitmask import has_token
from jaxserve.structured.matcher import TokenMatcher, advance


@dataclasses.dataclass(frozen=True)
class Forced:
    """Tokens that must follow the first `num_tokens` of an output, the last of which is `last`."""

    num_tokens: int
    last: int
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """`masks` int32 [words] by node of a step: 0 is the newest token, i + 1 draft i. A node that
    cannot be reached has none. `forced`: what must follow the tokens that the step will add, where
    the grammar decides these too; None if it does not."""

    masks: dict[int, np.ndarray]
    forced: Forced | None


def look_ahead(
    matcher: TokenMatcher, drafts: Sequence[int], parents: Sequence[int], most: int
) -> Lookahead:
    """Looks ahead from the state of `matcher`, which has consumed all tokens up to the newest.

    `drafts` are tokens, negative where there is none, and `parents` the node that each follows. At
    most `most` tokens are forced.
    """
    states: list[TokenMatcher | None] = [matcher]
    for token_id, parent in zip(drafts, parents):
        before = states[parent]
        allowed = before is not None and token_id >= 0 and has_token(before.mask, token_id)
        states.append(_after(before, token_id) if allowed else None)
    masks = {node: state.mask for node, state in enumerate(states) if state is not None}
    return Lookahead(masks, _forced(states, drafts, parents, most))


def _after(matcher: TokenMatcher, token_id: int) -> TokenMatcher | None:
    """The state after one more token; None if that ends the text."""
    following, count = matcher.copy(), matcher.num_tokens
    advance([(following, count, token_id)])
    ended = following.num_tokens == count or following.complete(count + 1)
    return None if ended or following.error(count + 1) else following


def _forced(
    states: Sequence[TokenMatcher | None],
    drafts: Sequence[int],
    parents: Sequence[int],
    most: int,
) -> Forced | None:
    node: int | None = 0
    state: TokenMatcher | None = states[0]
    while node is not None and state is not None:
        first = state.forced(1)
        if not first:
            return None
        last = first[0]
        following = (
            child
            for child, (token_id, parent) in enumerate(zip(drafts, parents), 1)
            if parent == node and token_id == last
        )
        node = next(following, None)
        state = _after(state, last) if node is None else states[node]
    token_ids = () if state is None else state.forced(most)
    return Forced(state.num_tokens, last, token_ids) if token_ids else None
