"""What streamed weights have read, as plain data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class WeightReads:
    """Reads of layers for steps so far, from `tier`, "host" or "disk".

    A pass takes every layer once, for one step or for several that share its reads. `step_s` is the
    time from a pass's first layer until its last is done. Of it, the devices have waited `stall_s`
    for layers that were still being read. `num_bytes` are those that passes were given; `read_s` is
    the time of reads, which may overlap with passes and end before the next one.
    """

    tier: str
    num_passes: int = 0
    num_bytes: int = 0
    read_s: float = 0.0
    step_s: float = 0.0
    stall_s: float = 0.0

    @property
    def bytes_per_pass(self) -> float:
        return self.num_bytes / max(1, self.num_passes)

    @property
    def stall_share(self) -> float:
        """Share of the time of steps that the devices waited for layers, 0..1."""
        return self.stall_s / self.step_s if self.step_s else 0.0
