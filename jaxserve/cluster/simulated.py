"""Simulated replicas behind a router: the policies that serve, on one virtual clock.

Dispatch, moves, pulls of prefixes and autoscaling are those of `Router`, with its periods. The
router knows what each replica has done until now; messages take no time, and KV takes that of its
bytes over two links of the hosts, out of one and into the other. Unlike the router, it does not
count the pages of answers as cached, whose tokens are made up here.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence

from jaxserve.cluster.fair_sharing import PERIOD_S as SHARE_PERIOD_S
from jaxserve.cluster.mover import PERIOD_S as MOVE_PERIOD_S
from jaxserve.cluster.policies.autoscale import Autoscaler
from jaxserve.cluster.policies.copies import CopyCounts, CopyStages
from jaxserve.cluster.policies.dispatch import Demand, ReplicaLoad, dispatch
from jaxserve.cluster.policies.fairness import FairShares
from jaxserve.cluster.policies.migration import Move, begin_moves
from jaxserve.cluster.policies.prefixes import page_hashes
from jaxserve.cluster.policies.pulls import Pull, Pulls, plan_pull
from jaxserve.cluster.pool.scaling import PERIOD_S as SCALE_PERIOD_S
from jaxserve.core.cluster_status import Role
from jaxserve.engine.request import Request
from jaxserve.kv.page_table import PageTable
from jaxserve.metrics.fluidity import Deadlines, fluidity
from jaxserve.metrics.summaries import SequenceSummary
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.replicas import SimulatedReplica
from jaxserve.simulator.simulation import Arrival

_PREFILLED_S = 0.01
"""How often moves are planned where replicas prefill; the router does so at each first token."""


@dataclasses.dataclass
class _Open:
    """A request that has not ended: where it is, and under which key it counts there."""

    number: int
    arrival: Arrival
    demand: Demand
    replica: _RouterReplica
    key: Hashable
    request: Request
    moving: bool = False


class _RouterReplica:
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
        self.requests: dict[Hashable, _Open] = {}
        self.leaves = False


class SimulatedCluster:
    """Like engines behind one router.

    Attributes:
        replicas: all that there have been.
        num_moved: requests that moved, with what KV they had.
        copies: what was copied of requests that move.
        pulls: those of prefixes from other replicas.
        num_added, num_removed: replicas, after the first ones.
        replica_us: microseconds that replicas were there, in all.
    """

    def __init__(
        self,
        deployment: Deployment,
        new_replica: Callable[[], SimulatedReplica],
        count: int,
        scaler: Autoscaler | None = None,
        load_us: int = 0,
        *,
        num_prefill: int = 0,
        moves: bool = True,
        pulls: bool = True,
    ) -> None:
        """`count` replicas from the start, and more by `scaler`, each of which takes `load_us` to
        begin. If not 0, the first `num_prefill` only prefill, and the others decode. Without
        `moves` a request stays where it was dispatched to, and without `pulls` it computes what
        other replicas have cached."""
        self.replicas: list[SimulatedReplica] = []
        self.num_moved = self.num_added = self.num_removed = self.replica_us = 0
        self._num_pulling = 0
        self.copies, self.pulls, self._shares_prefixes = CopyCounts(), Pulls(), pulls
        self._shares = FairShares()
        self._deployment = deployment
        self._new_replica = new_replica
        self._scaler = scaler
        self._load_us = load_us
        self._now_us = 0
        self._present: list[_RouterReplica] = []
        self._open: dict[int, _Open] = {}
        self._hops: dict[int, list[tuple[SimulatedReplica, str]]] = {}
        self._arrivals: list[Arrival] = []
        self._numbers = itertools.count()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        for number in range(count):
            role: Role = "prefill" if number < num_prefill else "decode"
            self._add(role if num_prefill else "any")
        if moves:
            self._every(_PREFILLED_S if num_prefill else MOVE_PERIOD_S, self._begin_moves)
        if deployment.config.fair_share:
            self._every(SHARE_PERIOD_S, self._share)
        if scaler is not None:
            self._every(SCALE_PERIOD_S, self._scale)

    def serve(self, arrivals: Iterable[Arrival]) -> None:
        """Serves arrivals, in order of time, to the end. Raises RequestError for one that can never
        run."""
        for arrival in arrivals:
            self._run_to(arrival.time_us)
            self._dispatch(arrival)
        while self._open or self._num_pulling:
            self._run_to(self._now_us + round(MOVE_PERIOD_S * 1e6))
        self.replica_us += self._now_us * len(self._present)

    @property
    def mean_replicas(self) -> float:
        """How many replicas there were, on average over time."""
        return self.replica_us / max(1, self._now_us)

    def summaries(self, deadlines: Deadlines) -> list[SequenceSummary]:
        """Of all requests, in the order of their arrival."""
        ended = {
            (id(replica), summary.request_id): summary
            for replica in self.replicas
            for summary in replica.simulation.metrics.finished()
        }
        return [
            _joined(arrival, [ended[id(r), name] for r, name in self._hops[number]], deadlines)
            for number, arrival in enumerate(self._arrivals)
        ]

    def _every(self, period_s: float, act: Callable[[], None]) -> None:
        period_us = round(period_s * 1e6)

        def acted() -> None:
            act()
            self._at(self._now_us + period_us, acted)

        self._at(self._now_us + period_us, acted)

    def _at(self, time_us: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_us, next(self._numbers), act))

    def _run_to(self, time_us: int) -> None:
        """Whatever happens until then."""
        while self._events and self._events[0][0] <= time_us:
            next_us, _, act = heapq.heappop(self._events)
            self._advance(next_us)
            act()
        self._advance(time_us)

    def _advance(self, time_us: int) -> None:
        self._now_us = time_us
        for replica in list(self._present):
            replica.simulation.run_to(time_us)
            for key, each in list(replica.requests.items()):
                num_output = len(each.request.sequence_outputs[0].seq.output_token_ids)
                if num_output > each.demand.num_output:
                    replica.load.grow(key, num_output - each.demand.num_output)
                    each.demand = replica.load.demands[key]
                if each.request.finished:
                    self._leave(each)
                    del self._open[each.number]

    def _dispatch(self, arrival: Arrival) -> None:
        config = self._deployment.config
        hashes = None
        if config.enable_prefix_caching:
            hashes = page_hashes(arrival.token_ids, config.page_size, arrival.tenant, None)
        priority = arrival.params.priority if arrival.priority is None else arrival.priority
        num_tokens, page_size = len(arrival.token_ids), config.page_size
        demand = Demand.of(num_tokens, hashes, page_size, arrival.params.n, priority)
        index = dispatch(self._loads, demand)
        assert index is not None, "the first replicas are ready, and one of them always is"
        replica, number = self._present[index], len(self._arrivals)
        self._arrivals.append(arrival)
        pull = plan_pull(self._loads, index, demand) if self._shares_prefixes else None
        key = (number, 0)
        replica.load.add(key, demand)
        if pull is None or not self._begin_pull(pull, replica, arrival, number, demand):
            self._begin(replica, arrival, number, demand)

    def _begin(
        self, replica: _RouterReplica, arrival: Arrival, number: int, demand: Demand
    ) -> None:
        """A replica gets a request, which counts there already."""
        request = replica.simulation.add(arrival, self._now_us)
        each = _Open(number, arrival, demand, replica, (number, 0), request)
        self._open[number] = each
        self._enter(each)

    def _begin_pull(
        self, pull: Pull, replica: _RouterReplica, arrival: Arrival, number: int, demand: Demand
    ) -> bool:
        """Begins to copy a prefix to a replica, which then gets the request; False if computing it
        takes less time."""
        source, page_size = self._present[pull.source], self._deployment.config.page_size
        start, stop = pull.span(page_size)
        compute_us = replica.simulation.core.kv.rates.prefill_us(start, stop)
        if not self.pulls.pays(pull.num_pages, compute_us):
            return False
        token_ids, tenant = arrival.token_ids, arrival.tenant
        num_known = source.simulation.num_cached(token_ids, tenant, stop)
        num_pages = num_known // page_size
        link_us = self._deployment.host_link.us(num_pages * self._deployment.page_bytes)
        pull_us = 2 * link_us if num_pages else 0
        incoming, key = replica.load.incoming_kv, (number, 0)
        source.load.num_pulled += 1
        self._num_pulling += 1

        def copied() -> None:
            incoming.leave(key)
            source.load.num_pulled -= 1
            self._num_pulling -= 1
            if num_pages:
                num_tokens = replica.simulation.take_prefix(
                    token_ids, tenant, num_pages * page_size
                )
                self.pulls.pulled(pull, num_tokens, page_size, pull_us)
            self._begin(replica, arrival, number, demand)

        incoming.enter(key, num_pages, lambda: self._at(self._now_us + pull_us, copied))
        return True

    def _enter(self, each: _Open) -> None:
        each.replica.requests[each.key] = each
        self._hops.setdefault(each.number, []).append(
            (each.replica.simulated, each.request.request_id)
        )

    def _leave(self, each: _Open) -> None:
        each.replica.load.remove(each.key)
        del each.replica.requests[each.key]

    @property
    def _loads(self) -> list[ReplicaLoad]:
        return [replica.load for replica in self._present]

    # Moves

    def _begin_moves(self) -> None:
        def movable(index: int, key: Hashable) -> bool:
            each = self._present[index].requests.get(key)  # None for one that is on its way there.
            return each is not None and not each.moving

        def begin(move: Move) -> None:
            each = self._present[move.source].requests[move.key]
            self._move(each, self._present[move.destination])

        begin_moves(self._loads, movable, begin)

    def _move(self, each: _Open, destination: _RouterReplica) -> None:
        """Begins to copy the KV of a request in stages; it runs on meanwhile."""
        source, key = each.replica, (each.number, len(self._hops[each.number]))
        destination.load.add(key, each.demand)  # Its pages are taken from now on.
        each.moving = True
        page_size = self._deployment.config.page_size
        stages = CopyStages(
            len(each.arrival.token_ids),
            page_size,
            self.copies,
            during_prefill=source.load.role == "prefill" and not each.demand.num_output,
        )
        source.load.num_moving += not stages.during_prefill
        incoming = destination.load.incoming_kv
        table: PageTable | None = None

        def num_computed() -> int:
            return source.simulation.num_staged(each.request)

        def go_on() -> None:
            """Copies what is there, or waits for more of a prompt, or has the request move."""
            if stages.during_prefill and each.demand.num_output:
                stages.during_prefill = False
                source.load.num_moving += 1
            if each.request.finished or destination.load.draining:
                end(False)
            elif not stages.during_prefill:
                if stages.goes_on(num_computed() - stages.num_staged):
                    stage()
                else:
                    end(True)
            elif stages.wanted is None or num_computed() < stages.wanted:
                self._at(self._now_us + round(_PREFILLED_S * 1e6), go_on)
            else:
                stage()

        def stage() -> None:
            """Copies what is there, once there is room: that of a prompt being computed, no more
            than is there by now."""
            stop = len(each.arrival.token_ids) + each.demand.num_output
            if stages.during_prefill:
                stop = num_computed()
            incoming.enter(key, stages.next(stop).num_pages, lambda: copy(stop))

        def copy(stop: int) -> None:
            nonlocal table
            if each.request.finished or destination.load.draining:
                arrived()
                return
            before, num_tokens = table, min(num_computed(), stop)
            table = destination.simulation.stage(each.request, num_tokens, before)
            if table is before:  # There is no room for more.
                stages.staged(stages.num_staged)
                arrived()
                return
            num_pages = stages.next(num_tokens).num_pages
            stages.staged(num_tokens)
            link_us = self._deployment.host_link.us(num_pages * self._deployment.page_bytes)
            self._at(self._now_us + 2 * link_us, arrived)

        def arrived() -> None:
            incoming.leave(key)
            go_on()

        def end(moves: bool) -> None:
            destination.load.remove(key)
            each.moving = False
            source.load.num_moving -= not stages.during_prefill
            if not moves:
                destination.simulation.unstage(table)
                return
            left = each.request
            each.request = destination.simulation.resume(left, table, self._now_us)
            source.simulation.abort(left)
            self._leave(each)
            each.replica, each.key = destination, key
            destination.load.add(key, each.demand)
            self._enter(each)
            self.num_moved += 1

        go_on()

    # Fairness

    def _share(self) -> None:
        """Has all queues know what each tenant was served everywhere."""
        counters = dict(self._shares.counters)
        for replica in self._present:
            queue = replica.simulation.scheduler.waiting
            self._shares.exchange(replica.index, *queue.exchange(counters))

    # Autoscaling

    def _add(self, role: Role = "any") -> _RouterReplica:
        index = len(self.replicas)
        replica = _RouterReplica(index, self._new_replica(), self._deployment, role)
        self.replicas.append(replica.simulated)
        self._present.append(replica)
        self.replica_us -= self._now_us
        return replica

    def _scale(self) -> None:
        assert self._scaler is not None
        leaving = next((replica for replica in self._present if replica.leaves), None)
        if leaving is not None:
            self._end(leaving)
            return
        decision = self._scaler.decide(self._loads, self._now_us / 1e6)
        if decision == "add":
            replica = self._add()
            replica.load.draining = True
            self.num_added += 1
            self._at(self._now_us + self._load_us, lambda: setattr(replica.load, "draining", False))
        elif decision is not None:
            replica = self._present[decision.replica]
            replica.leaves = replica.load.draining = True

    def _end(self, replica: _RouterReplica) -> None:
        """Removes a replica that has drained, or has it serve again when the others fill up."""
        if self._scaler.are_full([each.load for each in self._present if each is not replica]):
            replica.leaves = replica.load.draining = False
        elif not replica.load.demands:
            self._present.remove(replica)
            self._shares.keep({each.index for each in self._present})
            self.replica_us += self._now_us
            self.num_removed += 1


def _joined(
    arrival: Arrival, parts: Sequence[SequenceSummary], deadlines: Deadlines
) -> SequenceSummary:
    """The summary of a request from those of the replicas that it was in."""
    first, last = parts[0], parts[-1]
    # A step that was going on when the request left may have ended after it came.
    token_us = tuple(
        itertools.accumulate(itertools.chain.from_iterable(p.token_us for p in parts), max)
    )
    prefill_us = deadlines.prefill_us(first.prompt_tokens)
    return first._replace(
        arrival_us=arrival.time_us,
        admitted_us=next(p.admitted_us for p in parts if p.admitted_us is not None),
        first_token_us=token_us[0],
        last_token_us=token_us[-1],
        finish_us=last.finish_us,
        finish_reason=last.finish_reason,
        cached_tokens=next(p.cached_tokens for p in parts if p.admitted_us is not None),
        output_tokens=len(token_us),
        preemptions=sum(part.preemptions for part in parts),
        fluidity=fluidity(arrival.time_us, token_us, prefill_us, deadlines.decode_us),
        token_us=token_us,
    )
