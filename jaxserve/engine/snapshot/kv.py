"""The KV of a snapshot: prefixes, each its tokens and their KV. `saved_kv.py` restores them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxserve.core.sequence import Sequence as EngineSequence
from jaxserve.kv.layout import TRANSFER_PAGES
from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.prefix_cache.prefix_tree import unpack_tokens
from jaxserve.kv.tier import Tier

_FILE_BYTES = 64 << 20
"""Size of one array of KV: the memory used at a time, and the most lost at a deadline."""

Place = tuple[Tier, int]
"""A page's tier and number."""


NAMES = "kv", "draft"
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
    stop: int | None = None,
) -> Iterator[Prefix]:
    """The computed prefix of each unfinished sequence that fits the pool and, if `cache`, of the
    prefix cache; none of a model with attention windows, whose pages do not hold all layers.
    `start`: of sequences only pages that are not before this token, and of prompts that are being
    computed only full ones; `stop`: and of each no more than its first `stop` tokens."""
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
        if stop is not None and num_tokens > stop:
            num_tokens, places = stop, places[: kv.pool.pages_for(stop)]
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
    named = [(f"{NAMES[0]}-{file}", stop) for file, stop in files]
    yield "kv", {"page_tokens": page_tokens, "files": named, "prefixes": listed}
    for (file, _), batch in zip(files, batches):
        read = (pages.read(tier, numbers) for tier, numbers in _transfers(batch))
        for name, parts in zip(NAMES, zip(*read)):
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
    the engine's steps continue. For `kv_entries` of the prefixes that have these pages."""

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
