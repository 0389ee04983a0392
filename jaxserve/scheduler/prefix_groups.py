"""Groups the prompts of an offline job so that each shared prefix is computed once.

The idea is from BatchLLM (Zheng et al., MLSys 2026): all prompts are known, so their sharing can be
planned instead of left to a cache, which evicts prefixes that will be needed again. Sharing has
one level: a group of prompts has one prefix, computed once, and each member computes the rest of
its prompt. The problem is which prefixes to *open*, that is, to form groups of: a longer one saves
more per prompt but is computed in full, including the part that it shares with a shorter one. This
planner minimises exactly the prompt tokens computed,

    sum over open prefixes of their length
    + sum over prompts of their length beyond their longest open prefix,

where BatchLLM's heuristic comes close on average only. Only nodes of the compressed trie of the
prompts are worth opening. With `F(v, d)` the cost of the subtree of node `v` of length `D(v)` when
the longest open prefix above it has `d` tokens, and the empty prefix open at no cost,

    F(prompt, d) = D(prompt) - d
    F(v, d) = min(sum of F(child, d),  D(v) + sum of F(child, D(v))).

No table of nodes x depths is needed. As a function of `d`, a prompt's cost is a constant minus
`max(0, d)`, and a sum of such functions is a constant minus `max(p, d)` summed over *hinges* `p`,
one for each prompt that gains from a longer prefix above once that is longer than `p`. The `min`
caps the cost, which raises the lowest hinges. Where the cap binds `v` is open, so one threshold per
node decides: open if and only if the prefix above is shorter. After the cap the distances from the
hinges up to `D(v)` add up to at most `D(v)`, so at most `1 + sqrt(2 D(v))` of them differ: about
prompts x sqrt(depth) steps in total after the sort, and linear memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.core.errors import ConfigError, RequestError
from jaxserve.core.sequence import SharedPrefix

_TOKEN = np.dtype(">u4")


@dataclass(frozen=True)
class PrefixGroup:
    """Prompts to run together.

    `prefix_tokens` is the length of the prefix computed once for all of them, 0 for an ungrouped
    prompt. `members` are indices of prompts, sorted by their tokens, so that neighbours share the
    most and a cache can share more than the group's prefix; equal prompts stay in order.
    """

    prefix_tokens: int
    members: tuple[int, ...]


def plan_prefix_groups(
    prompts: Sequence[Sequence[int]],
    decode_tokens: Sequence[int] | None,
    *,
    min_prefix_tokens: int,
) -> list[PrefixGroup]:
    """Groups the prompts so that the fewest of their tokens are computed, if each group computes
    its prefix once: the optimum of one level of sharing.

    `prompts` are token ids, of any length. No group has a prefix of fewer than `min_prefix_tokens`
    (at least 1). A prefix without gain is not opened.

    Every prompt is in exactly one group. Decode-heavy groups come first, so that there are decodes
    to mix with later prefills: by the sum of `decode_tokens` (the expected output of each prompt;
    None if all are equally long) over the sum of prompt tokens, descending; ties by the index of
    the earliest prompt.

    Raises ConfigError for a `min_prefix_tokens` below 1, and RequestError for a token id outside
    0 .. 2**32 - 1 or a number of decode lengths that is not the number of prompts.
    """
    if min_prefix_tokens < 1:
        raise ConfigError(f"min_prefix_tokens is {min_prefix_tokens}; it must be at least 1")
    if decode_tokens is None:
        decode_tokens = [1] * len(prompts)
    if len(decode_tokens) != len(prompts):
        raise RequestError(
            f"decode_tokens has {len(decode_tokens)} entries for {len(prompts)} prompts;"
            " give one per prompt, or None"
        )

    order, shared = _sort(prompts)
    candidates = [tokens if tokens >= min_prefix_tokens else 0 for tokens in shared]
    groups = [
        PrefixGroup(prefix_tokens, tuple(order[rank] for rank in ranks))
        for prefix_tokens, ranks in _open_prefixes(candidates)
    ]

    def heaviest_decode_first(group: PrefixGroup) -> tuple[float, int]:
        decode = sum(decode_tokens[member] for member in group.members)
        prefill = sum(len(prompts[member]) for member in group.members)
        return -decode / max(1, prefill), min(group.members)

    return sorted(groups, key=heaviest_decode_first)


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


def _sort(prompts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The prompts in token order, and the number of tokens that each shares with the next.

    Prompts with a common prefix are neighbours in this order, so it encodes the whole trie. They
    are packed as big-endian bytes to be compared by `memcmp`.
    """
    keys = []
    for index, prompt in enumerate(prompts):
        try:
            keys.append(np.asarray(prompt, _TOKEN).tobytes())
        except OverflowError as error:
            raise RequestError(
                f"prompt {index} has a token id outside 0 .. 2**32 - 1: {error}"
            ) from error
    order = sorted(range(len(keys)), key=keys.__getitem__)
    ascending = [keys[index] for index in order]
    return order, [_shared_tokens(a, b) for a, b in zip(ascending, [*ascending[1:], b""])]


def _shared_tokens(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix of two packed prompts [tokens]."""
    length = min(len(a), len(b)) // _TOKEN.itemsize
    differs = np.frombuffer(a, _TOKEN, length) != np.frombuffer(b, _TOKEN, length)
    return int(differs.argmax()) if differs.any() else length


@dataclass(slots=True)
class _Node:
    """A node of the trie: the prefix of `tokens` tokens of the prompts ranked `first .. end - 1`.

    `hinges[p]` counts the hinges at `p`. The prefix is to be opened if and only if the longest
    open prefix above it is shorter than `opens_below` tokens.
    """

    tokens: int
    first: int
    end: int = 0
    opens_below: int = 0
    hinges: Counter[int] = field(default_factory=Counter)


def _open_prefixes(shared: Sequence[int]) -> list[tuple[int, list[int]]]:
    """The optimal groups, as prefix tokens and ranks in the sorted order.

    `shared` is, by rank, the prefix shared with the next prompt [tokens], 0 if too short.
    """
    nodes = _trie(shared)
    home = np.full(len(shared), -1)
    # Parents come before children here, so `home` has the longest open prefix above a node.
    for number, node in reversed(list(enumerate(nodes))):
        above = home[node.first]
        if (nodes[above].tokens if above >= 0 else 0) < node.opens_below:
            home[node.first : node.end] = number

    groups: dict[int, tuple[int, list[int]]] = {}
    for rank, number in enumerate(home.tolist()):
        if number < 0:
            groups[~rank] = 0, [rank]
        else:
            groups.setdefault(number, (nodes[number].tokens, []))[1].append(rank)
    return list(groups.values())


def _trie(shared: Sequence[int]) -> list[_Node]:
    """The inner nodes except the root, children before parents, each with its threshold.

    One pass over the sorted prompts, with the path to the current one as a stack.
    """
    finished: list[_Node] = []
    path = [_Node(tokens=0, first=0)]
    for rank, shared_with_next in enumerate(shared):
        if path[-1].tokens < shared_with_next:
            path.append(_Node(shared_with_next, first=rank))
        path[-1].hinges[0] += 1
        while path[-1].tokens > shared_with_next:
            node = path.pop()
            node.end = rank + 1
            if path[-1].tokens < shared_with_next:
                path.append(_Node(shared_with_next, first=node.first))
            node.opens_below = _cap(node.hinges, node.tokens)
            # No prefix above is longer than the parent: hinges from there on are constants.
            for hinge, count in node.hinges.items():
                if hinge < path[-1].tokens:
                    path[-1].hinges[hinge] += count
            node.hinges.clear()
            finished.append(node)
    return finished


def _cap(hinges: Counter[int], tokens: int) -> int:
    """Raises the lowest hinges of a node until opening it, at a cost of `tokens`, has no gain.

    Opening where the prefix above has `d` tokens saves `tokens - max(hinge, d)` for every hinge
    (all are below `tokens`) and costs `tokens`. Returns the least `d` at which it does not pay.
    Depths are integers, so a cap between two of them becomes a hinge on either side.
    """
    excess = sum(count * (tokens - hinge) for hinge, count in hinges.items()) - tokens
    if excess <= 0:
        return 0
    ascending = sorted(hinges)
    raised = 0
    for hinge, higher in zip(ascending, [*ascending[1:], tokens]):
        raised += hinges.pop(hinge)
        if excess <= raised * (higher - hinge):
            break
        excess -= raised * (higher - hinge)
    steps, rest = divmod(excess, raised)
    level = hinge + steps
    hinges[level] += raised - rest
    if not rest:
        return level
    hinges[level + 1] += rest
    return level + 1
