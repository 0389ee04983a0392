"""The mean value of each sequence's tokens on the host, for SparF."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.core.steps.counters import SparseReads
from jaxserve.runtime.planning.sparf import SparFSizes
from jaxserve.runtime.programs.host_kv.store import HostKVStore
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan


@dataclasses.dataclass
class _Summed:
    """Sums of the values of a sequence's first `pages` host pages, float64 [layers, kv_heads,
    head_dim]."""

    pages: int
    sums: np.ndarray


class MeanValues:
    """Of all sequences, by their slots: pages are summed up once, as they come."""

    def __init__(self, sizes: SparFSizes, page_size: int, store: Callable[[], HostKVStore]) -> None:
        """`store()` has the host's pages."""
        self._sizes, self._page_size, self._store = sizes, page_size, store
        self._summed: dict[int, _Summed] = {}
        self.reads = SparseReads()

    def begin_step(self, step: FrozenPlan, rows: int) -> np.ndarray:
        """Mean values of the decodes, float32 [layers, rows, kv_heads, head_dim]. A prompt makes
        what was in its slot invalid."""
        for prefill in step.prefills:
            self._summed.pop(prefill.slot, None)
        sizes = self._sizes
        means = np.zeros((sizes.num_layers, rows, sizes.kv_heads, sizes.head_dim), np.float32)
        for row, (slot, pages) in enumerate(zip(step.slots, step.pages_on_host(0))):
            if pages:
                tokens = len(pages) * self._page_size
                means[:, row] = self._sums(slot, pages) / tokens
                heads = sizes.num_layers * sizes.kv_heads
                self.reads.tokens += heads * tokens
                self.reads.attended += heads * min(tokens, sizes.selected)
        return means

    def _sums(self, slot: int, pages: Sequence[int]) -> np.ndarray:
        sizes = self._sizes
        if slot not in self._summed:
            shape = sizes.num_layers, sizes.kv_heads, sizes.head_dim
            self._summed[slot] = _Summed(0, np.zeros(shape))
        own = self._summed[slot]
        for page in pages[own.pages :]:
            for layer, total in enumerate(own.sums):
                _, values = self._store().page(layer, page)
                total += values.astype(np.float32).sum(axis=1)
        own.pages = len(pages)
        return own.sums
