"""Copies the KV of a request between simulated replicas in stages, as `StagedCopy` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from jaxserve.cluster.policies.copies import CopyCounts, CopyStages
from jaxserve.cluster.policies.dispatch import Demand, ReplicaLoad
from jaxserve.core.cluster_status import Role
from jaxserve.engine.request import Request
from jaxserve.kv.page_table import PageTable
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.replicas import SimulatedReplica
from jaxserve.simulator.simulation import Arrival

PREFILLED_S = 0.01
"""How often moves are planned, and copies look for more of a prompt, where replicas prefill; the
router is told at once."""


@dataclasses.dataclass
class OpenArrival:
    """A request that has not ended: where it is, and under which key it counts there."""

    number: int
    arrival: Arrival
    demand: Demand
    replica: CountedReplica
    key: Hashable
    request: Request
    moving: bool = False


class CountedReplica:
    """A replica, and its load as the router counts it. `index` is of all that there have been."""

    def __init__(
        self, index: int, simulated: SimulatedReplica, deployment: Deployment, role: Role
    ) -> None:
        self.index = index
        self.simulated = simulated
        self.simulation = simulated.simulation
        config = deployment.config
        num_pages = deployment.num_pages - 1
        self.load = ReplicaLoad(num_pages, config.page_size, config.max_num_seqs, role)
        self.requests: dict[Hashable, OpenArrival] = {}
        self.leaves = False


class SimulatedCopy:
    """The copy of one request, which runs on meanwhile and counts in its source as moving; but
    while its prompt is computed it does not count.

    Attributes:
        table: the pages that the request has in its destination.
    """

    def __init__(
        self,
        each: OpenArrival,
        destination: CountedReplica,
        key: Hashable,
        deployment: Deployment,
        counts: CopyCounts,
        after: Callable[[int, Callable[[], None]], None],
        ended: Callable[[bool], None],
    ) -> None:
        """`key`: what it counts under in its destination. `after` has something done in so many
        microseconds; `ended` is called with whether the request can move now."""
        self.table: PageTable | None = None
        self._each, self._source, self._destination = each, each.replica, destination
        self._key = key
        self._deployment = deployment
        self._after, self._ended = after, ended
        self._page_size = deployment.config.page_size
        self._stages = CopyStages(
            len(each.arrival.token_ids),
            self._page_size,
            counts,
            during_prefill=self._source.load.role == "prefill" and not each.demand.num_output,
        )
        self._source.load.num_moving += not self._stages.during_prefill

    def go_on(self) -> None:
        """Copies what is there, or waits for more of a prompt, or ends."""
        stages = self._stages
        if stages.during_prefill and self._each.demand.num_output:
            stages.during_prefill = False
            self._source.load.num_moving += 1
        if not self._is_wanted:
            self._end(False)
        elif not stages.during_prefill:
            if stages.goes_on(self._num_computed - stages.num_staged):
                self._stage()
            else:
                self._end(True)
        elif stages.wanted is None or self._num_computed < stages.wanted:
            self._after(round(PREFILLED_S * 1e6), self.go_on)
        else:
            self._stage()

    @property
    def _is_wanted(self) -> bool:
        return not (self._each.request.finished or self._destination.load.draining)

    @property
    def _num_computed(self) -> int:
        return self._source.simulation.num_staged(self._each.request)

    def _stage(self) -> None:
        """Copies what is there, once there is room: that of a prompt being computed, no more than
        is there by now."""
        stop = len(self._each.arrival.token_ids) + self._each.demand.num_output
        if self._stages.during_prefill:
            stop = self._num_computed
        incoming = self._destination.load.incoming_kv
        incoming.enter(self._key, self._stages.next(stop).num_pages, lambda: self._copy(stop))

    def _copy(self, stop: int) -> None:
        if not self._is_wanted:
            self._arrived()
            return
        stages, before, num_tokens = self._stages, self.table, min(self._num_computed, stop)
        self.table = self._destination.simulation.stage(self._each.request, num_tokens, before)
        if self.table is before:  # There is no room for more.
            stages.staged(stages.num_staged)
            self._arrived()
            return
        num_pages = stages.next(num_tokens).num_pages
        stages.staged(num_tokens)
        link_us = self._deployment.host_link.us(num_pages * self._deployment.page_bytes)
        self._after(2 * link_us, self._arrived)

    def _arrived(self) -> None:
        self._destination.load.incoming_kv.leave(self._key)
        self.go_on()

    def _end(self, moves: bool) -> None:
        self._source.load.num_moving -= not self._stages.during_prefill
        self._ended(moves)
