"""Moves of images between tiers as the manager sees them, and what the engine must do for them."""

from __future__ import annotations

import dataclasses

from jaxserve.kv.copier import Ticket
from jaxserve.kv.prefix_tree import Node
from jaxserve.kv.table import PageTable
from jaxserve.kv.tiers import Tier

MOVE_SIZES = (1, 4, 16)
"""Numbers of images in a staging array, for each of which programs gather and scatter them."""

MOVE_PAGES = MOVE_SIZES[-1]
"""The most pages that one transfer moves, and one staging buffer holds."""


def staged_pages(count: int) -> int:
    """Images that are moved to move `count` pages: staging arrays are padded to MOVE_SIZES."""
    whole, rest = divmod(count, MOVE_PAGES)
    return whole * MOVE_PAGES + (rest and next(size for size in MOVE_SIZES if size >= rest))


@dataclasses.dataclass(eq=False)
class Transfer:
    """Images of some nodes on their way from one tier to another, at most MOVE_PAGES of them.

    One to the device goes into pages of `table`, from its page `first` on. All its nodes but a last
    one that is only copied from (so `num_shared` of them) lie on those pages when it has landed.
    """

    source: Tier
    target: Tier
    nodes: list[Node] = dataclasses.field(default_factory=list)
    source_pages: list[int] = dataclasses.field(default_factory=list)
    target_pages: list[int] = dataclasses.field(default_factory=list)
    num_shared: int = 0
    table: PageTable | None = None
    first: int = 0
    ticket: Ticket | None = None
    deadline_us: int | None = None
    awaited: bool = True
    """Whether it is worth waiting for; its pages are let go of when its ticket ends either way."""


@dataclasses.dataclass
class Operations:
    """What must be done on the device before a step, in this order.

    loads: transfers that have landed, whose staged images go to their target pages.
    saves: transfers whose source pages are to be gathered.
    copies: (source, target) pages, all sources being read before any target is written.
    freed: pages that nobody may read again before they are written.
    """

    loads: list[Transfer] = dataclasses.field(default_factory=list)
    saves: list[Transfer] = dataclasses.field(default_factory=list)
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    freed: list[int] = dataclasses.field(default_factory=list)
