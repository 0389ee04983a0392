"""The engine core of a multi-host job: every host applies the same commands before each step."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from jaxserve.core.errors import DistributedError, JaxserveError
from jaxserve.core.requests.commands import AddRequest, Command
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.results import DispatchedStep, StepResults
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.replicated_log import LogEntry, ReplicatedLog
from jaxserve.engine.request import Request
from jaxserve.runtime.hardware.hosts import Hosts
from jaxserve.structured.grammar import Grammar

_T = TypeVar("_T")


def _cannot_join(action: list[Any], now_us: int) -> NoReturn:
    raise DistributedError(f"host 0 does {action[0]}, which this host cannot join")


class ReplicatedCore(EngineCore):
    """An EngineCore that replicates the steps and commands of host 0.

    A command is applied on the host that issues it, and logged. Before each step, host 0 writes an
    entry with its clock, commands and step times, and the other hosts apply the commands that they
    have not applied yet.
    """

    def __init__(self, *args: Any, hosts: Hosts) -> None:
        super().__init__(*args)
        self._hosts = hosts
        self.num_hosts = hosts.num_hosts
        self._replicated = ReplicatedLog(hosts)
        self._read: collections.deque[tuple[StepPlan, ...]] = collections.deque()
        self._num_agreed = itertools.count()
        self.joins: Callable[[list[Any], int], object] = _cannot_join

    @property
    def leads(self) -> bool:
        return self._replicated.leads

    @property
    def ended(self) -> bool:
        """Whether host 0 has closed its engine."""
        return self._replicated.ended

    def apply(self, command: Command, grammar: Grammar | None = None) -> Request | None:
        request = super().apply(command, grammar)
        self._replicated.add_command(command)
        return request

    def step(self, wait: bool = False) -> list[Request]:
        """As `EngineCore.step`. With `wait`, waits for host 0's next step without a timeout. Where
        host 0 does something jointly instead, so does this host.

        Raises DistributedError when the hosts have diverged, or another host failed.
        """
        with self._blamed():
            entry = self._next(wait)
            if entry is None:
                return []
            if entry.joint is not None:
                self.joins(entry.joint, entry.now_us)
                return []
            with self._hosts.bounded():
                return self._step(entry.now_us)

    def jointly(self, action: list[Any], run: Callable[[int], _T]) -> _T | None:
        """As `EngineCore.jointly`. Another host than 0 runs the steps of host 0 until that does
        this. Raises DistributedError as `step` does, also when host 0 does something else."""
        with self._blamed():
            while (entry := self._next(joint=action)) is not None:
                if entry.joint is None:
                    with self._hosts.bounded():
                        touched = self._step(entry.now_us)
                    self._touched |= {request.request_id: request for request in touched}
                    continue
                if entry.joint != action:
                    raise DistributedError(
                        f"host 0 does {entry.joint[0]} {entry.joint[1:]} where this host does "
                        f"{action[0]} {action[1:]}. Run the same script on every host."
                    )
                return run(entry.now_us)
        return None

    def agreed(self, value: Any) -> list[Any]:
        name = f"agreed/{next(self._num_agreed)}"
        return self._hosts.gather(name, value, "to agree")

    def _next(self, wait: bool = False, joint: list[Any] | None = None) -> LogEntry | None:
        """The next entry, with its commands applied; None when host 0 has closed its engine."""
        if self.ended:
            return None
        entry, commands = self._replicated.next_entry(self.log.now(), wait, joint)
        if self.ended:
            return None
        for command, applied in commands:
            self._follow(command, applied)
        for us in entry.step_times_us:
            self.scheduler.observe_step_time(self._read.popleft(), us)
        return entry

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        """An error that the loss of a host has caused names that host."""
        try:
            yield
        except JaxserveError:
            raise
        except BaseException as error:
            raise self._hosts.blame(error) or error from error

    def close(self, failed: bool = False) -> None:
        try:
            self._replicated.end(checked=not failed)
        finally:
            try:
                super().close(failed)
            finally:
                self._hosts.close()

    def _follow(self, command: Command, applied: bool) -> None:
        """Applies a command of host 0, unless this host has already `applied` it."""
        if not applied:
            if isinstance(command, AddRequest):
                self._input.skip_seed(command.params)
            super().apply(command)
        elif isinstance(command, AddRequest) and not self.leads:
            self._set_arrival(command)

    def _set_arrival(self, added: AddRequest) -> None:
        """Sets a request's arrival time to that on host 0, unless it has finished."""
        request = self.requests.get(added.request_id)
        if request is not None:
            for output in request.sequence_outputs:
                output.seq.arrival_us = added.arrival_us
                self.scheduler.set_priority(output.seq.seq_id, output.seq.priority)

    def _on_dispatched(self, plan: StepPlan) -> None:
        self._replicated.add_plan(plan)

    def _on_step_time(self, step: DispatchedStep, results: StepResults, us: int) -> None:
        """Logs the step time: every host's scheduler observes host 0's, from the next entry."""
        self._read.append(step.together)
        self._replicated.observe_step_time(us)
        self._replicated.add_tokens(results.token_ids)
