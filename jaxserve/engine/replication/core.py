"""The engine core of a multi-host job: every host applies the same commands before each step."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from jaxserve.core.commands import AddRequest, Command
from jaxserve.core.errors import (
    DistributedError,
    JaxserveError,
    OverloadedError,
    SnapshotError,
)
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.results import DispatchedStep, StepResults
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.replication.log import LogEntry, ReplicatedLog
from jaxserve.engine.request import Request
from jaxserve.runtime.hardware.hosts import Hosts
from jaxserve.structured.grammar import Grammar

_T = TypeVar("_T")


def _cannot_join(action: list[Any], now_us: int) -> NoReturn:
    raise DistributedError(f"host 0 does {action[0]}, which this host cannot join")


class ReplicatedCore:
    """Has an EngineCore replicate the steps and commands of host 0. All commands and steps of a
    multi-host job go through it.

    A command is applied on the host that issues it, and logged. Before each step, host 0 writes an
    entry with its clock, commands and step times, and the other hosts apply the commands that they
    have not applied yet.

    `on_collective` is called with the collective action of host 0, and the time, on a host that
    follows; `stopped` with an error of `collectively` that leaves this host out of step.
    """

    def __init__(self, core: EngineCore, input_processor: InputProcessor, hosts: Hosts) -> None:
        self._core = core
        core.observer = self
        self._input = input_processor
        self._hosts = hosts
        self._replicated = ReplicatedLog(hosts)
        self._read: collections.deque[tuple[StepPlan, ...]] = collections.deque()
        self._num_gathered = itertools.count()
        self.on_collective: Callable[[list[Any], int], object] = _cannot_join
        self.stopped: Callable[[BaseException], object] = lambda error: None

    @property
    def leads(self) -> bool:
        """Whether this is host 0."""
        return self._replicated.leads

    @property
    def ended(self) -> bool:
        """Whether host 0 has closed its engine."""
        return self._replicated.ended

    def apply(self, command: Command, grammar: Grammar | None = None) -> Request | None:
        """As `EngineCore.apply`, for a command that hosts exchange."""
        request = self._core.apply(command, grammar)
        self._replicated.add_command(command)
        return request

    def step(self, wait: bool = False) -> list[Request]:
        """As `EngineCore.step`. With `wait`, waits for host 0's next step without a timeout. Where
        host 0 does something collectively instead, so does this host.

        Raises DistributedError when the hosts have diverged, or another host failed.
        """
        with self._blamed():
            entry = self._next(wait)
            if entry is None:
                return []
            if entry.joint is not None:
                self.on_collective(entry.joint, entry.now_us)
                return []
            with self.with_timeout():
                return self._core.step(entry.now_us)

    def collectively(self, action: list[Any], run: Callable[[int], _T]) -> _T | None:
        """What `run` returns, given the time. All hosts do this `action`, which is plain data, at
        the same place among their steps; those that follow do it by `on_collective`. Another host
        than 0 runs the steps of host 0 until that does this; None if its engine has ended
        meanwhile.

        Raises DistributedError as `step` does, also when host 0 does something else. SnapshotError
        and OverloadedError are those of `run`, which all hosts raise; any other error stops the
        engine.
        """
        try:
            with self._blamed():
                while (entry := self._next(joint=action)) is not None:
                    if entry.joint is None:
                        with self.with_timeout():
                            self._core.report_again(self._core.step(entry.now_us))
                        continue
                    if entry.joint != action:
                        raise DistributedError(
                            f"host 0 does {entry.joint[0]} {entry.joint[1:]} where this host does "
                            f"{action[0]} {action[1:]}. Run the same script on every host."
                        )
                    return run(entry.now_us)
        except (SnapshotError, OverloadedError):
            raise
        except BaseException as error:
            self.stopped(error)
            raise
        return None

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all hosts within `collectively`, plain data, in order of hosts."""
        number = next(self._num_gathered)
        values = self._hosts.gather(f"gathered/{number}", value, "to agree")
        if number:  # Who has given this value has read those before.
            self._hosts.forget(f"gathered/{number - 1}")
        return values

    def with_timeout(self) -> contextlib.AbstractContextManager[None]:
        """As `Hosts.with_timeout`: for waits for other hosts' devices within `collectively`."""
        return self._hosts.with_timeout()

    def close(self, failed: bool = False) -> None:
        """As `EngineCore.close`; on host 0 it ends the job."""
        try:
            self._replicated.end(checked=not failed)
        finally:
            try:
                self._core.close(failed)
            finally:
                self._hosts.close()

    def _next(self, wait: bool = False, joint: list[Any] | None = None) -> LogEntry | None:
        """The next entry, with its commands applied; None when host 0 has closed its engine."""
        if self.ended:
            return None
        entry, commands = self._replicated.next_entry(self._core.log.now(), wait, joint)
        if self.ended:
            return None
        for command, applied in commands:
            self._apply_once(command, applied)
        for us in entry.step_times_us:
            self._core.scheduler.observe_step_time(self._read.popleft(), us)
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

    def _apply_once(self, command: Command, applied: bool) -> None:
        """Applies a command of host 0, unless this host has already `applied` it."""
        if not applied:
            if isinstance(command, AddRequest):
                self._input.skip_seed(command.params)
            self._core.apply(command)
        elif isinstance(command, AddRequest) and not self._replicated.leads:
            self._set_arrival(command)

    def _set_arrival(self, added: AddRequest) -> None:
        """Sets a request's arrival time to that on host 0, unless it has finished."""
        request = self._core.requests.get(added.request_id)
        if request is not None:
            for output in request.sequence_outputs:
                self._core.scheduler.set_arrival(output.seq.seq_id, added.arrival_us)

    def dispatched(self, plan: StepPlan) -> None:
        """Adds the plan to the digest."""
        self._replicated.add_plan(plan)

    def read(self, step: DispatchedStep, results: StepResults, us: int) -> None:
        """Logs the step time: every host's scheduler observes host 0's, from the next entry."""
        self._read.append(step.together)
        self._replicated.observe_step_time(us)
        self._replicated.add_tokens(results.token_ids)
