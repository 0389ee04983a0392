"""Allocator of the pages of one tier, as extents: ranges of consecutive numbers.

A sequence with consecutive pages is transferred in few copies. After FastSwitch's block groups
(Shen et al. 2024): a request gets extents while there are any, and single pages when the pool
is nearly full.
"""

from __future__ import annotations

from collections.abc import Iterable


class ExtentAllocator:
    """Allocates page numbers `first .. stop - 1`. O(1) per extent, and deterministic.

    A sequence that grows gets the pages after its last one if they are free. A new sequence starts
    in the middle of a large extent, so that the sequence that ends where it begins can grow too.
    """

    def __init__(self, first: int, stop: int) -> None:
        self.num_free = 0
        self._length: dict[int, int] = {}
        self._start_by_stop: dict[int, int] = {}
        # Extents by the bit length of their length: the last non-empty class holds the longest one,
        # to within a factor of two.
        self._sizes: list[dict[int, None]] = [{} for _ in range((stop - first).bit_length() + 1)]
        self._first = first
        if stop > first:
            self._insert(first, stop - first)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocates `count` pages, those that follow `after` first if they are free.

        The caller must have checked `num_free`.
        """
        pages: list[int] = []
        if after is not None and after + 1 in self._length:
            pages += self._take(after + 1, count)
        while len(pages) < count:
            pages += self._take_from_longest(count - len(pages))
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Frees pages, merging adjacent extents. The caller guarantees that they were allocated."""
        for page in pages:
            start, stop = page, page + 1
            if page in self._start_by_stop:
                start = self._start_by_stop[page]
                self._remove(start)
            if stop in self._length:
                length = self._length[stop]
                self._remove(stop)
                stop += length
            self._insert(start, stop - start)

    def _take_from_longest(self, count: int) -> list[int]:
        start = next(iter(next(sizes for sizes in reversed(self._sizes) if sizes)))
        length = self._length[start]
        if start == self._first or length < 2 * count:
            return self._take(start, count)
        middle = start + (length - count) // 2
        self._remove(start)
        self._insert(start, middle - start)
        self._insert(middle, start + length - middle)
        return self._take(middle, count)

    def _take(self, start: int, count: int) -> list[int]:
        """Up to `count` pages from the beginning of an extent."""
        length = self._length[start]
        taken = min(count, length)
        self._remove(start)
        self._insert(start + taken, length - taken)
        return list(range(start, start + taken))

    def _insert(self, start: int, length: int) -> None:
        if not length:
            return
        self._length[start] = length
        self._start_by_stop[start + length] = start
        self._sizes[length.bit_length()][start] = None
        self.num_free += length

    def _remove(self, start: int) -> None:
        length = self._length.pop(start)
        del self._start_by_stop[start + length]
        del self._sizes[length.bit_length()][start]
        self.num_free -= length
