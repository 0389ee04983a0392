"""A node of the prefix tree, and the states it can be in."""

from __future__ import annotations

import enum

from jaxserve.kv.tier import Tier

TOKEN_BYTES = 4


class NodeState(enum.Enum):
    """Where a node's KV is, seen from the device. Copies on lower tiers are a separate fact.

    ABSENT: no page on the device.
    IN_USE: a device page that sequences use.
    CACHED: a device page that no sequence uses; it can be evicted.
    SAVING: evicted, and being copied to a lower tier.
    FETCHING: being copied from a lower tier to a page of a sequence.
    ABANDONED: as SAVING or FETCHING, but no sequence waits for it any more. The copy continues, and
    its pages stay in use until it ends.
    """

    ABSENT = enum.auto()
    IN_USE = enum.auto()
    CACHED = enum.auto()
    SAVING = enum.auto()
    FETCHING = enum.auto()
    ABANDONED = enum.auto()


TRANSITIONS: dict[NodeState, frozenset[NodeState]] = {
    NodeState.ABSENT: frozenset({NodeState.IN_USE, NodeState.FETCHING}),
    NodeState.IN_USE: frozenset({NodeState.CACHED, NodeState.ABSENT}),
    NodeState.CACHED: frozenset({NodeState.IN_USE, NodeState.SAVING, NodeState.ABSENT}),
    NodeState.SAVING: frozenset({NodeState.ABSENT, NodeState.ABANDONED}),
    NodeState.FETCHING: frozenset({NodeState.IN_USE, NodeState.ABSENT, NodeState.ABANDONED}),
    NodeState.ABANDONED: frozenset({NodeState.ABSENT}),
}
"""The states that may follow each state (`NodeStates.transition`)."""

ON_DEVICE = frozenset({NodeState.IN_USE, NodeState.CACHED})
IN_TRANSFER = frozenset({NodeState.SAVING, NodeState.FETCHING, NodeState.ABANDONED})


class Node:
    """Tokens after a prefix, and the location of their KV. Only `NodeStates` changes its state.

    `tokens` are packed, at most one page of them (a root has the salt instead); only roots and full
    pages have children. `device` is its device page if its state has one, and `lower` has its page
    number on each lower tier with a copy. `pins` counts holders that will use the node again.
    `spilling`: its KV is being copied from one lower tier to the next. A node that is not
    `attached` cannot be matched, and its pages are freed by their last user.
    """

    __slots__ = (
        "attached",
        "children",
        "device",
        "keep",
        "key",
        "lower",
        "parent",
        "pins",
        "spilling",
        "state",
        "tokens",
    )

    def __init__(self, parent: Node | None, tokens: bytes, key: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.key = key
        self.children: list[Node] = []
        self.state = NodeState.ABSENT
        self.device: int | None = None
        self.lower: dict[Tier, int] = {}
        self.pins = 0
        self.spilling = False
        self.keep = True
        """Whether to save it to a lower tier when its device page is evicted."""
        self.attached = True

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def nearest(self) -> tuple[Tier, int]:
        """The nearest tier with its KV, and its page there; one must have it."""
        if self.device is not None:
            return Tier.DEVICE, self.device
        tier = next(tier for tier in Tier if tier in self.lower)
        return tier, self.lower[tier]

    @property
    def in_transfer(self) -> bool:
        """Whether its KV is being copied to or from the device."""
        return self.state in IN_TRANSFER

    @property
    def moving(self) -> bool:
        """Whether a transfer worker may be reading its pages on lower tiers."""
        return self.spilling or self.state in IN_TRANSFER

    @property
    def cached(self) -> bool:
        """Whether any tier has its KV."""
        return self.device is not None or bool(self.lower)

    @property
    def readable(self) -> bool:
        """Whether its KV can be shared or fetched now."""
        return self.device is not None or (self.state is NodeState.ABSENT and bool(self.lower))

    @property
    def arriving(self) -> bool:
        """Whether its KV will be readable soon."""
        return self.state is NodeState.SAVING or self.state is NodeState.FETCHING

    @property
    def without_kv(self) -> bool:
        """Whether no tier holds its KV and no transfer to or from the device is in flight."""
        return self.state is NodeState.ABSENT and not self.lower
