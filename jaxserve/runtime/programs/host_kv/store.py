"""The pages of long sequences in host memory, and which of them steps read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.core.steps.counters import HostKVCopies
from jaxserve.models.loading.assemble import aligned_empty
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from pallas_kernels.page_copy.rows import elements_of_each
from pallas_kernels.paged_attention import Pages, RaggedBatch


class HostKVStore:
    """The host's pages in host memory, array by array as in the pool (with windows several layers
    share one), with the heads of all devices: the host attends to them where they are. All calls
    are between steps' programs."""

    def __init__(self, shapes: ProgramShapes) -> None:
        """Raises ConfigError when the host has no memory for them."""
        of_layer, staged = shapes.host_kv.pages.shapes, shapes.kv.staging(1, 1)
        try:
            self._arrays: list[Pages] = [
                jax.tree.map(lambda array: aligned_empty(array.shape, array.dtype), of_layer)
                for _ in shapes.kv.abstract
            ]
        except MemoryError:
            raise ConfigError(
                f"kv_on is 'host', but the host has no memory for {shapes.num_host_pages} pages of "
                f"{shapes.kv.whole_page_bytes} bytes; set host_kv_bytes to less."
            ) from None
        # The parts of a page's row in a staging array, as arrays [pages, devices, elements].
        self._devices = shapes.tensor
        self._parts = [
            [
                array.reshape(len(array), self._devices, -1).view(staged.dtype)
                for array in jax.tree.leaves(pages)
            ]
            for pages in self._arrays
        ]
        self._ends = (np.cumsum(elements_of_each([of_layer])) // self._devices).tolist()
        self._dtype, self._place = staged.dtype, staged.sharding
        self._group = shapes.host_group_pages
        self._host = shapes.host_kv.host
        self._on_host: dict[int, Pages] = {}
        self.copies = HostKVCopies()

    def write(self, array: int, pages: Sequence[int], staged: jax.Array) -> None:
        """Copies the first rows of gathered pages; waits for the device."""
        rows, start = np.asarray(staged)[: len(pages)], 0
        rows = rows.reshape(len(pages), self._devices, -1)
        for part, end in zip(self._parts[array], self._ends):
            part[list(pages)] = rows[..., start:end]
            start = end

    def page(self, array: int, page: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys [kv_heads, head_dim, page_size] and values [kv_heads, page_size, head_dim]."""
        pages = self._arrays[array]
        return pages.k[page], pages.v[page]

    def read(self, array: int, pages: Sequence[int]) -> jax.Array:
        """A group on the devices, or on its way there, padded."""
        group, start = np.zeros((self._group, self._devices, self._ends[-1]), self._dtype), 0
        for part, end in zip(self._parts[array], self._ends):
            group[: len(pages), :, start:end] = part[list(pages)]
            start = end
        self.copies.page_bytes += group.nbytes
        return jax.device_put(group.reshape(self._group, -1), self._place)

    def on_host(self, array: int) -> Pages:
        """All pages of an array, on the host's device and not copied: what is written later is in
        them."""
        if array not in self._on_host:
            pages = self._arrays[array]
            arrays = jax.tree.map(lambda part: jax.device_put(part, self._host), pages)
            for part, shared in zip(jax.tree.leaves(pages), jax.tree.leaves(arrays)):
                if shared.unsafe_buffer_pointer() != part.ctypes.data:
                    raise RuntimeError("JAX has copied KV on the host, which later writes change")
            self._on_host[array] = arrays
        return self._on_host[array]


class Group(NamedTuple):
    """Host pages that are attended to together, and which of them each row of a step has: int32
    [rows, group pages + 1], the places of its pages in the group, then their number."""

    pages: list[int]
    tables: np.ndarray


def groups_of(
    layout: StepLayout, step: FrozenPlan, kv_group: int, size: int, rows: range
) -> Iterator[Group]:
    """The host pages of some rows of a step, in groups of `size`; those of layers of a KV group."""
    on_host = layout.rows_on_host(step, kv_group)
    owned = [(row, page) for row, pages in on_host if row in rows for page in pages]
    for first in range(0, len(owned), size):
        some = owned[first : first + size]
        tables = np.zeros((layout.rows, size + 1), np.int32)
        for place, (row, _) in enumerate(some):
            tables[row, tables[row, size]] = place
            tables[row, size] += 1
        yield Group([page for _, page in some], tables)


def batch_on_host(
    layout: StepLayout, step: FrozenPlan, kv_group: int, rows: range
) -> RaggedBatch | None:
    """The rows of a step, with the host pages of some of them, those of layers of a KV group, and
    their tokens as the context; None if there are no such pages."""
    tables = np.zeros((layout.rows, layout.max_pages), np.int32)
    context = np.zeros(layout.rows, np.int32)
    for row, pages in layout.rows_on_host(step, kv_group):
        if row in rows:
            tables[row, : len(pages)] = pages
            context[row] = len(pages) * layout.page_size
    return RaggedBatch(tables, context, *layout.places(step)) if context.any() else None
