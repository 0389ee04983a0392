"""The KV of a snapshot: saving and restoring prefixes.

A saved prefix is its tokens and their KV. On restore it is written to pages and inserted into the
prefix tree, where sequences find it at admission like any other cached prefix. So a prefix may be
missing or truncated, for lack of time, disk or pages: then more is recomputed, and nothing else
changes. Page sizes may differ.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxserve.core.errors import SnapshotError
from jaxserve.core.sequence import Sequence as EngineSequence
from jaxserve.engine.snapshot_files import SnapshotReader, SnapshotWriter
from jaxserve.kv.manager import KVManager
from jaxserve.kv.match import Match
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.prefix_tree import unpack_tokens
from jaxserve.kv.tiers import PageCorruptError, Tier
from jaxserve.kv.transfers import MOVE_PAGES

_FILE_BYTES = 64 << 20
"""Approximate size of one KV file: the memory used at a time, and the most lost at a deadline."""

Place = tuple[Tier, int]
"""A page's tier and number."""


class Pages(Protocol):
    """KV [pages, page_tokens, layers, 2, kv_heads, head_dim] of up to MOVE_PAGES pages."""

    def read(self, tier: Tier, pages: Sequence[int]) -> np.ndarray: ...

    def write(self, pages: Sequence[int], tokens: np.ndarray) -> None: ...


@dataclasses.dataclass
class Prefix:
    """Computed tokens and their pages, `places`, of which the last may be partially filled.

    It belongs to a sequence, by `request_id` and `index`; or to the prefix cache, as `token_ids`
    under a salt.
    """

    num_tokens: int
    places: list[Place]
    request_id: str | None = None
    index: int = 0
    salt: str = ""
    token_ids: list[int] | None = None


def prefixes_of(
    kv: KVManager,
    sequences: Iterable[EngineSequence],
    tables: Mapping[int, PageTable],
    *,
    cache: bool,
) -> Iterator[Prefix]:
    """The computed prefix of each unfinished sequence and, if `cache`, of the prefix cache."""
    for seq in sequences:
        table = tables[seq.seq_id]
        running = seq.slot is not None and not kv.is_fetching(table)
        # Pages just fetched are not yet in num_written.
        num_tokens = max(seq.num_written, table.num_cached) if running else 0
        places = [(Tier.DEVICE, page) for page in table.pages[: kv.pool.pages_for(num_tokens)]]
        if not running:
            nodes, num_tokens = kv.known(table, seq.num_prompt + len(seq.output_token_ids))
            places = [node.nearest for node in nodes]
        if num_tokens:
            yield Prefix(num_tokens, places, seq.request_id, seq.index)
    if cache:
        for path in kv.cached():
            token_ids = [token for node in path for token in unpack_tokens(node.tokens)]
            yield Prefix(
                len(token_ids),
                [node.nearest for node in path],
                salt=path[0].parent.tokens.decode(),
                token_ids=token_ids,
            )


def save_kv(
    writer: SnapshotWriter,
    prefixes: Iterable[Prefix],
    pages: Pages,
    page_tokens: int,
    deadline_s: float | None,
) -> None:
    """Writes prefixes in order, until `deadline_s` (on time.monotonic's clock), a full disk or an
    unreadable page."""
    prefixes = list(prefixes)
    rows: dict[Place, int] = {}
    for prefix in prefixes:
        for place in prefix.places:
            rows.setdefault(place, len(rows) * page_tokens)
    files: list[tuple[str, int]] = []
    try:
        for first, kv in _batches(list(rows), pages):
            if deadline_s is not None and time.monotonic() > deadline_s:
                break
            writer.add_rows(name := f"kv-{len(files):05d}", kv.reshape(-1, *kv.shape[2:]))
            files.append((name, (first + len(kv)) * page_tokens))
    except (SnapshotError, PageCorruptError, OSError):
        pass  # KV that is not saved is recomputed.
    num_rows = files[-1][1] if files else 0
    listed = []
    for prefix in prefixes:
        starts = [rows[place] for place in prefix.places]
        kept = next((i for i, start in enumerate(starts) if start >= num_rows), len(starts))
        num_tokens = min(prefix.num_tokens, kept * page_tokens)
        if num_tokens:
            fields = dataclasses.asdict(prefix) | {"num_tokens": num_tokens}
            del fields["places"]
            listed.append(fields | {"rows": starts[:kept]})
    writer.add_json("kv", {"page_tokens": page_tokens, "files": files, "prefixes": listed})


def _batches(places: Sequence[Place], pages: Pages) -> Iterator[tuple[int, np.ndarray]]:
    """The KV of these pages in order, in batches of one file, each preceded by the number of its
    first page."""
    first, batch, num_bytes, start = 0, [], 0, 0
    while start < len(places):
        tier = places[start][0]
        stop = start
        while stop < len(places) and places[stop][0] is tier and stop - start < MOVE_PAGES:
            stop += 1
        batch.append(pages.read(tier, [page for _, page in places[start:stop]]))
        num_bytes += batch[-1].nbytes
        start = stop
        if num_bytes >= _FILE_BYTES or start == len(places):
            yield first, np.concatenate(batch)
            first, batch, num_bytes = start, [], 0


class SavedKV:
    """The KV of a snapshot that is being restored."""

    def __init__(self, reader: SnapshotReader) -> None:
        """Raises SnapshotError when the snapshot is damaged."""
        self._reader = reader
        content = reader.json("kv")
        self._page_tokens: int = content["page_tokens"]
        self._files: list[tuple[str, int]] = content["files"]
        self.prefixes: list[dict[str, Any]] = content["prefixes"]

    def restore(
        self,
        kv: KVManager,
        pages: Pages,
        table_of: Callable[[dict[str, Any]], PageTable | None],
        carry_out: Callable[[], None],
    ) -> None:
        """Inserts prefixes into the prefix tree, the first ones last, so that they are evicted
        last. `table_of` returns the page table for a prefix, a sequence's own where it has one;
        None to skip the prefix. `carry_out` dispatches the manager's page operations.
        """
        room = kv.pool.capacity + sum(tier.num_pages for tier in kv.tiers.values())
        chosen, seen = [], set()
        for prefix in self.prefixes:
            new = set(prefix["rows"]) - seen
            room -= kv.pool.pages_for(len(new) * self._page_tokens)
            if room < 0:
                break
            chosen.append(prefix)
            seen |= new
        for prefix in reversed(chosen):
            table = table_of(prefix)
            if table is None:
                continue
            try:
                self._put(prefix, table, kv, pages, carry_out)
            except SnapshotError:
                return  # A read failed; the rest is recomputed.

    def _put(
        self,
        prefix: dict[str, Any],
        table: PageTable,
        kv: KVManager,
        pages: Pages,
        carry_out: Callable[[], None],
    ) -> None:
        """Writes a prefix to pages, except those already cached, and releases them."""
        num_tokens, page_size = prefix["num_tokens"], kv.pool.page_size
        shared = kv.match(table, num_tokens).shared
        match = Match(
            shared=shared,
            num_tokens=len(shared) * page_size,
            num_in_use=sum(kv.pool.refs(node.device) > 0 for node in shared),
        )
        num_pages = kv.pool.pages_for(num_tokens)
        if not kv.fits(match, num_pages, 0):
            return
        kv.allocate(table, match, num_pages)
        carry_out()
        put_tokens = match.num_tokens
        try:
            for first in range(len(shared), num_pages, MOVE_PAGES):
                stop = min(first + MOVE_PAGES, num_pages)
                rows = self._rows(prefix, first * page_size, min(stop * page_size, num_tokens))
                whole = np.zeros(((stop - first) * page_size, *rows.shape[1:]), rows.dtype)
                whole[: len(rows)] = rows
                pages.write(
                    table.pages[first:stop], whole.reshape(stop - first, page_size, *rows.shape[1:])
                )
                put_tokens = min(stop * page_size, num_tokens)
        finally:
            kv.release(table, put_tokens, pin=prefix["request_id"] is not None)

    def _rows(self, prefix: dict[str, Any], start: int, stop: int) -> np.ndarray:
        """KV [tokens, ...] of tokens start .. stop - 1 of a prefix."""
        parts = []
        while start < stop:
            page, offset = divmod(start, self._page_tokens)
            count = min(self._page_tokens - offset, stop - start)
            row = prefix["rows"][page] + offset
            parts.append(self._row_range(row, count))
            start += count
        return np.concatenate(parts)

    def _row_range(self, row: int, count: int) -> np.ndarray:
        """Consecutive rows of one page, and so of one file."""
        before = 0
        for name, end in self._files:
            if row < end:
                return self._reader.rows(name, row - before, row - before + count)
            before = end
        raise SnapshotError(f"the snapshot has {before} rows of KV, so not row {row}.")
