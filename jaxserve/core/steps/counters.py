"""What a runner counts other than its steps, as plain data."""

from __future__ import annotations

import dataclasses

import numpy as np


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


@dataclasses.dataclass
class HostKVCopies:
    """Bytes copied so far between the device and the host for KV on the host: whole pages to the
    device, and queries to the host with their results back."""

    page_bytes: int = 0
    query_bytes: int = 0


@dataclasses.dataclass
class RecallCounts:
    """Chunks of values, each of one KV head of a layer and of `chunk_bytes`, that decodes have
    attended to so far, and those of them that were copied from the host. The others were on the
    device, as the decode before had attended to them too."""

    chunk_bytes: int
    attended: int = 0
    copied: int = 0

    @property
    def copied_share(self) -> float:
        """Share of the chunks that were copied, 0..1."""
        return self.copied / max(1, self.attended)


@dataclasses.dataclass
class SparseReads:
    """Tokens on the host, each of one KV head of a layer, that decodes have chosen from so far, and
    those that they have attended to."""

    tokens: int = 0
    attended: int = 0

    @property
    def share(self) -> float:
        """Share of the tokens that were attended to, 0..1."""
        return self.attended / max(1, self.tokens)


@dataclasses.dataclass
class ExpertLoads:
    """Tokens of steps so far that took each expert, int64 [sparse layers, experts]: those that were
    computed, drafts and recomputed tokens included."""

    tokens: np.ndarray

    @classmethod
    def of(cls, num_layers: int, num_experts: int) -> ExpertLoads:
        return cls(np.zeros((num_layers, num_experts), np.int64))

    def add(self, counts: np.ndarray) -> None:
        """The counts of one step."""
        self.tokens += counts

    @property
    def by_expert(self) -> list[int]:
        """Tokens of each expert, over all layers."""
        return self.tokens.sum(axis=0).tolist()

    @property
    def balancedness(self) -> float:
        """Tokens of an average expert by those of the most loaded one, the mean over layers, 0..1;
        1 is even, and what there is before any token."""
        most = self.tokens.max(axis=1)
        return float(np.where(most > 0, self.tokens.mean(axis=1) / np.maximum(most, 1), 1).mean())


@dataclasses.dataclass(frozen=True)
class RuntimeCounters:
    """All of them, which grow as steps are read; None for what an engine does not have.

    Attributes:
        weight_reads: of streamed weights.
        host_kv_copies: with KV on the host.
        recall_counts: of decodes with compressed KV.
        sparse_reads: of decodes by SparF.
        expert_loads: of a mixture of experts, where its layers do not run in parts.
    """

    weight_reads: WeightReads | None = None
    host_kv_copies: HostKVCopies | None = None
    recall_counts: RecallCounts | None = None
    sparse_reads: SparseReads | None = None
    expert_loads: ExpertLoads | None = None
