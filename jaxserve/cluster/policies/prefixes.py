"""What a router remembers of the prefixes that a replica has cached."""

from __future__ import annotations

import bisect
import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Container, Sequence

from jaxserve.core.requests.lora import LoRARequest

_DIGEST_BYTES = 8


def page_hashes(
    token_ids: Sequence[int],
    page_size: int,
    tenant: str | None,
    cache_salt: str | None,
    lora_request: LoRARequest | None = None,
    known: Sequence[bytes] = (),
) -> tuple[bytes, ...]:
    """One hash for each full page of tokens, of the page and all before it. As in the engine's
    prefix cache, no two tenants, salts or adapters have one in common. `known` are those of the
    first pages."""
    adapter = lora_request and lora_request.name
    before = known[-1] if known else json.dumps([tenant, cache_salt, adapter]).encode()
    hashes = [*known]
    tokens = array("q", token_ids[len(known) * page_size :])
    pages, page_bytes = tokens.tobytes(), page_size * tokens.itemsize
    for start in range(0, len(pages) - page_bytes + 1, page_bytes):
        page = pages[start : start + page_bytes]
        before = hashlib.blake2b(before + page, digest_size=_DIGEST_BYTES).digest()
        hashes.append(before)
    return tuple(hashes)


def num_leading(hashes: Sequence[bytes], found: Container[bytes]) -> int:
    """How many pages of a prefix are found, where those before each one that is found are too."""
    return bisect.bisect_left(hashes, True, key=lambda page: page not in found)


class CachedPrefixes:
    """Hashes of the pages that a replica was sent or has generated, the latest of them: as many as
    its pool has pages. The replica evicts about the same ones."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        """Remember a prefix, page by page from its beginning."""
        for page in reversed(hashes):  # Its last page is forgotten first.
            self._hashes[page] = None
            self._hashes.move_to_end(page)
        while len(self._hashes) > self._num_pages:
            self._hashes.popitem(last=False)

    def match(self, hashes: Sequence[bytes]) -> int:
        """Number of leading pages that are remembered."""
        return num_leading(hashes, self._hashes)

    def clear(self) -> None:
        self._hashes.clear()
