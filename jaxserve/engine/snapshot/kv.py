"""The KV of a snapshot: saving and restoring prefixes.

A saved prefix is its tokens and their KV. On restore it is written to pages and inserted into the
prefix tree, where sequences find it at admission like any other cached prefix. So a prefix may be
missing or truncated, for lack of time, disk or pages: then more is recomputed, and nothing else
changes. Page sizes may differ.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxserve.core.errors import SnapshotError
from jaxserve.core.sequence import Sequence as EngineSequence
from jaxserve.engine.snapshot.files import RowsMissing
from jaxserve.engine.snapshot.together import OneHost, agreeing
from jaxserve.kv.manager import KVManager
from jaxserve.kv.offload.tiers import Tier
from jaxserve.kv.offload.transfers import TRANSFER_PAGES
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.prefix_tree import unpack_tokens

if TYPE_CHECKING:
    from jaxserve.engine.replication.core import ReplicatedCore

_FILE_BYTES = 64 << 20
"""Size of one array of KV: the memory used at a time, and the most lost at a deadline."""

Place = tuple[Tier, int]
"""A page's tier and number."""


_NAMES = "kv", "draft"
"""What the names of arrays begin with: KV of the model, and of layers that draft for it."""


class ReadablePages(Protocol):
    """KV [pages, page_tokens, layers, 2, kv_heads, head_dim] of up to TRANSFER_PAGES pages: of the
    model, and of the layers that draft for it, if there are any."""

    page_tokens: int
    page_bytes: int

    def read(self, tier: Tier, pages: Sequence[int]) -> list[np.ndarray]: ...


class TakeablePages(ReadablePages, Protocol):
    """Pages that may also be read later than they are copied."""

    def take(self, pages: Sequence[int]) -> Callable[[], list[np.ndarray]]: ...


class WritablePages(Protocol):
    """As ReadablePages, of the device."""

    def write(self, pages: Sequence[int], tokens: Sequence[np.ndarray]) -> None: ...


@dataclasses.dataclass
class Prefix:
    """Computed tokens and their pages, `places`, of which the last may be partially filled, and the
    first begins with token `start`.

    It belongs to a sequence, by `request_id` and `index`; or to the prefix cache, as `token_ids`
    under a salt.
    """

    num_tokens: int
    places: list[Place]
    request_id: str | None = None
    index: int = 0
    salt: str = ""
    token_ids: list[int] | None = None
    start: int = 0


def prefixes_of(
    kv: KVManager,
    sequences: Iterable[EngineSequence],
    tables: Mapping[int, PageTable],
    *,
    cache: bool,
    start: int | None = None,
) -> Iterator[Prefix]:
    """The computed prefix of each unfinished sequence that fits the pool and, if `cache`, of the
    prefix cache; none of a model with attention windows, whose pages do not hold all layers.
    `start`: of sequences only pages that are not before this token, and of prompts that are being
    computed only full ones."""
    if kv.windowed:
        return
    page_size = kv.pool.page_size
    first = (start or 0) // page_size
    for seq in sequences:
        table = tables[seq.seq_id]
        if table.num_host_pages:
            continue
        running = seq.slot is not None and not kv.is_fetching(table)
        # Pages just fetched are not yet in num_written.
        num_tokens = max(seq.num_written, table.num_cached) if running else 0
        places = [(Tier.DEVICE, page) for page in table.pages[: kv.pool.pages_for(num_tokens)]]
        if not running:
            nodes, num_tokens = kv.known(table, seq.num_prompt + len(seq.output_token_ids))
            places = [node.nearest for node in nodes]
        if start is not None and num_tokens < seq.num_prompt:
            num_tokens -= num_tokens % page_size
            places = places[: num_tokens // page_size]
        if places[first:]:
            own = seq.request_id, seq.index
            yield Prefix(num_tokens, places[first:], *own, start=first * page_size)
    if cache:
        for path in kv.cached():
            token_ids = [token for node in path for token in unpack_tokens(node.tokens)]
            yield Prefix(
                len(token_ids),
                [node.nearest for node in path],
                salt=path[0].parent.tokens.decode(),
                token_ids=token_ids,
            )


def kv_entries(prefixes: Iterable[Prefix], pages: ReadablePages) -> Iterator[tuple[str, Any]]:
    """The KV of prefixes as named entries: an index of all, then arrays of _FILE_BYTES each.

    Raises PageCorruptError or OSError for an unreadable page; what came before it counts.
    """
    prefixes = list(prefixes)
    numbers: dict[Place, int] = {}
    for prefix in prefixes:
        for place in prefix.places:
            numbers.setdefault(place, len(numbers))
    page_tokens, batches = pages.page_tokens, _batches(list(numbers), pages.page_bytes)
    files, num_rows = [], 0
    for batch in batches:
        num_rows += len(batch) * page_tokens
        files.append((f"{len(files):05d}", num_rows))
    listed = []
    for prefix in prefixes:
        fields = dataclasses.asdict(prefix)
        rows = [numbers[place] * page_tokens for place in fields.pop("places")]
        listed.append(fields | {"rows": rows})
    named = [(f"{_NAMES[0]}-{file}", stop) for file, stop in files]
    yield "kv", {"page_tokens": page_tokens, "files": named, "prefixes": listed}
    for (file, _), batch in zip(files, batches):
        read = (pages.read(tier, numbers) for tier, numbers in _transfers(batch))
        for name, parts in zip(_NAMES, zip(*read)):
            kv = np.concatenate(parts)
            yield f"{name}-{file}", kv.reshape(-1, *kv.shape[2:])


def _batches(places: Sequence[Place], page_bytes: int) -> list[Sequence[Place]]:
    """Pages by the file that their KV is in."""
    size = max(1, _FILE_BYTES // page_bytes)
    return [places[first : first + size] for first in range(0, len(places), size)]


def _transfers(places: Sequence[Place]) -> Iterator[tuple[Tier, list[int]]]:
    """These pages in order, up to TRANSFER_PAGES of one tier at a time."""
    for tier, group in itertools.groupby(places, key=operator.itemgetter(0)):
        numbers = [page for _, page in group]
        for first in range(0, len(numbers), TRANSFER_PAGES):
            yield tier, numbers[first : first + TRANSFER_PAGES]


class TakenPages:
    """Copies of pages, on the devices until they are read: once and in order, in any thread, while
    the engine's steps go on. For `kv_entries` of the prefixes that have these pages."""

    def __init__(self, places: Sequence[Place], pages: TakeablePages) -> None:
        """Begins to copy `places` of the device, in order and without repetition."""
        self.page_tokens, self.page_bytes = pages.page_tokens, pages.page_bytes
        self._takes = collections.deque(pages.take(numbers) for _, numbers in _transfers(places))
        self._rest: list[tuple[np.ndarray, ...]] = []
        """The KV of each page that was copied to the host with those before it."""

    @property
    def num_takes(self) -> int:
        """Copies that are on the devices, each with the memory of TRANSFER_PAGES pages."""
        return len(self._takes)

    def read(self, tier: Tier, pages: Sequence[int]) -> list[np.ndarray]:
        while len(self._rest) < len(pages):
            self._rest += zip(*self._takes[0]())
            self._takes.popleft()
        found, self._rest = self._rest[: len(pages)], self._rest[len(pages) :]
        return [np.stack(parts) for parts in zip(*found)]


class Reader(Protocol):
    """A snapshot that is being read: a directory, or parts that come `in_order`."""

    in_order: bool

    def json(self, name: str) -> Any: ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray: ...

    def forget(self, name: str) -> None: ...


class SavedKV:
    """The KV of a snapshot that is being restored."""

    def __init__(
        self, reader: Reader, *, hosts: OneHost | ReplicatedCore, with_drafts: bool = False
    ) -> None:
        """`hosts` all restore it. `with_drafts`: KV of layers that draft is there, and is used.
        Raises SnapshotError when the snapshot is damaged."""
        self._reader = reader
        self._hosts = hosts
        self._names = _NAMES if with_drafts else _NAMES[:1]
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

    def restore(
        self,
        kv: KVManager,
        pages: WritablePages,
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
                    self._put(prefix, table, kv, pages, carry_out)

    def _put(
        self,
        prefix: dict[str, Any],
        table: PageTable,
        kv: KVManager,
        pages: WritablePages,
        carry_out: Callable[[], None],
    ) -> None:
        """Writes a prefix to pages, except those already cached, and releases them."""
        if table.num_host_pages:
            return
        num_tokens, page_size = prefix["num_tokens"], kv.pool.page_size
        match = kv.match_on_device(table, num_tokens)
        if match.num_tokens < prefix["start"]:
            return  # What comes before it was evicted.
        num_pages = kv.pool.pages_for(num_tokens)
        if not kv.fits(match, num_tokens, 0):
            return
        kv.allocate(table, match, num_tokens)
        with self._hosts.bounded():
            carry_out()
        put_tokens = match.num_tokens
        try:
            for first in range(len(match.shared), num_pages, TRANSFER_PAGES):
                stop = min(first + TRANSFER_PAGES, num_pages)
                places = first * page_size, min(stop * page_size, num_tokens)
                tokens = []
                with agreeing(self._hosts):
                    for rows in self._rows(prefix, *places):
                        whole = np.zeros(((stop - first) * page_size, *rows.shape[1:]), rows.dtype)
                        whole[: len(rows)] = rows
                        tokens.append(whole.reshape(stop - first, page_size, *rows.shape[1:]))
                with self._hosts.bounded():
                    pages.write(table.pages[first:stop], tokens)
                put_tokens = min(stop * page_size, num_tokens)
        finally:
            kv.release(table, put_tokens, pin=prefix["request_id"] is not None)

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
        return [first, *(first.replace(_NAMES[0], name, 1) for name in rest)]

    def _file_of(self, row: int) -> int:
        """The index of the file with a row."""
        index = bisect_right(self._files, row, key=operator.itemgetter(1))
        if index == len(self._files):
            raise SnapshotError(f"the snapshot has no file with row {row} of its KV.")
        return index
