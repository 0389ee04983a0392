"""What a router remembers of the prefixes that a replica has cached."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxserve.core.requests.lora import LoRARequest

_DIGEST_BYTES = 8


def page_hashes(
    token_ids: Sequence[int],
    page_size: int,
    tenant: str | None,
    cache_salt: str | None,
    lora_request: LoRARequest | None = None,
) -> tuple[bytes, ...]:
    """One hash for each full page of tokens, of the page and all before it. As in the engine's
    prefix cache, no two tenants, salts or adapters have one in common."""
    adapter = lora_request and lora_request.name
    before = json.dumps([tenant, cache_salt, adapter]).encode()
    hashes = []
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        page = array("q", token_ids[start : start + page_size]).tobytes()
        before = hashlib.blake2b(before + page, digest_size=_DIGEST_BYTES).digest()
        hashes.append(before)
    return tuple(hashes)


class CachedPrefixes:
    """Hashes of the pages that a replica was sent or has generated, the latest of them: as many as
    its pool has pages. The replica evicts about the same ones."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, hashes: Iterable[bytes]) -> None:
        """Remember a prefix, page by page from its beginning."""
        for page in reversed(tuple(hashes)):  # Its last page is evicted first.
            self._hashes[page] = None
            self._hashes.move_to_end(page)
        while len(self._hashes) > self._num_pages:
            self._hashes.popitem(last=False)

    def match(self, hashes: Iterable[bytes]) -> int:
        """Number of leading pages that are remembered."""
        num_pages = 0
        for page in hashes:
            if page not in self._hashes:
                break
            num_pages += 1
        return num_pages

    def clear(self) -> None:
        self._hashes.clear()
