"""Several engines, each of which gets every n-th request: round robin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from jaxserve.core.events import Finished, Record
from jaxserve.core.steps.work import StepWork
from jaxserve.metrics.fluidity import Deadlines
from jaxserve.metrics.summaries import SequenceSummary
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.pool_use import PoolUse
from jaxserve.simulator.simulation import Arrival, Simulation
from jaxserve.simulator.step_times import StepTimes
from jaxserve.simulator.utilization import CountedTimes


@dataclasses.dataclass(frozen=True)
class SimulatedReplica:
    """One engine, and what is counted of it."""

    simulation: Simulation
    counted: CountedTimes
    pool: PoolUse

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        times: StepTimes,
        work: StepWork,
        deadlines: Deadlines,
        *,
        keep_events: bool = False,
        on_finished: Callable[[], None] = lambda: None,
    ) -> SimulatedReplica:
        """`on_finished` is called when a sequence has ended. Raises ConfigError for settings that
        are not simulated."""
        counted = CountedTimes(times, work)

        def finished(record: Record) -> None:
            if type(record) is Finished:
                on_finished()

        simulation = deployment.simulation(
            counted, deadlines, sinks=(finished,), keep_events=keep_events
        )
        return cls(simulation, counted, PoolUse(simulation.core.kv.pool, simulation.clock))

    def serve(self, arrivals: Iterable[Arrival]) -> None:
        """Serves arrivals, in order of time, to the end. Raises RequestError for one that can never
        run."""
        for _ in self.simulation.serve(arrivals):
            pass

    def summaries(self) -> list[SequenceSummary]:
        """Of all requests, in the order of their arrival."""
        return sorted(self.simulation.metrics.finished(), key=lambda s: int(s.request_id))


def shares(arrivals: Callable[[], Iterable[Arrival]], count: int) -> Iterator[Iterator[Arrival]]:
    """The arrivals of each replica; `arrivals` makes all of them, once for each."""
    return (islice(arrivals(), first, None, count) for first in range(count))
