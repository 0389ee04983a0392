"""Restores the KV of a snapshot.

A saved prefix is its tokens and their KV. On restore it is written to pages and inserted into the
prefix tree, where sequences find it at admission like any other cached prefix. So a prefix may be
missing or truncated, for lack of time, disk or pages: then more is recomputed, and nothing else
changes. Page sizes may differ.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import SnapshotError
from jaxserve.engine.snapshot.files import RowsMissing
from jaxserve.engine.snapshot.kv import NAMES
from jaxserve.engine.snapshot.multi_host import SingleHost, raise_on_all_hosts
from jaxserve.kv.layout import TRANSFER_PAGES
from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.pages import TRASH_PAGE

if TYPE_CHECKING:
    from jaxserve.engine.replication.core import ReplicatedCore


class WritablePages(Protocol):
    """Pages of the device: `write` takes what `to_pages` returns of their KV."""

    page_tokens: int

    def to_pages(self, tokens: Sequence[np.ndarray]) -> list[np.ndarray]: ...

    def write(self, pages: Sequence[int], content: Sequence[np.ndarray]) -> None: ...


class _Converted(NamedTuple):
    """Pages of a prefix from `first` on, TRANSFER_PAGES in each of `batches`."""

    first: int
    batches: list[list[np.ndarray]]


class Reader(Protocol):
    """A snapshot that is being read: a directory, or parts that come `in_order`."""

    in_order: bool

    def json(self, name: str) -> Any: ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray: ...

    def forget(self, name: str) -> None: ...


class SavedKV:
    """The KV of a snapshot that is being restored."""

    def __init__(
        self,
        reader: Reader,
        *,
        pages: WritablePages,
        hosts: SingleHost | ReplicatedCore,
        with_drafts: bool = False,
    ) -> None:
        """It goes to `pages`, and `hosts` all restore it. `with_drafts`: KV of layers that draft is
        there, and is used. Raises SnapshotError when the snapshot is damaged."""
        self._reader = reader
        self._pages = pages
        self._hosts = hosts
        self._converted: dict[int, _Converted] = {}
        self._names = NAMES if with_drafts else NAMES[:1]
        content = reader.json("kv")
        self._page_tokens: int = content["page_tokens"]
        self._files: list[tuple[str, int]] = content["files"]
        self.prefixes: list[dict[str, Any]] = [
            {"start": 0} | prefix for prefix in content["prefixes"]
        ]
        self._last_use: dict[int, int] = {}
        for number, prefix in enumerate(self.prefixes):
            self._last_use |= {self._file_of(row): number for row in prefix["rows"]}
        self._number = 0

    def convert(self) -> None:
        """Reads all KV, and converts it to pages of this engine, which `restore` only has to write
        then: in any thread, of a snapshot that is read in order. Pages that several prefixes begin
        with are those of the first, without which `restore` leaves out the others.

        Raises SnapshotError as `restore` does.
        """
        seen: set[int] = set()
        size = self._pages.page_tokens
        for number, prefix in enumerate(self.prefixes):
            self._number, start, stop = number, prefix["start"], prefix["num_tokens"]
            seen_rows = itertools.takewhile(seen.__contains__, prefix["rows"])
            shared = start + sum(1 for _ in seen_rows) * self._page_tokens
            first = max(cdiv(start, size), min(shared, stop) // size)
            seen.update(prefix["rows"])
            batches: list[list[np.ndarray]] = []
            self._converted[number] = _Converted(first, batches)
            with contextlib.suppress(RowsMissing):
                for begin in range(first, cdiv(stop, size), TRANSFER_PAGES):
                    end = min(begin + TRANSFER_PAGES, cdiv(stop, size))
                    batches.append(self._pages.to_pages(self._tokens(prefix, begin, end)))

    def restore(
        self,
        kv: KVManager,
        table_of: Callable[[dict[str, Any]], PageTable | None],
        carry_out: Callable[[], None],
    ) -> None:
        """Inserts prefixes into the prefix tree; if they can be read in any order the first ones
        last, so that they are evicted last. `table_of` returns the page table for a prefix, a
        sequence's own where it has one; None to skip the prefix. `carry_out` dispatches the
        manager's page operations.

        Raises SnapshotError when rows cannot be read, on any host. What was inserted before stays.
        """
        if kv.windowed:
            return
        room = kv.pool.capacity + sum(tier.num_pages for tier in kv.tiers.values())
        chosen, seen = [], set()
        for number, prefix in enumerate(self.prefixes):
            new = set(prefix["rows"]) - seen
            room -= kv.pool.pages_for(len(new) * self._page_tokens)
            if room < 0:
                break
            chosen.append((number, prefix))
            seen |= new
        for number, prefix in chosen if self._reader.in_order else reversed(chosen):
            table = table_of(prefix)
            if table is not None:
                self._number = number
                with contextlib.suppress(RowsMissing):
                    self._put(prefix, table, kv, carry_out)
            self._converted.pop(number, None)

    def _put(
        self,
        prefix: dict[str, Any],
        table: PageTable,
        kv: KVManager,
        carry_out: Callable[[], None],
    ) -> None:
        """Writes a prefix to pages, except those already cached, and releases them."""
        if table.num_host_pages:
            return
        num_tokens, page_size = prefix["num_tokens"], kv.pool.page_size
        match = kv.match_on_device(table, num_tokens)
        converted = self._converted.get(self._number)
        start = prefix["start"] if converted is None else converted.first * page_size
        if match.num_tokens < start:
            return  # What comes before it was evicted.
        begin = done = len(match.shared)
        if converted is not None:
            begin -= (done - converted.first) % TRANSFER_PAGES
        num_pages = kv.pool.pages_for(num_tokens)
        if not kv.fits(match, num_tokens, 0):
            return
        kv.allocate(table, match, num_tokens)
        with self._hosts.with_timeout():
            carry_out()
        put_tokens = match.num_tokens
        try:
            for first in range(begin, num_pages, TRANSFER_PAGES):
                stop = min(first + TRANSFER_PAGES, num_pages)
                with raise_on_all_hosts(self._hosts):
                    content = self._content(prefix, first, stop)
                places = [TRASH_PAGE] * (done - first) + table.pages[max(first, done) : stop]
                with self._hosts.with_timeout():
                    self._pages.write(places, content)
                put_tokens = min(stop * page_size, num_tokens)
        finally:
            kv.release(table, put_tokens, pin=prefix["request_id"] is not None)

    def _content(self, prefix: dict[str, Any], first: int, stop: int) -> list[np.ndarray]:
        """Pages first .. stop - 1 of this engine, as `to_pages` returns them."""
        converted = self._converted.get(self._number)
        if converted is None:
            return self._pages.to_pages(self._tokens(prefix, first, stop))
        index = (first - converted.first) // TRANSFER_PAGES
        if index >= len(converted.batches):
            raise RowsMissing("the parts end before these pages.")
        return converted.batches[index]

    def _tokens(self, prefix: dict[str, Any], first: int, stop: int) -> list[np.ndarray]:
        """KV [pages, page_tokens, ...] of pages first .. stop - 1 of this engine, by layout, with
        zeros after the prefix."""
        size, found = self._pages.page_tokens, []
        for rows in self._rows(prefix, first * size, min(stop * size, prefix["num_tokens"])):
            whole = np.zeros(((stop - first) * size, *rows.shape[1:]), rows.dtype)
            whole[: len(rows)] = rows
            found.append(whole.reshape(stop - first, size, *rows.shape[1:]))
        return found

    def _rows(self, prefix: dict[str, Any], start: int, stop: int) -> list[np.ndarray]:
        """KV [tokens, ...] of tokens start .. stop - 1 of a prefix: of the model and, with drafts,
        of what drafts for it."""
        parts = []
        start, stop = start - prefix["start"], stop - prefix["start"]
        while start < stop:
            page, offset = divmod(start, self._page_tokens)
            count = min(self._page_tokens - offset, stop - start)
            row = prefix["rows"][page] + offset
            parts.append(self._row_range(row, count))
            start += count
        return [np.concatenate(own) for own in zip(*parts)]

    def _row_range(self, row: int, count: int) -> list[np.ndarray]:
        """Consecutive rows of one page, and so of one file. Frees the files before it that no later
        prefix has rows of."""
        index = self._file_of(row)
        for earlier in range(index):
            if self._last_use.get(earlier, 0) <= self._number:
                for name in self._arrays_of(earlier):
                    self._reader.forget(name)
        before, found = self._files[index - 1][1] if index else 0, []
        for name in self._arrays_of(index):
            rows = self._reader.rows(name, row - before, row - before + count)
            if len(rows) != count:
                raise SnapshotError(f"the snapshot's {name} has too few rows of KV.")
            found.append(rows)
        return found

    def _arrays_of(self, index: int) -> list[str]:
        """The names of the arrays of a file: of the model's KV, and with drafts of theirs."""
        first, rest = self._files[index][0], self._names[1:]
        return [first, *(first.replace(NAMES[0], name, 1) for name in rest)]

    def _file_of(self, row: int) -> int:
        """The index of the file with a row."""
        index = bisect_right(self._files, row, key=operator.itemgetter(1))
        if index == len(self._files):
            raise SnapshotError(f"the snapshot has no file with row {row} of its KV.")
        return index
