"""Prefix groups: optimal by brute force, never below the published greedy, and quick."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, combinations, pairwise

import pytest
from group_costs import computed_tokens, saved_tokens
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import ConfigError, RequestError
from jaxserve.scheduler.prefix_groups import (
    PrefixGroup,
    plan_prefix_groups,
)

Prompt = tuple[int, ...]


@st.composite
def prompt_lists(draw: st.DrawFn, max_prompts: int, max_run: int) -> list[Prompt]:
    """Prompts that branch often: short words over two letters, letter `k` stretched to a run."""
    words = draw(
        st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=0, max_size=max_prompts)
    )
    runs = draw(st.lists(st.integers(1, max_run), min_size=5, max_size=5))
    return [
        tuple(chain.from_iterable([letter] * run for letter, run in zip(word, runs)))
        for word in words
    ]


def cost(prompts: Sequence[Prompt], opened: Sequence[Prompt]) -> int:
    """What is minimised: the opened prefixes, and each prompt beyond the longest it begins with."""
    beyond = [
        len(prompt) - max((len(p) for p in opened if prompt[: len(p)] == p), default=0)
        for prompt in prompts
    ]
    return sum(map(len, opened)) + sum(beyond)


def brute_force(prompts: Sequence[Prompt], candidates: Sequence[Prompt]) -> int:
    sizes = range(len(candidates) + 1)
    choices = chain.from_iterable(combinations(candidates, size) for size in sizes)
    return min(cost(prompts, opened) for opened in choices)


def branching(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The inner nodes of the compressed trie, prefixes before what they are prefixes of."""

    def common(a: Prompt, b: Prompt) -> Prompt:
        return max((a[:end] for end in range(len(a) + 1) if a[:end] == b[:end]), key=len)

    return sorted({common(a, b) for a, b in pairwise(sorted(prompts))} - {()})


@dataclass
class Node:
    """A node of the compressed trie with the tokens on its edge; without children a prompt."""

    edge: int
    children: list[Node] = field(default_factory=list)

    @property
    def width(self) -> int:
        return sum(child.width for child in self.children) if self.children else 1


def trie(prompts: Sequence[Prompt], min_prefix_tokens: int = 1) -> Node:
    """The trie whose inner nodes have at least `min_prefix_tokens`."""
    nodes = {(): Node(0)}

    def hang(prefix: Prompt, node: Node) -> None:
        above = max((p for p in nodes if prefix[: len(p)] == p), key=len)
        node.edge = len(prefix) - len(above)
        nodes[above].children.append(node)

    for prefix in branching(prompts):
        if len(prefix) >= min_prefix_tokens:
            node = Node(0)
            hang(prefix, node)
            nodes[prefix] = node
    for prompt in prompts:
        hang(prompt, Node(0))
    return nodes[()]


def table_optimum(node: Node, depth: int, above: int) -> int:
    """The textbook recursion, which tries every prefix above every node."""
    if not node.children:
        return depth - above

    def children(above: int) -> int:
        return sum(table_optimum(c, depth + c.edge, above) for c in node.children)

    return children(above) if depth == 0 else min(children(above), depth + children(depth))


def greedy_saved(prompts: Sequence[Prompt], min_prefix_tokens: int) -> int:
    """Prompt tokens saved by BatchLLM's own heuristic, first-level enlargement."""

    def enlarge(root: Node) -> None:
        for child in [c for c in root.children if c.children]:
            enlarge(child)
            for grandchild in [g for g in child.children if g.children]:
                if (grandchild.width - 1) * grandchild.edge > child.edge:
                    grandchild.edge += child.edge
                    child.children.remove(grandchild)
                    root.children.append(grandchild)
            if len(child.children) <= 1:
                root.children.remove(child)
                for only in child.children:
                    only.edge += child.edge
                    root.children.append(only)

    root = trie(prompts)
    enlarge(root)
    groups = [c for c in root.children if c.children and c.edge >= min_prefix_tokens]
    return sum((group.width - 1) * group.edge for group in groups)


def check_plan(
    prompts: Sequence[Sequence[int]], groups: Sequence[PrefixGroup], min_prefix_tokens: int = 1
) -> None:
    """Every prompt is in one group, and every group has the prefix it claims."""
    assert sorted(chain.from_iterable(g.members for g in groups)) == list(range(len(prompts)))
    for group in groups:
        assert (len(group.members) == 1) == (group.prefix_tokens == 0)
        assert group.prefix_tokens == 0 or group.prefix_tokens >= min_prefix_tokens
        members = [prompts[member] for member in group.members]
        prefix = members[0][: group.prefix_tokens]
        assert len(prefix) == group.prefix_tokens
        assert all(member[: group.prefix_tokens] == prefix for member in members)
        assert group.members == tuple(sorted(group.members, key=lambda m: (prompts[m], m)))


def plan(prompts: Sequence[Sequence[int]], min_prefix_tokens: int = 1) -> list[PrefixGroup]:
    groups = plan_prefix_groups(prompts, None, min_prefix_tokens=min_prefix_tokens)
    check_plan(prompts, groups, min_prefix_tokens)
    return groups


@settings(max_examples=300, deadline=None)
@given(prompt_lists(max_prompts=9, max_run=9), st.integers(1, 12))
def test_no_choice_of_branching_prefixes_computes_less(prompts, min_prefix_tokens):
    candidates = [p for p in branching(prompts) if len(p) >= min_prefix_tokens]
    groups = plan(prompts, min_prefix_tokens)
    assert computed_tokens(prompts, groups) == brute_force(prompts, candidates)


@settings(max_examples=100, deadline=None)
@given(prompt_lists(max_prompts=6, max_run=3))
def test_no_choice_of_any_prefixes_computes_less(prompts):
    """Not even with prefixes that end on an edge of the trie."""
    ends = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    shared = sorted(p for p in ends if sum(prompt[: len(p)] == p for prompt in prompts) > 1)
    assume(len(shared) <= 10)
    assert computed_tokens(prompts, plan(prompts)) == brute_force(prompts, shared)


@settings(max_examples=200, deadline=None)
@given(prompt_lists(max_prompts=40, max_run=60), st.integers(1, 70))
def test_larger_tries_against_the_table_and_the_greedy(prompts, min_prefix_tokens):
    groups = plan(prompts, min_prefix_tokens)
    best = table_optimum(trie(prompts, min_prefix_tokens), 0, 0)
    assert computed_tokens(prompts, groups) == best
    assert computed_tokens(prompts, groups) + saved_tokens(groups) == sum(map(len, prompts))
    assert saved_tokens(groups) >= greedy_saved(prompts, min_prefix_tokens)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.data())
def test_a_chain_of_nested_prefixes_against_the_table(steps, data):
    """Prompts that leave one long text at several points, some of them a prefix of all others."""
    prompts = []
    for length in accumulate(steps):
        for tail in range(data.draw(st.integers(1, 4))):
            prompts.append((0,) * length + (1 + tail,) * data.draw(st.integers(0, 3)))
    assert computed_tokens(prompts, plan(prompts)) == table_optimum(trie(prompts), 0, 0)


def test_greedy_is_short_of_the_optimum_at_times():
    """Else the comparison above would prove little."""
    rng = random.Random(0)
    shortfalls = []
    for _ in range(100):
        prompts: list[Prompt] = [()]
        for _ in range(30):
            source = rng.choice(prompts)
            kept = source[: rng.randrange(len(source) + 1)]
            prompts.append(kept + tuple(rng.choices(range(3), k=rng.randrange(20))))
        saved = saved_tokens(plan(prompts))
        shortfalls.append(1 - greedy_saved(prompts, 1) / saved)
    assert min(shortfalls) >= 0
    assert max(shortfalls) > 0.02


def test_nothing_to_share():
    assert plan([]) == []
    assert plan([[5, 6, 7]]) == [PrefixGroup(0, (0,))]
    assert plan([[]]) == [PrefixGroup(0, (0,))]
    assert plan([[1, 2], [2, 1], []]) == [
        PrefixGroup(0, (2,)),
        PrefixGroup(0, (0,)),
        PrefixGroup(0, (1,)),
    ]


def test_equal_prompts_share_all_and_keep_their_order():
    prompts = [[4, 4], [9, 8, 7], [4, 4], [4, 4]]
    groups = plan(prompts)
    assert PrefixGroup(2, (0, 2, 3)) in groups
    assert computed_tokens(prompts, groups) == 5


def test_a_prompt_that_is_the_prefix_of_others_leads_its_group():
    assert plan([[1, 2, 3, 5], [1, 2, 3], [1, 2, 3, 4]]) == [PrefixGroup(3, (1, 2, 0))]


def test_a_longer_prefix_is_split_off_only_where_it_pays():
    """Opening the 4 + n tokens of the last two costs 4 tokens again and saves n."""
    stem = [0, 0, 0, 0]

    def prompts(longer: int) -> list[list[int]]:
        deep = [*stem, *[1] * longer]
        return [[*stem, 2], [*stem, 3], [*deep, 2], [*deep, 3]]

    assert [g.prefix_tokens for g in plan(prompts(4))] == [4]
    assert [g.prefix_tokens for g in plan(prompts(5))] == [4, 9]


def test_a_prefix_that_gains_nothing_is_not_opened():
    """Twice 6 tokens shared by two, or once 4 tokens shared by four: 16 computed either way."""
    prompts = [[0, 0, 0, 0, a, a, b] for a in (1, 2) for b in (1, 2)]
    assert plan(prompts) == [PrefixGroup(6, (0, 1)), PrefixGroup(6, (2, 3))]
    assert computed_tokens(prompts, plan(prompts)) == 16


def test_prefixes_too_short_are_not_shared_and_too_small_a_minimum_is_refused():
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert plan(prompts, 3) == [PrefixGroup(3, (0, 1))]
    assert plan(prompts, 4) == [PrefixGroup(0, (0,)), PrefixGroup(0, (1,))]
    with pytest.raises(ConfigError, match="min_prefix_tokens is 0"):
        plan_prefix_groups(prompts, None, min_prefix_tokens=0)


def test_decode_heavy_groups_come_first_and_ties_by_the_earliest_prompt():
    prompts = [[1, 1, 1, 1], [2, 2], [3, 3, 4], [2, 3], [4, 4], [3, 3, 3]]
    groups = plan_prefix_groups(prompts, [4, 2, 9, 2, 4, 3], min_prefix_tokens=2)
    check_plan(prompts, groups)
    # Output over prompt tokens: 12/6, 4/2, 4/4, 2/2, 2/2.
    assert [g.members for g in groups] == [(5, 2), (4,), (0,), (1,), (3,)]


def test_without_decode_lengths_all_count_as_equally_long():
    prompts = [[1] * 9, [2] * 3, [3] * 6]
    unknown = plan_prefix_groups(prompts, None, min_prefix_tokens=1)
    assert [g.members for g in unknown] == [(1,), (2,), (0,)]
    assert unknown == plan_prefix_groups(prompts, [7, 7, 7], min_prefix_tokens=1)


def test_malformed_input_is_refused_by_name():
    with pytest.raises(RequestError, match="decode_tokens has 1 entries for 2 prompts"):
        plan_prefix_groups([[1], [2]], [3], min_prefix_tokens=1)
    for token in (-1, 2**32):
        with pytest.raises(RequestError, match=f"prompt 1 has a token id outside .* {token} "):
            plan_prefix_groups([[1], [2, token]], None, min_prefix_tokens=1)


def test_token_ids_are_told_apart_by_all_their_bytes():
    prompts = [[7, token] for token in (1, 1 << 8, 1 << 16, 1 << 24, 2**32 - 1)]
    assert saved_tokens(plan(prompts, 2)) == 0
    assert PrefixGroup(2, (2, 5)) in plan([*prompts, [7, 1 << 16]], 2)


def test_thousands_of_nested_prompts_need_no_recursion():
    text = list(range(3000))
    groups = plan([text[:length] for length in range(1, 3001)])
    # Each opened prefix serves those who are a little longer, so there are far fewer of them.
    assert 10 < len(groups) < 300


def test_two_thousand_long_prompts_that_branch_anywhere():
    rng = random.Random(7)
    prompts: list[list[int]] = [[]]
    for _ in range(2000):
        source = rng.choice(prompts)
        kept = rng.randrange(len(source) + 1)
        prompts.append(source[:kept] + rng.choices(range(50_000), k=500 - kept))
    groups = plan(prompts, 16)
    assert saved_tokens(groups) > 0.3 * sum(map(len, prompts))
    assert groups == plan(prompts, 16)
