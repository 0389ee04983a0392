"""The tiers below the device: a block of host memory, and a file on disk.

An *image* is the bytes of one page: all layers, keys then values. A store keeps images under page
numbers of its own, `0 .. num_pages - 1`, and knows nothing of what they mean. Pages with
consecutive numbers are copied together as one *run* (the block groups of FastSwitch, Shen et al.
2024), so the fewer runs a sequence's pages make, the fewer and larger the copies.
"""

from __future__ import annotations

import enum
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

from jaxserve.errors import ConfigError, JaxserveError


class Tier(enum.Enum):
    """Where an image of a page can lie, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class PageCorruptError(JaxserveError):
    """Images that are not what was written: never wholly written, or changed since."""

    def __init__(self, pages: Sequence[int]) -> None:
        self.pages = tuple(pages)
        named = ", ".join(map(str, self.pages))
        super().__init__(f"pages {named} fail their checksum or were never wholly written")


class Store(Protocol):
    """Images of pages, by page number.

    Two threads may use a store at once as long as no page is written while another thread reads
    or writes it.
    """

    num_pages: int
    page_bytes: int
    num_copies: int
    """Runs read and written so far."""

    def write(self, pages: Sequence[int], images: np.ndarray) -> None:
        """Keeps `images[i]` as the image of `pages[i]`.

        `images` is C-contiguous, of any dtype, `[rows, ...]` with rows of `page_bytes` bytes; rows
        beyond `len(pages)` are padding. Raises OSError when the medium refuses, and then the
        pages hold no image.
        """

    def read(self, pages: Sequence[int]) -> np.ndarray:
        """Copies of the images, uint8 `[len(pages), page_bytes]`, in memory nobody else writes.

        Raises PageCorruptError when the store can tell that an image is not what was written.
        """

    def close(self) -> None:
        """Gives the room back. Call it once no thread reads or writes; again does nothing."""


def page_runs(pages: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Cuts `pages` where a number does not follow the one before it.

    Yields each run twice: as positions in `pages`, and as page numbers.
    """
    start = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1:
            yield slice(start, end), slice(pages[start], pages[end - 1] + 1)
            start = end


class _PagedStore:
    """What the stores share: a fixed number of pages, cut into runs."""

    closed = False

    def __init__(self, tier: Tier, num_pages: int, page_bytes: int) -> None:
        if num_pages < 1:
            raise ConfigError(
                f"the {tier.value} budget of the KV cache holds {num_pages} pages; "
                f"one page takes {page_bytes} bytes: give at least that, or leave this tier out"
            )
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.num_copies = 0
        self._counting = threading.Lock()

    def _runs(self, pages: Sequence[int]) -> list[tuple[slice, slice]]:
        """The runs of `pages`, counted. Raises IndexError for a page outside the store."""
        if self.closed:
            raise ValueError("this store was closed")
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise IndexError(f"page {page} is not in 0 .. {self.num_pages - 1}")
        runs = list(page_runs(pages))
        with self._counting:
            self.num_copies += len(runs)
        return runs

    def _as_rows(self, images: np.ndarray, least: int) -> np.ndarray:
        """`images` as uint8 `[rows, page_bytes]`, without a copy; at least `least` rows."""
        fits = images.flags.c_contiguous and images.nbytes == len(images) * self.page_bytes
        if not fits or len(images) < least:
            raise ValueError(
                f"images are {images.dtype} {list(images.shape)}; at least {least} rows "
                f"of {self.page_bytes} bytes are needed, C-contiguous"
            )
        return images.view(np.uint8).reshape(-1, self.page_bytes)


class HostStore(_PagedStore):
    """Images in one block of host memory, page aligned, that never grows.

    The system hands memory out as pages are first written, so an idle tier costs little.
    """

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        """Raises ConfigError for less than a page, or more than the system will promise."""
        super().__init__(Tier.HOST, num_pages, page_bytes)
        num_bytes = num_pages * page_bytes
        try:
            # Private, since only private memory is eligible for huge pages by default.
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the host budget of the KV cache is {num_bytes} bytes, "
                f"which the system refuses ({error}); give less"
            ) from error
        self._memory = memory
        self._pages = np.frombuffer(memory, np.uint8).reshape(num_pages, page_bytes)

    def write(self, pages: Sequence[int], images: np.ndarray) -> None:
        images = self._as_rows(images, len(pages))
        for rows, run in self._runs(pages):
            self._pages[run] = images[rows]

    def read(self, pages: Sequence[int]) -> np.ndarray:
        images = np.empty((len(pages), self.page_bytes), np.uint8)
        for rows, run in self._runs(pages):
            images[rows] = self._pages[run]
        return images

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._pages = None  # a map cannot be closed under an array that looks into it
            self._memory.close()


class DiskStore(_PagedStore):
    """Images in a file without a name: a process that is killed leaves nothing behind.

    The file is sparse, and takes room on the disk as pages are first written. It is written and
    read by system calls and not through a memory map: a full disk, or one that fails, is then an
    OSError, where through a map it would be a signal that kills the process. The checksums stay in
    memory, and every read verifies them.
    """

    def __init__(self, directory: str | Path, num_pages: int, page_bytes: int) -> None:
        """Raises ConfigError for less than a page, or a directory that cannot take the file."""
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
                f"a file in {str(directory)!r} ({error}); give less, or name another directory"
            ) from error
        self._checksums: list[int | None] = [None] * num_pages

    def write(self, pages: Sequence[int], images: np.ndarray) -> None:
        images = self._as_rows(images, len(pages))
        runs = self._runs(pages)
        for page in pages:
            self._checksums[page] = None  # until all of them are written
        for rows, run in runs:
            self._write_at(run.start * self.page_bytes, memoryview(images[rows]).cast("B"))
        for page, image in zip(pages, images):
            self._checksums[page] = zlib.crc32(image)

    def read(self, pages: Sequence[int]) -> np.ndarray:
        images = np.empty((len(pages), self.page_bytes), np.uint8)
        for rows, run in self._runs(pages):
            self._read_at(run.start * self.page_bytes, memoryview(images[rows]).cast("B"))
        corrupt = [
            page for page, image in zip(pages, images) if zlib.crc32(image) != self._checksums[page]
        ]
        if corrupt:
            raise PageCorruptError(corrupt)
        return images

    def close(self) -> None:
        self.closed = True
        self._file.close()

    def _read_at(self, offset_bytes: int, data: memoryview) -> None:
        """Fills `data`, or as much of it as the file has: the checksum tells."""
        while data and (num_read := os.preadv(self._file.fileno(), [data], offset_bytes)):
            offset_bytes += num_read
            data = data[num_read:]

    def _write_at(self, offset_bytes: int, data: memoryview) -> None:
        """Writes all of `data`, in one call where the system takes it at once.

        A disk that fills up takes a part, and says why only when asked to take the rest.
        """
        while data:
            written = os.pwrite(self._file.fileno(), data, offset_bytes)
            offset_bytes += written
            data = data[written:]
