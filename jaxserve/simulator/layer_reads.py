"""What steps read from below the device, layer by layer: streamed weights, and KV on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.steps.plan import StepPlan
from jaxserve.kv.layout import TRANSFER_PAGES


@dataclasses.dataclass(frozen=True)
class LayerReads:
    """Reads that overlap with computing, which is on what has been read before: a pass through the
    layers takes as long as its reads or as what its steps compute, whichever is longer. Weights and
    KV pages share the link to the device.

    Attributes:
        weights_s: of reading the streamed layers once.
        page_s: of copying one KV page, all of its layers.
        latency_s: of as many copies as a page has layers, without their bytes.
        group_pages: host pages that are copied together; a group that is not full takes as long.
        steps: that pass through the layers together.
    """

    weights_s: float = 0.0
    page_s: float = 0.0
    latency_s: float = 0.0
    group_pages: int = 1
    steps: int = 1

    def pass_s(self, compute_s: float, plans: Sequence[StepPlan]) -> float:
        """Seconds of a pass of some steps, which compute for `compute_s`. Nothing is read for steps
        that compute nothing."""
        if not compute_s:
            return 0.0
        groups = sum(map(self._groups, plans))
        pages_s = groups * (self.latency_s + self.group_pages * self.page_s)
        return max(compute_s, self.weights_s + pages_s)

    def to_host_s(self, num_pages: int) -> float:
        """Seconds of copying so many pages to the host, which computing waits for."""
        return cdiv(num_pages, TRANSFER_PAGES) * self.latency_s + num_pages * self.page_s

    def _groups(self, plan: StepPlan) -> int:
        """Groups that a step copies: one may have pages of several sequences, of one KV group."""
        chunks = [chunk for chunk in (*plan.decodes, *plan.prefills) if chunk.host_pages]
        of_kv_groups = zip(*(chunk.host_pages for chunk in chunks))
        return sum(cdiv(sum(map(len, pages)), self.group_pages) for pages in of_kv_groups)
