"""The states of a node: what may follow what, what follows from it, and who may change it."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

import jaxserve
from jaxserve.kv.pages import PageError, PagePool
from jaxserve.kv.prefix_cache.node import IN_TRANSFER, ON_DEVICE, TRANSITIONS, Node, NodeState
from jaxserve.kv.prefix_cache.node_states import NodeStates
from jaxserve.kv.prefix_cache.prefix_tree import PrefixTree, pack_tokens
from jaxserve.kv.tier import Tier

OWNERS = {
    "node.py": set(Node.__slots__),
    "node_states.py": {"state", "device", "lower", "pins", "spilling", "keep"},
    "prefix_tree.py": {"tokens", "key", "attached"},
}
"""The files of kv/ that may assign to a node, and to which of its fields."""


class Nodes:
    """A pool, a tree and their owner, and nodes brought to any state."""

    def __init__(self, *, prefix_caching: bool = True) -> None:
        self.pool, self.tree = PagePool(4, 4), PrefixTree(4)
        self.states = NodeStates(self.pool, self.tree, {Tier.HOST: 2}, prefix_caching)

    def node(self, state: NodeState) -> Node:
        node = self.tree.add(self.tree.root(b""), pack_tokens([1, 2, 3, 4]))
        if state in ON_DEVICE or state is NodeState.SAVING:
            (page,) = self.pool.allocate(1)
            self.states.transition(node, NodeState.IN_USE, page)
            if state is not NodeState.IN_USE:
                self.states.release(page, node)
            if state is NodeState.SAVING:
                self.states.transition(node, state)
        else:
            self.store(node)
        if state in IN_TRANSFER - {NodeState.SAVING}:
            self.states.transition(node, NodeState.FETCHING)
        if state is NodeState.ABANDONED:
            self.states.transition(node, state)
        assert node.state is state
        self.states.take_freed()
        return node

    def store(self, node: Node) -> None:
        self.states.store(node, Tier.HOST, self.states.tier_pools[Tier.HOST].allocate())
        self.states.pin(node, 0)


@pytest.mark.parametrize("before, after", list(itertools.product(NodeState, NodeState)))
def test_only_the_transitions_of_the_table_are_made(before, after):
    nodes = Nodes()
    node = nodes.node(before)
    if after not in TRANSITIONS[before]:
        with pytest.raises(PageError, match=f"from {before.name} to {after.name}"):
            nodes.states.transition(node, after)
        assert node.state is before
    else:
        page = node.device
        if after is NodeState.IN_USE and page is None:
            (page,) = nodes.pool.allocate(1)
        elif before is NodeState.CACHED and after is NodeState.IN_USE:
            nodes.pool.share(page)
        elif before is NodeState.IN_USE and after is NodeState.CACHED:
            nodes.pool.drop(page)
        nodes.states.transition(node, after, page if after is NodeState.IN_USE else None)
        assert (node.device is not None) == (after in ON_DEVICE)
        assert nodes.states.evictable() == [node] * (after is NodeState.CACHED)
        assert nodes.pool.num_cached == (after is NodeState.CACHED)
        freed = before is NodeState.CACHED and after not in ON_DEVICE
        assert nodes.states.take_freed() == [page] * freed


def test_a_copy_below_can_be_evicted_whenever_no_transfer_uses_it():
    nodes = Nodes()
    node, host = nodes.node(NodeState.CACHED), nodes.states.tier_pools[Tier.HOST]
    nodes.store(node)
    assert host.copy_of_another() is node and host.oldest(1) == []
    nodes.states.transition(node, NodeState.ABSENT)
    assert host.copy_of_another() is None and host.oldest(1) == [node]
    nodes.states.pin(node)
    assert host.oldest(1) == []
    nodes.states.pin(node, -1)
    nodes.states.begin_spill(node)
    assert host.oldest(1) == []
    nodes.states.end_spill(node)
    assert host.oldest(1) == [node]
    nodes.states.discard(node, Tier.HOST)
    assert not node.attached and host.num_used == 0 and len(nodes.tree) == 0


@pytest.mark.parametrize("state", NodeState)
def test_a_reset_frees_what_no_sequence_and_no_transfer_uses(state):
    nodes = Nodes()
    node = nodes.node(state)
    nodes.states.reset()
    assert nodes.pool.num_cached == 0 and not nodes.states.evictable() and not node.attached
    assert bool(node.lower) == (state in IN_TRANSFER - {NodeState.SAVING})
    assert (node.device is not None) == (state is NodeState.IN_USE)


def test_without_prefix_caching_the_last_pin_frees_a_page():
    nodes = Nodes(prefix_caching=False)
    node = nodes.node(NodeState.IN_USE)
    nodes.states.pin(node)
    nodes.states.release(node.device, node)
    assert node.state is NodeState.CACHED
    nodes.states.pin(node, -1)
    assert node.state is NodeState.ABSENT and nodes.pool.num_free == nodes.pool.capacity


def test_nodes_are_changed_by_their_owner_alone():
    fields = set().union(*OWNERS.values())
    for path in (Path(jaxserve.__file__).parent / "kv").glob("*.py"):
        allowed = OWNERS.get(path.name, set())
        for assigned in ast.walk(ast.parse(path.read_text())):
            if isinstance(assigned, ast.Attribute) and isinstance(assigned.ctx, ast.Store):
                mine = isinstance(assigned.value, ast.Name) and assigned.value.id == "self"
                if assigned.attr in fields and not (mine and path.name != "node.py"):
                    assert assigned.attr in allowed, f"{path.name}:{assigned.lineno}"


def test_no_other_package_uses_what_is_below_the_manager():
    package = Path(jaxserve.__file__).parent
    for path in package.rglob("*.py"):
        if "kv" not in path.relative_to(package).parts:
            text = path.read_text()
            assert not any(name in text for name in (".tier_pools", "NodeStates", "._offload"))
