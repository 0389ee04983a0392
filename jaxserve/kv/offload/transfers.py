"""Planned page transfers between tiers, and the device operations that the engine runs for them."""

from __future__ import annotations

import dataclasses

from jaxserve.kv.offload.transfer_worker import TransferHandle
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.prefix_cache.node import Node
from jaxserve.kv.tier import Tier

TRANSFER_SIZES = (1, 4, 16)
"""Staging array sizes in pages; gather and scatter programs exist for each size."""

TRANSFER_PAGES = TRANSFER_SIZES[-1]
"""Maximum pages per transfer and per staging buffer."""


def staged_pages(count: int) -> int:
    """Pages copied to transfer `count` pages: staging arrays are padded to TRANSFER_SIZES."""
    whole, rest = divmod(count, TRANSFER_PAGES)
    return whole * TRANSFER_PAGES + (rest and next(size for size in TRANSFER_SIZES if size >= rest))


@dataclasses.dataclass(eq=False)
class Transfer:
    """A transfer of the pages of at most TRANSFER_PAGES nodes from one tier to another.

    A transfer to the device fills pages of `table`, from its page `first` on. When it has landed,
    the first `num_shared` nodes own those pages; a last node beyond them is only copied from.
    """

    source: Tier
    target: Tier
    nodes: list[Node] = dataclasses.field(default_factory=list)
    source_pages: list[int] = dataclasses.field(default_factory=list)
    target_pages: list[int] = dataclasses.field(default_factory=list)
    num_shared: int = 0
    table: PageTable | None = None
    first: int = 0
    handle: TransferHandle | None = None
    deadline_us: int | None = None
    awaited: bool = True
    """Whether it is worth waiting for; its pages are released when its handle ends either way."""


@dataclasses.dataclass
class Operations:
    """Device operations to run before a step, in this order.

    to_host: (device, host) pages to copy, of sequences longer than the pool.
    loads: landed transfers, whose staged pages are scattered to their target pages.
    saves: transfers whose source pages are to be gathered.
    copies: (source, target) pages; all sources are read before any target is written.
    freed: pages that must not be read again before they are written.
    """

    to_host: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    loads: list[Transfer] = dataclasses.field(default_factory=list)
    saves: list[Transfer] = dataclasses.field(default_factory=list)
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    freed: list[int] = dataclasses.field(default_factory=list)
