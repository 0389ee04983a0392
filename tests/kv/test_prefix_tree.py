"""The prefix tree against brute force, and what its hash chain promises."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.kv.page_table import PageTable
from jaxserve.kv.prefix_cache import prefix_tree
from jaxserve.kv.prefix_cache.node import Node, NodeState
from jaxserve.kv.prefix_cache.prefix_tree import PrefixTree, chain_key, pack_tokens, salt_key
from jaxserve.kv.tier import Tier

PAGE_SIZE = 4


@pytest.fixture
def tree():
    return PrefixTree(PAGE_SIZE)


def add(tree: PrefixTree, parent: Node, *token_ids: int) -> Node:
    """A child that has KV."""
    node = tree.add(parent, pack_tokens(list(token_ids)))
    node.lower[Tier.HOST] = 0
    return node


def find(tree: PrefixTree, parent: Node, *token_ids: int) -> Node | None:
    tokens = pack_tokens(list(token_ids))
    return tree.full(parent, tokens, chain_key(parent.key, tokens))


def lose(tree: PrefixTree, node: Node) -> None:
    node.lower.clear()
    tree.prune(node)


# Keys


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.integers(0, 2**32 - 1)))
def test_packed_tokens_compare_as_their_ids_do(a, b):
    assert (pack_tokens(a) < pack_tokens(b)) == (a < b)


def test_a_key_names_the_salt_and_all_tokens_before():
    pages = [pack_tokens([1, 2, 3, 4]), pack_tokens([5, 6, 7, 8])]
    keys = set()
    for salt in (b"", b"a", b"b"):
        for order in (pages, pages[::-1], pages[:1] * 2):
            key = salt_key(salt)
            for tokens in order:
                key = chain_key(key, tokens)
                keys.add(key)
    assert all(len(key) == 16 for key in keys)
    assert len(keys) == 3 * (2 + 2 + 1)  # The first pages of two of the orders are the same.


def test_a_table_names_its_pages_as_the_tree_does(tree):
    token_ids = list(range(20))
    table = PageTable(lambda start, stop: token_ids[start:stop], b"salt")
    parent = tree.root(b"salt")
    for index in range(4):
        start = index * PAGE_SIZE
        parent = add(tree, parent, *token_ids[start : start + PAGE_SIZE])
        assert table.key(index, PAGE_SIZE) == parent.key
    assert table.key(1, PAGE_SIZE) == parent.parent.parent.key
    assert table.tokens(3, 6) == pack_tokens([3, 4, 5])


# What is found


def test_full_pages_are_found_after_their_prefix_only(tree):
    root = tree.root(b"")
    first = add(tree, root, 1, 2, 3, 4)
    second = add(tree, first, 5, 6, 7, 8)
    assert find(tree, root, 1, 2, 3, 4) is first
    assert find(tree, first, 5, 6, 7, 8) is second
    assert find(tree, root, 5, 6, 7, 8) is None
    assert find(tree, second, 5, 6, 7, 8) is None
    assert find(tree, root, 1, 2, 3, 5) is None
    assert len(tree) == 2 and list(tree) == [first, second]


def test_salts_never_meet(tree):
    tokens = (1, 2, 3, 4)
    ours, theirs = tree.root(b"ours"), tree.root(b"theirs")
    node = add(tree, ours, *tokens)
    assert tree.root(b"ours") is ours
    assert find(tree, theirs, *tokens) is None
    assert tree.closest(theirs, pack_tokens([1, 2])) == (None, 0)
    other = add(tree, theirs, *tokens)
    assert other.key != node.key
    assert find(tree, ours, *tokens) is node and find(tree, theirs, *tokens) is other


def test_part_of_a_page_is_no_full_page_until_it_has_grown(tree):
    root = tree.root(b"")
    node = add(tree, root, 1, 2)
    assert find(tree, root, 1, 2) is None
    assert tree.closest(root, pack_tokens([1, 2, 3, 4])) == (node, 2)
    tree.grow(node, pack_tokens([1, 2, 3]))
    assert tree.closest(root, pack_tokens([1, 2, 3, 4])) == (node, 3)
    tree.grow(node, pack_tokens([1, 2, 3, 4]))
    assert find(tree, root, 1, 2, 3, 4) is node and node.num_tokens == 4
    child = add(tree, node, 5)
    assert tree.closest(node, pack_tokens([5])) == (child, 1)
    assert len(tree) == 2


def test_a_full_page_is_found_for_its_beginning_too(tree):
    root = tree.root(b"")
    node = add(tree, root, 1, 2, 3, 4)
    assert tree.closest(root, pack_tokens([1, 2, 9])) == (node, 2)
    assert tree.closest(root, pack_tokens([2])) == (None, 0)
    assert tree.closest(root, b"") == (None, 0)


small_pages = st.lists(st.integers(0, 2), min_size=1, max_size=PAGE_SIZE)


@given(st.lists(small_pages, unique_by=tuple), st.lists(st.integers(0, 2), max_size=PAGE_SIZE))
def test_closest_is_as_close_as_any_sibling(siblings, wanted):
    tree = PrefixTree(PAGE_SIZE)
    root = tree.root(b"")
    for token_ids in siblings:
        add(tree, root, *token_ids)

    def num_common(token_ids: list[int]) -> int:
        same = [a == b for a, b in zip(token_ids, wanted)]
        return [*same, False].index(False)

    node, common = tree.closest(root, pack_tokens(wanted))
    assert common == max(map(num_common, siblings), default=0)
    assert (node is None) == (common == 0)
    if node is not None:
        found = [token_ids for token_ids in siblings if pack_tokens(token_ids) == node.tokens]
        assert num_common(*found) == common


# What is given up


def test_a_node_is_taken_out_when_it_has_no_kv_and_no_descendant(tree):
    root = tree.root(b"")
    first = add(tree, root, 1, 2, 3, 4)
    second = add(tree, first, 5, 6, 7, 8)
    third = add(tree, second, 9)
    other = add(tree, first, 5, 6)
    lose(tree, second)  # Its child still has KV.
    assert second.attached and len(tree) == 4
    lose(tree, third)
    assert not third.attached and not second.attached
    assert list(tree) == [first, other]
    assert find(tree, first, 5, 6, 7, 8) is None
    lose(tree, first)
    assert first.attached
    lose(tree, other)
    assert not first.attached and len(tree) == 0
    assert tree.root(b"") is not root  # Of a salt without nodes nothing is remembered.


@pytest.mark.parametrize("place", [Tier.HOST, Tier.DISK, *list(NodeState)[1:]])
def test_a_node_with_kv_anywhere_or_on_its_way_stays(tree, place):
    node = tree.add(tree.root(b""), pack_tokens([1]))
    if isinstance(place, Tier):
        node.lower[place] = 0
    else:
        node.state = place
    tree.prune(node)
    assert node.attached and list(tree) == [node]


def test_clear_detaches_all(tree):
    root = tree.root(b"")
    first = add(tree, root, 1, 2, 3, 4)
    second = add(tree, first, 5, 6)
    third = add(tree, tree.root(b"other"), 1)
    assert set(tree.clear()) == {first, second, third}
    assert not any(node.attached for node in (first, second, third))
    assert len(tree) == 0 and tree.root(b"") is not root
    assert find(tree, tree.root(b""), 1, 2, 3, 4) is None
    lose(tree, second)  # Does nothing, and harms no newcomer.
    again = add(tree, tree.root(b""), 1, 2, 3, 4)
    lose(tree, first)
    assert find(tree, tree.root(b""), 1, 2, 3, 4) is again


def test_pages_whose_keys_collide_are_told_apart(tree, monkeypatch):
    """Not that anyone will see it happen: then a page is computed again, and never mixed up."""
    monkeypatch.setattr(prefix_tree, "chain_key", lambda parent_key, tokens: bytes(16))
    root = tree.root(b"")
    one, two = add(tree, root, 1, 2, 3, 4), add(tree, root, 5, 6, 7, 8)
    assert tree.full(root, two.tokens, two.key) is two
    assert tree.full(root, one.tokens, two.key) in (None, one)
    below = add(tree, one, 5, 6, 7, 8)
    assert tree.full(one, below.tokens, below.key) is below
    assert tree.full(root, two.tokens, two.key) in (None, two)
    for node in (below, two, one):
        lose(tree, node)
    assert len(tree) == 0


class TreeMachine(RuleBasedStateMachine):
    """A tree of two salts against a dictionary of all prefixes that have KV."""

    @initialize()
    def start(self) -> None:
        self.tree = PrefixTree(2)
        self.nodes: dict[tuple[bytes, tuple[int, ...]], Node] = {}

    def path_of(self, salt: bytes, token_ids: list[int]) -> tuple[Node, tuple[int, ...], list[int]]:
        """The last known full page of a prefix, its tokens, and those that follow in one page."""
        parent, done = self.tree.root(salt), 0
        while len(token_ids) - done >= 2:
            node = find(self.tree, parent, *token_ids[done : done + 2])
            if node is None:
                break
            parent, done = node, done + 2
        return parent, tuple(token_ids[:done]), token_ids[done : done + 2]

    @rule(
        salt=st.sampled_from([b"a", b"b"]),
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=6),
    )
    def add(self, salt: bytes, token_ids: list[int]) -> None:
        parent, before, page = self.path_of(salt, token_ids)
        if not page:
            return
        closest, common = self.tree.closest(parent, pack_tokens(page))
        key = (salt, (*before, *page))
        if common == len(page):
            assert any(known[: len(key[1])] == key[1] for known in self.known(salt))
        elif closest is not None and closest.num_tokens == common and not closest.children:
            old = next(key for key, node in self.nodes.items() if node is closest)
            del self.nodes[old]
            self.tree.grow(closest, pack_tokens(page))
            self.nodes[key] = closest
        else:
            assert key not in self.nodes
            node = self.nodes[key] = self.tree.add(parent, pack_tokens(page))
            node.lower[Tier.HOST] = 0

    def known(self, salt: bytes) -> list[tuple[int, ...]]:
        return [token_ids for known_salt, token_ids in self.nodes if known_salt == salt]

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A node loses its KV; it is forgotten once those after it are."""
        salt, token_ids = data.draw(st.sampled_from(sorted(self.nodes)))
        lose(self.tree, self.nodes[salt, token_ids])
        self.nodes = {key: node for key, node in self.nodes.items() if node.attached}

    @rule()
    def clear(self) -> None:
        assert set(self.tree.clear()) == set(self.nodes.values())
        self.nodes.clear()

    @invariant()
    def knows_what_it_should(self) -> None:
        assert set(self.tree) == set(self.nodes.values())
        assert len(self.tree) == len(self.nodes)
        for (salt, token_ids), node in self.nodes.items():
            parent, before, page = self.path_of(salt, list(token_ids))
            if len(token_ids) % 2:
                assert parent is node.parent and page == [token_ids[-1]]
                assert self.tree.closest(parent, pack_tokens(page))[1] == 1
            else:
                assert parent is node and before == token_ids
            # A node stays for KV of its own or for the sake of those after it.
            assert node.lower or node.children


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
