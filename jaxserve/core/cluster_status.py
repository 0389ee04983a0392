"""What each replica of an endpoint is, as reported by the router: plain data."""

from __future__ import annotations

import dataclasses
from typing import Literal

ReplicaState = Literal["ready", "draining", "loading", "failed"]
"""Draining: it gets no more requests, and those it has move or end. Failed: it is given up."""

Role = Literal["any", "prefill", "decode"]
"""Whether a replica computes prompts and the first token of each, all tokens after it, or both."""


@dataclasses.dataclass(frozen=True)
class ReplicaStatus:
    """One replica.

    Attributes:
        since_s: when it came into this state, in seconds since the epoch.
        process: where it runs, human-readable.
        model: name or path of the model.
        fingerprint: digest of the weights.
        version: that of jaxserve.
        num_used_pages: pages of its requests, as the router counts them, of its `num_pages`.
        num_finished: requests whose last token it has generated.
        num_losses: how often it was lost.
        sizes: its parallel sizes, human-readable.
    """

    index: int
    role: Role
    state: ReplicaState
    since_s: float
    process: str
    model: str
    fingerprint: str
    version: str
    num_requests: int
    num_sequences: int
    max_num_seqs: int
    num_used_pages: int
    num_pages: int
    num_finished: int
    num_losses: int
    sizes: str


@dataclasses.dataclass(frozen=True)
class RestartStatus:
    """A rolling restart: `num_restarted` of `num_replicas` serve in a new process. `error`: why it
    ended before the last one."""

    running: bool
    num_restarted: int
    num_replicas: int
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class ResizeStatus:
    """A replica that gets another mesh, of these parallel `sizes`. `num_kept` requests waited for
    it with their KV, and continued `took_s` seconds after it began. Of the KV of `num_cut` there
    was no room for all, or any, which is computed again. `error`: why it was not resized.
    """

    running: bool
    replica: int
    sizes: str
    num_kept: int
    took_s: float
    error: str | None = None
    num_cut: int = 0


@dataclasses.dataclass(frozen=True)
class ScalingStatus:
    """Bounds of the number of replicas, and how many were added and removed since the start."""

    min_replicas: int
    max_replicas: int
    num_added: int
    num_removed: int


@dataclasses.dataclass(frozen=True)
class ClusterStatus:
    """All replicas, the latest rolling restart and the latest resize, if there was one, and what
    autoscaling has done, if their number changes."""

    replicas: tuple[ReplicaStatus, ...]
    restart: RestartStatus | None
    scaling: ScalingStatus | None = None
    resize: ResizeStatus | None = None
