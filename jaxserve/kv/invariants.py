"""Consistency checks of the KV manager's state (`debug_kv`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.pages import TRASH_PAGE, PageError
from jaxserve.kv.prefix_tree import Node


def check_invariants(manager: KVManager, tables: Iterable[PageTable]) -> None:
    """Raises PageError unless every reference is accounted for and no page is in two states.

    `tables` are those of all unfinished sequences. O(pool size): for debugging and tests.
    """
    tables = list(tables)
    _check_references(manager, tables)
    nodes = _all_nodes(manager, tables)
    _check_device(manager, nodes)
    for index in range(len(manager.offload.tier_pools)):
        _check_lower(manager, nodes, index)
    for table in tables:
        for page, node in zip(table.pages, table.nodes):
            _require(node.device == page, f"a table has page {page}, its node has {node.device}")


def _check_references(manager: KVManager, tables: list[PageTable]) -> None:
    pool = manager.pool
    held = Counter(page for table in tables for page in table.pages)
    for page in range(TRASH_PAGE + 1, pool.num_pages):
        refs = pool.refs(page)
        _require(refs == held[page], f"page {page}: {refs} references, in {held[page]} tables")
    _require(TRASH_PAGE not in held, "the trash page is in a table")
    for table in tables:
        _require(len(set(table.pages)) == len(table.pages), "a table has a page twice")


def _all_nodes(manager: KVManager, tables: list[PageTable]) -> list[Node]:
    """Nodes of the tree, and detached nodes that are still in use or in transfer."""
    nodes = dict.fromkeys(manager.tree)
    for node in nodes:
        _require(node.attached, "the tree has a detached node")
        _require(not node.without_kv or bool(node.children), "the tree has a leaf without KV")
    for table in tables:
        nodes.update(dict.fromkeys(table.nodes))
    for transfer in manager.offload.transfers():
        nodes.update(dict.fromkeys(transfer.nodes))
    return list(nodes)


def _check_device(manager: KVManager, nodes: list[Node]) -> None:
    pool = manager.pool
    places = [node.device for node in nodes if node.device is not None]
    _require(len(set(places)) == len(places), "a device page belongs to two nodes")
    cached = [node for node in nodes if node.device is not None and not pool.refs(node.device)]
    _require(
        len(cached) == pool.num_cached == manager.num_evictable,
        f"{pool.num_cached} pages are cached, {len(cached)} of them have a node, and "
        f"{manager.num_evictable} are evictable",
    )
    for node in nodes:
        _require(node.device is None or not node.in_transfer, "a node on the device is in transfer")


def _check_lower(manager: KVManager, nodes: list[Node], index: int) -> None:
    tier_pool = manager.offload.tier_pools[index]
    tier = tier_pool.tier
    places = [tier_pool.page(node) for node in nodes if tier_pool.page(node) is not None]
    for transfer in manager.offload.transfers():
        if transfer.target is tier:
            places += transfer.target_pages
        if transfer.source is tier:
            sources = [tier_pool.page(node) for node in transfer.nodes]
            _require(
                sources == transfer.source_pages, f"a {tier.value} page was reused in transfer"
            )
    _require(len(set(places)) == len(places), f"a {tier.value} page has two uses")
    _require(
        len(places) == tier_pool.num_used,
        f"{tier_pool.num_used} {tier.value} pages are allocated and {len(places)} used",
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PageError(f"the state of the KV manager is inconsistent: {otherwise}")
