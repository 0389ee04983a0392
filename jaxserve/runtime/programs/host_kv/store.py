"""The pages of long sequences in host memory, and which of them steps read together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.runtime.programs.shapes.program import ProgramShapes


class HostKVStore:
    """The host's pages, layer by layer, in host memory. All calls are between steps' programs."""

    def __init__(self, shapes: ProgramShapes) -> None:
        """Raises ConfigError when the host has no memory for them."""
        staged = shapes.kv.staging(1, 1)
        shape = (len(shapes.kv.abstract), shapes.num_host_pages, staged.shape[1])
        try:
            self._pages = np.empty(shape, staged.dtype)
        except MemoryError:
            raise ConfigError(
                f"kv_on is 'host', but the host has no memory for {shapes.num_host_pages} pages of "
                f"{shapes.kv.whole_page_bytes} bytes; set host_kv_bytes to less."
            ) from None
        self._place = staged.sharding
        self._group = shapes.host_group_pages

    def write(self, layer: int, pages: Sequence[int], staged: jax.Array) -> None:
        """Copies the first rows of gathered pages; waits for the device."""
        self._pages[layer, list(pages)] = np.asarray(staged)[: len(pages)]

    def page(self, layer: int, page: int) -> np.ndarray:
        """The elements of a page."""
        return self._pages[layer, page]

    def read(self, layer: int, pages: Sequence[int]) -> jax.Array:
        """A group on the device, or on its way there, padded."""
        group = np.zeros((self._group, self._pages.shape[2]), self._pages.dtype)
        np.take(self._pages[layer], pages, axis=0, out=group[: len(pages)])
        return jax.device_put(group, self._place)


class Group(NamedTuple):
    """Host pages that are attended to together, and which of them each row of a step has: int32
    [rows, group pages + 1], the places of its pages in the group, then their number."""

    pages: list[int]
    tables: np.ndarray


def groups_of(
    layout: StepLayout, step: FrozenPlan, size: int, first_row: int = 0
) -> Iterator[Group]:
    """The host pages of the rows of a step from `first_row` on, in groups of `size`."""
    rows = layout.rows_on_host(step)
    owned = [(row, page) for row, pages in rows if row >= first_row for page in pages]
    for first in range(0, len(owned), size):
        some = owned[first : first + size]
        tables = np.zeros((layout.rows, size + 1), np.int32)
        for place, (row, _) in enumerate(some):
            tables[row, tables[row, size]] = place
            tables[row, size] += 1
        yield Group([page for _, page in some], tables)
