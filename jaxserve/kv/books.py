"""What must hold of a KV manager's books after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import TRASH_PAGE, PageError
from jaxserve.kv.prefix_tree import Node
from jaxserve.kv.table import PageTable


def check_books(manager: KVManager, tables: Iterable[PageTable]) -> None:
    """Raises PageError unless every reference is accounted for and no page is in two states.

    `tables` are those of all unfinished sequences. Takes time in proportion to the pool: for
    debugging and tests.
    """
    tables = list(tables)
    _check_references(manager, tables)
    nodes = _all_nodes(manager, tables)
    _check_device(manager, nodes)
    for index in range(len(manager.mover.shelves)):
        _check_lower(manager, nodes, index)
    for table in tables:
        for page, node in zip(table.pages, table.nodes):
            _require(node.device == page, f"a table has page {page} where its node has another")


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
    """Nodes of the tree, and those out of it that are still in use or on the move."""
    nodes = dict.fromkeys(manager.tree)
    for node in nodes:
        _require(node.attached, "the tree has a detached node")
        _require(not node.homeless or bool(node.children), "the tree has a node without an image")
    for table in tables:
        nodes.update(dict.fromkeys(table.nodes))
    for transfer in manager.mover.transfers():
        nodes.update(dict.fromkeys(transfer.nodes))
    return list(nodes)


def _check_device(manager: KVManager, nodes: list[Node]) -> None:
    pool = manager.pool
    places = [node.device for node in nodes if node.device is not None]
    _require(len(set(places)) == len(places), "a page of the device is two nodes' image")
    kept = [node for node in nodes if node.device is not None and not pool.refs(node.device)]
    _require(
        len(kept) == pool.num_kept == manager.num_evictable,
        f"{pool.num_kept} pages are kept, {len(kept)} of them for a node, and "
        f"{manager.num_evictable} could be evicted",
    )
    for node in nodes:
        _require(
            node.device is None or node.transfer is None, "a node on the device is on the move"
        )


def _check_lower(manager: KVManager, nodes: list[Node], index: int) -> None:
    shelf = manager.mover.shelves[index]
    tier = shelf.tier
    places = [shelf.page(node) for node in nodes if shelf.page(node) is not None]
    for transfer in manager.mover.transfers():
        if transfer.target is tier:
            places += transfer.target_pages
        if transfer.source is tier:
            sources = [shelf.page(node) for node in transfer.nodes]
            _require(sources == transfer.source_pages, f"a {tier.value} page was not waited for")
    _require(len(set(places)) == len(places), f"a {tier.value} page has two uses")
    _require(
        len(places) == shelf.num_used,
        f"{shelf.num_used} {tier.value} pages are taken and {len(places)} used",
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PageError(f"the books of the KV manager do not balance: {otherwise}")
