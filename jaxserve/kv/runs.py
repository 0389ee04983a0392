"""Free pages of one tier, kept as runs of consecutive numbers.

A sequence whose pages follow one another moves in few copies. After FastSwitch's block groups (Shen
et al. 2024): a request's pages come in runs for as long as there are any, and one by one in a pool
that is full.
"""

from __future__ import annotations

from collections.abc import Iterable


class RunAllocator:
    """Hands out page numbers `first .. stop - 1`. O(1) a run, and deterministic.

    Whoever asks for more pages than it has gets those that follow its last one if they are free. A
    newcomer starts in the middle of a large run, so that whoever ends where the run begins has room
    to grow as well.
    """

    def __init__(self, first: int, stop: int) -> None:
        self.num_free = 0
        self._length: dict[int, int] = {}
        self._start_by_stop: dict[int, int] = {}
        # Runs by the bit length of their length: the last that is not empty holds a longest one,
        # to within a factor of two.
        self._sizes: list[dict[int, None]] = [{} for _ in range((stop - first).bit_length() + 1)]
        self._first = first
        if stop > first:
            self._insert(first, stop - first)

    @property
    def num_runs(self) -> int:
        return len(self._length)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Takes `count` pages, the one that follows `after` first where it is free.

        The caller has looked at `num_free`.
        """
        pages: list[int] = []
        if after is not None and after + 1 in self._length:
            pages += self._take(after + 1, count)
        while len(pages) < count:
            pages += self._take_from_longest(count - len(pages))
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back, joining the runs they lie between. The caller knows they were taken."""
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
        """Up to `count` pages from the beginning of a run."""
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
