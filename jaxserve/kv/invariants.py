"""Consistency checks of the KV manager's state (`debug_kv`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.pages import TRASH_PAGE, PageError
from jaxserve.kv.prefix_cache.node import ON_DEVICE, Node, NodeState
from jaxserve.kv.tier import Tier


def check_invariants(manager: KVManager, tables: Iterable[PageTable]) -> None:
    """Raises PageError unless every reference is accounted for and no page is in two states.

    `tables` are those of all unfinished sequences. O(pool size): for debugging and tests.
    """
    tables = [own for table in tables for own in table.tables]
    _check_references(manager, tables)
    nodes = _all_nodes(manager, tables)
    _check_device(manager, nodes)
    _check_host_pages(manager, tables)
    for tier in manager.tiers:
        _check_lower(manager, nodes, tier)
    for table in tables:
        for page, node in list(zip(table.pages, table.nodes))[table.num_released :]:
            _require(node.device == page, f"a table has page {page}, its node has {node.device}")


def _check_references(manager: KVManager, tables: list[PageTable]) -> None:
    pool = manager.pool
    held = Counter(page for table in tables for page in table.held)
    for page in range(TRASH_PAGE + 1, pool.num_pages):
        refs = pool.refs(page)
        _require(refs == held[page], f"page {page}: {refs} references, in {held[page]} tables")
    _require(TRASH_PAGE not in held, "the trash page is in a table")
    for table in tables:
        _require(len(set(table.held)) == len(table.held), "a table has a page twice")
        released = table.pages[: table.num_released]
        _require(set(released) <= {TRASH_PAGE}, "a table names a page that it has released")


def _check_host_pages(manager: KVManager, tables: list[PageTable]) -> None:
    """Host pages of sequences longer than the pool are reserved while these run."""
    held = [page for table in tables for page in table.host_pages]
    _require(len(set(held)) == len(held), "a host page is in two tables")
    num_used = 0 if manager.host_pages is None else manager.host_pages.num_used
    _require(num_used == len(held), f"{num_used} host pages are taken, and {len(held)} in tables")
    for table in tables:
        if not table.num_host_pages:
            continue
        _require(not table.nodes, "a table longer than the pool has nodes")
        expected = table.num_host_pages if table.pages else 0
        _require(
            len(table.host_pages) == expected and table.num_released <= expected,
            f"a table has {len(table.host_pages)} host pages of {expected}, and uses "
            f"{table.num_released}",
        )
        _require(
            len(table.held) <= manager.host_limits.resident_pages,
            f"a table longer than the pool holds {len(table.held)} device pages",
        )


def _all_nodes(manager: KVManager, tables: list[PageTable]) -> list[Node]:
    """Nodes of the tree, and detached nodes that are still in use or in transfer."""
    nodes = dict.fromkeys(manager.tree)
    for node in nodes:
        _require(node.attached, "the tree has a detached node")
        _require(not node.without_kv or bool(node.children), "the tree has a leaf without KV")
    for table in tables:
        nodes.update(dict.fromkeys(table.nodes[table.num_released :]))
    for transfer in manager.transfers():
        nodes.update(dict.fromkeys(transfer.nodes))
    return list(nodes)


def _check_device(manager: KVManager, nodes: list[Node]) -> None:
    pool = manager.pool
    places = [node.device for node in nodes if node.device is not None]
    _require(len(set(places)) == len(places), "a device page belongs to two nodes")
    for node in nodes:
        on_device = node.device is not None
        used = on_device and pool.refs(node.device) > 0
        _require(
            on_device == (node.state in ON_DEVICE) and used == (node.state is NodeState.IN_USE),
            f"a node is {node.state.name} and has the device page {node.device}",
        )
    cached = {node for node in nodes if node.state is NodeState.CACHED}
    evictable = manager.node_states.evictable()
    _require(
        len(cached) == len(evictable) == pool.num_cached and cached == set(evictable),
        f"{pool.num_cached} pages are cached, {len(cached)} of them have a node, and "
        f"{len(evictable)} are evictable",
    )


def _check_lower(manager: KVManager, nodes: list[Node], tier: Tier) -> None:
    places = [node.lower[tier] for node in nodes if tier in node.lower]
    for transfer in manager.transfers():
        if transfer.target is tier:
            places += transfer.target_pages
        if transfer.source is tier:
            sources = [node.lower.get(tier) for node in transfer.nodes]
            _require(
                sources == transfer.source_pages, f"a {tier.value} page was reused in transfer"
            )
    _require(len(set(places)) == len(places), f"a {tier.value} page has two uses")
    num_used = manager.tiers[tier].num_used
    _require(
        len(places) == num_used,
        f"{num_used} {tier.value} pages are allocated and {len(places)} used",
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PageError(f"the state of the KV manager is inconsistent: {otherwise}")
