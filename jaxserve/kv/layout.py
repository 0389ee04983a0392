"""KV groups: layers with the same attention window share a page table, and all pages are alike.

A page holds `page_size` tokens of one group. Groups take pages from one pool, so all pages have the
same size: that of the group with the most layers. The i-th layer of every group is stored in the
i-th array of pages, under its group's page numbers (as in vLLM's hybrid KV cache;
docs/decisions/012-kv-groups.md).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.model_config import KVSpec

MAX_GROUPS = 8
"""More groups would fill their pages better, and cost the host more page tables."""

TRANSFER_SIZES = (1, 4, 16)
"""Staging array sizes in pages; gather and scatter programs exist for each size."""

TRANSFER_PAGES = TRANSFER_SIZES[-1]
"""Maximum pages per transfer and per staging buffer."""


def staged_pages(count: int) -> int:
    """Pages copied to transfer `count` pages: staging arrays are padded to TRANSFER_SIZES."""
    whole, rest = divmod(count, TRANSFER_PAGES)
    return whole * TRANSFER_PAGES + (rest and next(size for size in TRANSFER_SIZES if size >= rest))


class KVPlace(NamedTuple):
    """Where a layer's KV is: its group, and which of the arrays of pages."""

    group: int
    array: int


@dataclasses.dataclass(frozen=True)
class KVGroup:
    """Layers, by index, that keep the KV of the same tokens: the last `window`, None for all."""

    window: int | None
    layers: tuple[int, ...] = ()

    def first_page(self, position: int, page_size: int) -> int:
        """Index of the first page that the token at `position`, or any after it, reads."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // page_size

    def first_held(self, start: int, page_size: int) -> int:
        """Index of the first page that a sequence holds while it computes tokens from `start` on:
        it keeps what is read from the beginning of their page, where it continues after a
        preemption."""
        return self.first_page(start - start % page_size, page_size)

    def most_pages(self, num_tokens: int, max_chunk: int, page_size: int) -> int:
        """The most pages that a sequence of `num_tokens` tokens holds at a time, if a step computes
        at most `max_chunk` of them: those of a window, and of a chunk that begins anywhere."""
        pages = cdiv(num_tokens, page_size)
        if self.window is None:
            return pages
        window, chunk = (cdiv(tokens - 1, page_size) for tokens in (self.window, max_chunk))
        return min(pages, window + chunk + 1)


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The KV groups of a model, full attention first, and what they need."""

    page_size: int
    groups: tuple[KVGroup, ...] = (KVGroup(None),)
    max_chunk: int = 1
    """The most tokens of a sequence that a step computes."""

    @classmethod
    def of(
        cls,
        specs: Sequence[KVSpec],
        page_size: int,
        max_model_len: int,
        max_chunk: int,
        keeps_windows: bool = False,
    ) -> KVLayout:
        """The groups with which a sequence of `max_model_len` tokens takes the fewest bytes, of
        those the fewest groups. A window as long as the context is none.

        `keeps_windows`: no layer with a window is in a group without one, even if that costs no
        more.
        """
        windows = [
            None if spec.window is None or spec.window >= max_model_len else spec.window
            for spec in specs
        ]

        def layouts(windows: Sequence[int | None]) -> list[KVLayout]:
            kinds = sorted(set(windows), key=lambda window: (window is not None, window))
            by_kind = [
                (kind, [layer for layer, window in enumerate(windows) if window == kind])
                for kind in kinds
            ]
            sizes = range(1, len(windows) + 1)
            return [
                cls(
                    page_size,
                    tuple(
                        KVGroup(kind, tuple(layers[first : first + size]))
                        for kind, layers in by_kind
                        for first in range(0, len(layers), size)
                    ),
                    max_chunk,
                )
                for size in sizes
                if sum(cdiv(len(layers), size) for _, layers in by_kind)
                <= max(MAX_GROUPS, len(kinds))
            ]

        def cost(layout: KVLayout) -> tuple[int, int]:
            return layout.pages_for(max_model_len) * layout.layers_per_page, len(layout.groups)

        whole = [] if keeps_windows else layouts([None] * len(windows))
        return min([*whole, *layouts(windows)], key=cost)

    @property
    def windowed(self) -> bool:
        """Whether sequences give back pages, or have more than one page table."""
        return len(self.groups) > 1 or self.groups[0].window is not None

    @property
    def num_full(self) -> int:
        """Groups without a window, which are the first ones."""
        return sum(group.window is None for group in self.groups)

    @property
    def window_pages(self) -> int:
        """The most pages that a sequence holds at a time in the groups with a window."""
        size, endless = self.page_size, 1 << 62
        windowed = self.groups[self.num_full :]
        return sum(group.most_pages(endless, self.max_chunk, size) for group in windowed)

    @property
    def chunk_pages(self) -> int:
        """The most pages that a step's tokens of one sequence lie on."""
        return cdiv(self.max_chunk - 1, self.page_size) + 1

    @property
    def layers_per_page(self) -> int:
        """Layers that a page has room for."""
        return max(len(group.layers) for group in self.groups)

    @property
    def places(self) -> tuple[KVPlace, ...]:
        """Where each layer's KV is."""
        places = {
            layer: KVPlace(number, array)
            for number, group in enumerate(self.groups)
            for array, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(len(places)))

    def pages_for(self, num_tokens: int) -> int:
        """The most pages that a sequence of `num_tokens` tokens holds at a time."""
        return sum(
            group.most_pages(num_tokens, self.max_chunk, self.page_size) for group in self.groups
        )

    def pages_at(self, start: int, stop: int) -> int:
        """Pages that a sequence holds while it computes the tokens start .. stop - 1."""
        pages = cdiv(stop, self.page_size)
        return sum(pages - group.first_held(start, self.page_size) for group in self.groups)

    def longest(self, num_pages: int, max_model_len: int) -> int:
        """The most tokens, up to `max_model_len` and rounded up to whole pages, of one sequence
        that holds at most `num_pages` pages."""
        pages = range(1, cdiv(max_model_len, self.page_size) + 1)
        size = self.page_size
        return size * bisect_right(pages, num_pages, key=lambda page: self.pages_for(page * size))
