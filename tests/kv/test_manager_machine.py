"""The whole manager under everything that can happen to it, in any order.

Invariants are checked after every operation, and at every step each sequence reads all its KV. The
machine finds short failures; the driver goes the distance, at a tenth of the cost of an operation.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from pathlib import Path
from tempfile import gettempdir

import pytest
from exhaustive import EXHAUSTIVE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from kv_world import OPERATIONS, World

from jaxserve.kv import page_table
from jaxserve.kv.prefix_cache import prefix_tree
from jaxserve.kv.prefix_cache.node import TRANSITIONS
from jaxserve.kv.prefix_cache.node_states import NodeStates
from jaxserve.kv.tier import Tier

NUM_CHOICES = {
    name: len(inspect.signature(getattr(World, name)).parameters) - 1 for name in OPERATIONS
}
WEIGHTS = {
    "add": 1,
    "fork": 0.7,
    "admit": 3,
    "compute": 10,
    "append": 8,
    "register": 1,
    "finish": 0.5,
    "preempt": 4,
    "abandon": 0.3,
    "pin": 0.5,
    "unpin": 0.7,
    "evict": 4,
    "reset": 0.05,
    "begin_move": 10,
    "end_move": 10,
    "corrupt": 0.1,
    "poll": 1.5,
    "step": 0.3,
}
SETTINGS = {
    "num_pages": range(3, 17),
    "page_size": (1, 2, 3, 4),
    "host_pages": (0, 3, 6, 12, 24),
    "disk_pages": (0, 0, 2, 8, 16),
    "preemption": ("swap", "swap", "swap", "auto", "recompute"),
    "prefix_caching": (True, True, True, False),
    "staging_buffers": (1, 2, 4),
}


WINDOWS = (4,), (None, 3), (None, 6, 1), (7, 2)


class ManagerMachine(RuleBasedStateMachine):
    """One rule drives all: it picks among what is possible, and hypothesis shrinks the picks."""

    @initialize(**{name: st.sampled_from(values) for name, values in SETTINGS.items()})
    def start(self, **chosen) -> None:
        self.world = World(Path(gettempdir()), **chosen)

    @rule(data=st.data(), choices=st.tuples(*[st.integers(0, 31)] * max(NUM_CHOICES.values())))
    def operate(self, data: st.DataObject, choices: tuple[int, ...]) -> None:
        operation = data.draw(st.sampled_from(self.world.possible))
        self.world.do(operation, *choices[: NUM_CHOICES[operation]])

    def teardown(self) -> None:
        if hasattr(self, "world"):
            with contextlib.closing(self.world):
                self.world.end()


class WindowsMachine(ManagerMachine):
    """The same where layers have windows."""

    @initialize(
        windows=st.sampled_from(WINDOWS),
        **{name: st.sampled_from(values) for name, values in SETTINGS.items()},
    )
    def start(self, **chosen) -> None:
        self.world = World(Path(gettempdir()), **chosen)


TestWindows = WindowsMachine.TestCase
TestWindows.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


def drive(seed: int, num_operations: int, **fixed) -> World:
    """A world of its own for every seed, in which some operations are much more frequent."""
    chooser = random.Random(seed)
    chosen = {name: chooser.choice(values) for name, values in SETTINGS.items()} | fixed
    weights = {name: WEIGHTS[name] * chooser.choice((0.2, 1, 1, 4)) for name in OPERATIONS}
    with contextlib.closing(World(Path(gettempdir()), **chosen)) as world:
        for number in range(num_operations):
            possible = world.possible
            (operation,) = chooser.choices(possible, [weights[name] for name in possible])
            world.do(operation, *(chooser.randrange(4096) for _ in range(NUM_CHOICES[operation])))
            if number % 32 == 0:
                world.step()
                world.check_page_bytes()
        world.end()
    return world


WORLDS = 250 if EXHAUSTIVE else 120


def test_many_operations(monkeypatch):
    taken = set()
    transition = NodeStates.transition

    def noted(self, node, state, page=None):
        taken.add((node.state, state))
        transition(self, node, state, page)

    monkeypatch.setattr(NodeStates, "transition", noted)
    worlds = [drive(seed, 400) for seed in range(WORLDS)]
    assert sum(world.num_operations for world in worlds) >= 400 * WORLDS
    # They went everywhere, and took every transition that a node may take.
    assert taken == {(before, after) for before in TRANSITIONS for after in TRANSITIONS[before]}
    managers = [world.manager for world in worlds]
    counters = [manager.counters for manager in managers]
    for name in ("copied_pages", "evicted_pages", "lost_pages", "swaps", "recomputes"):
        assert sum(getattr(counter, name) for counter in counters) > 1.6 * WORLDS
    moves = [manager.transfer_counters for manager in managers]
    for tier in (Tier.HOST, Tier.DISK):
        assert sum(move.saved_pages.get(tier, 0) for move in moves) > 0.8 * WORLDS
        assert sum(move.fetched_pages.get(tier, 0) for move in moves) > 0.08 * WORLDS
    assert sum(move.failed_transfers for move in moves) > 0.2 * WORLDS
    assert sum(move.slow_transfers for move in moves) > 0.2 * WORLDS


@pytest.mark.parametrize("windows", WINDOWS)
def test_windows(windows):
    """Pages come back, are found again, move to tiers and back, and no token reads another's."""
    num_pages = 5 * len(windows) + 2
    worlds = [drive(seed, 300, windows=windows, num_pages=num_pages) for seed in range(40)]
    moves = [world.manager.transfer_counters for world in worlds]
    assert sum(world.num_hits for world in worlds) > 50
    assert sum(world.manager.counters.evicted_pages for world in worlds) > 100
    assert sum(move.fetched_pages.get(Tier.HOST, 0) for move in moves) > 5
    assert sum(move.failed_transfers + move.slow_transfers for move in moves) > 5


def test_pages_whose_keys_collide_are_never_mixed_up(monkeypatch):
    """Keys of two bits, where 128 bits would never collide."""
    whole = prefix_tree.chain_key

    def short(parent_key: bytes, tokens: bytes) -> bytes:
        return bytes([whole(parent_key, tokens)[0] % 4]) * 16

    monkeypatch.setattr(prefix_tree, "chain_key", short)
    monkeypatch.setattr(page_table, "chain_key", short)
    for seed in range(20):
        drive(seed, 300)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_operations_give_the_same_pages(seed):
    first, second = drive(seed, 300), drive(seed, 300)
    assert (first.device == second.device).all()
    assert first.manager.counters == second.manager.counters
    assert first.manager.transfer_counters == second.manager.transfer_counters
