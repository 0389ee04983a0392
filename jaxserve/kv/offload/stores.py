"""The stores of the tiers below the device: host memory, and a file on disk.

A store holds page bytes (`payload`: all layers, keys then values) under its own page numbers
`0 .. num_pages - 1`, and is independent of their content. Pages with consecutive numbers are copied
together as one *extent* (the block groups of FastSwitch, Shen et al. 2024), so the fewer extents a
sequence's pages form, the fewer and larger the copies.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.kv.tier import Tier


class PageCorruptError(JaxserveError):
    """Page bytes differ from what was written: never fully written, or changed since."""

    def __init__(self, pages: Sequence[int]) -> None:
        self.pages = tuple(pages)
        named = ", ".join(map(str, self.pages))
        super().__init__(f"pages {named} failed their checksum or were never fully written")


class Store(Protocol):
    """Page bytes by page number.

    Two threads may use a store concurrently as long as no page is written while the other thread
    reads or writes it.
    """

    num_pages: int
    page_bytes: int
    num_copies: int
    """Runs read and written so far."""

    def write(self, pages: Sequence[int], payload: np.ndarray) -> None:
        """Writes `payload[i]` to `pages[i]`.

        `payload` is C-contiguous, of any dtype, `[rows, ...]` with rows of `page_bytes` bytes; rows
        beyond `len(pages)` are padding. Raises OSError when the write fails; the pages then have
        no valid content.
        """

    def read(self, pages: Sequence[int]) -> np.ndarray:
        """Copies of the page bytes, uint8 `[len(pages), page_bytes]`, in a new array.

        Raises PageCorruptError when the store detects that a page differs from what was written.
        """

    def close(self) -> None:
        """Frees the storage; idempotent. No thread may be reading or writing."""


def page_extents(pages: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Splits `pages` into extents: ranges of consecutive numbers.

    Yields each extent as a slice of positions in `pages` and as a slice of page numbers.
    """
    start = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1:
            yield slice(start, end), slice(pages[start], pages[end - 1] + 1)
            start = end


class _PagedStore:
    """Base of the stores: a fixed number of pages, accessed in extents."""

    closed = False

    def __init__(self, tier: Tier, num_pages: int, page_bytes: int) -> None:
        if num_pages < 1:
            raise ConfigError(
                f"the {tier.value} budget of the KV cache holds {num_pages} pages; "
                f"one page takes {page_bytes} bytes: give at least that, or disable this tier"
            )
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.num_copies = 0
        self._counting = threading.Lock()

    def _extents(self, pages: Sequence[int]) -> list[tuple[slice, slice]]:
        """Counts and returns the extents of `pages`. Raises IndexError for a page out of range."""
        if self.closed:
            raise ValueError("this store is closed")
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise IndexError(f"page {page} is not in 0 .. {self.num_pages - 1}")
        extents = list(page_extents(pages))
        with self._counting:
            self.num_copies += len(extents)
        return extents

    def _as_rows(self, payload: np.ndarray, least: int) -> np.ndarray:
        """`payload` as uint8 `[rows, page_bytes]`, without a copy; at least `least` rows."""
        fits = payload.flags.c_contiguous and payload.nbytes == len(payload) * self.page_bytes
        if not fits or len(payload) < least:
            raise ValueError(
                f"the payload is {payload.dtype} {list(payload.shape)}; at least {least} rows "
                f"of {self.page_bytes} bytes are needed, C-contiguous"
            )
        return payload.view(np.uint8).reshape(-1, self.page_bytes)


class HostStore(_PagedStore):
    """Pages in one fixed-size, page-aligned block of host memory.

    The operating system commits memory as pages are first written, so an idle tier costs little.
    """

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        """Raises ConfigError for less than a page, or more than the system can allocate."""
        super().__init__(Tier.HOST, num_pages, page_bytes)
        num_bytes = num_pages * page_bytes
        try:
            # Private, since only private memory is eligible for huge pages by default.
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the host budget of the KV cache is {num_bytes} bytes, "
                f"which cannot be allocated ({error}); set a smaller budget"
            ) from error
        self._memory = memory
        self._pages = np.frombuffer(memory, np.uint8).reshape(num_pages, page_bytes)

    def write(self, pages: Sequence[int], payload: np.ndarray) -> None:
        payload = self._as_rows(payload, len(pages))
        for rows, extent in self._extents(pages):
            self._pages[extent] = payload[rows]

    def read(self, pages: Sequence[int]) -> np.ndarray:
        payload = np.empty((len(pages), self.page_bytes), np.uint8)
        for rows, extent in self._extents(pages):
            payload[rows] = self._pages[extent]
        return payload

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._pages = None  # a memory map cannot be closed while an array views it
            self._memory.close()


class DiskStore(_PagedStore):
    """Pages in an unnamed file, which a killed process does not leave behind.

    The file is sparse, and takes disk space as pages are first written. It is accessed by system
    calls and not through a memory map: a full or failing disk then raises OSError, where with a map
    it would raise a signal that kills the process. Checksums are kept in memory and verified on
    every read.
    """

    def __init__(self, directory: str | Path, num_pages: int, page_bytes: int) -> None:
        """Raises ConfigError for less than a page, or a directory that cannot hold the file."""
        super().__init__(Tier.DISK, num_pages, page_bytes)
        num_bytes = num_pages * page_bytes
        try:
            # Open for as long as the store is.
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"the KV cache cannot write to the directory {str(directory)!r} "
                f"({error.strerror}); name one that exists and that you may write to"
            ) from error
        try:
            if (free := shutil.disk_usage(directory).free) < num_bytes:
                raise OSError(f"{free} bytes are free")
            self._file.truncate(num_bytes)
        except (OSError, OverflowError) as error:
            self._file.close()
            raise ConfigError(
                f"the disk budget of the KV cache is {num_bytes} bytes, too much for "
                f"a file in {str(directory)!r} ({error}); set a smaller budget or another directory"
            ) from error
        self._checksums: list[int | None] = [None] * num_pages

    def write(self, pages: Sequence[int], payload: np.ndarray) -> None:
        payload = self._as_rows(payload, len(pages))
        extents = self._extents(pages)
        for page in pages:
            self._checksums[page] = None  # invalid until all pages are written
        for rows, extent in extents:
            self._write_at(extent.start * self.page_bytes, memoryview(payload[rows]).cast("B"))
        for page, row in zip(pages, payload):
            self._checksums[page] = zlib.crc32(row)

    def read(self, pages: Sequence[int]) -> np.ndarray:
        payload = np.empty((len(pages), self.page_bytes), np.uint8)
        for rows, extent in self._extents(pages):
            self._read_at(extent.start * self.page_bytes, memoryview(payload[rows]).cast("B"))
        corrupt = [
            page for page, row in zip(pages, payload) if zlib.crc32(row) != self._checksums[page]
        ]
        if corrupt:
            raise PageCorruptError(corrupt)
        return payload

    def close(self) -> None:
        self.closed = True
        self._file.close()

    def _read_at(self, offset_bytes: int, data: memoryview) -> None:
        """Fills `data`, or as much as the file has; the checksum detects a short read."""
        while data and (num_read := os.preadv(self._file.fileno(), [data], offset_bytes)):
            offset_bytes += num_read
            data = data[num_read:]

    def _write_at(self, offset_bytes: int, data: memoryview) -> None:
        """Writes all of `data`, in several calls if needed.

        A full disk writes a part, and reports the error only on the next call.
        """
        while data:
            written = os.pwrite(self._file.fileno(), data, offset_bytes)
            offset_bytes += written
            data = data[written:]
