"""The engine core of a multi-host job: every host applies the same commands before each step."""

from __future__ import annotations

import collections

from jaxserve.core.commands import AddRequest, Command
from jaxserve.core.errors import JaxserveError
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.results import DispatchedStep, StepResults
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.replication.log import ReplicatedLog
from jaxserve.engine.request import Request
from jaxserve.runtime.hardware.hosts import Hosts
from jaxserve.structured.grammar import Grammar


class ReplicatedCore:
    """Has an EngineCore replicate the steps and commands of host 0. All commands and steps of a
    multi-host job go through it.

    A command is applied on the host that issues it, and logged. Before each step, host 0 writes an
    entry with its clock, commands and step times, and the other hosts apply the commands that they
    have not applied yet.
    """

    def __init__(self, core: EngineCore, input_processor: InputProcessor, hosts: Hosts) -> None:
        self._core = core
        core.observer = self
        self._input = input_processor
        self._hosts = hosts
        self._replicated = ReplicatedLog(hosts)
        self._read: collections.deque[tuple[StepPlan, ...]] = collections.deque()

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
        """As `EngineCore.step`. With `wait`, waits for host 0's next step without a timeout.

        Raises DistributedError when the hosts have diverged, or another host failed.
        """
        try:
            entry, commands = self._replicated.next_entry(self._core.log.now(), wait)
            if self.ended:
                return []
            for command, applied in commands:
                self._apply_once(command, applied)
            for us in entry.step_times_us:
                self._core.scheduler.observe_step_time(self._read.popleft(), us)
            with self._hosts.bounded():
                return self._core.step(entry.now_us)
        except JaxserveError:
            raise
        except BaseException as error:
            raise self._hosts.blame(error) or error from error

    def close(self, failed: bool = False) -> None:
        """As `EngineCore.close`; on host 0 it ends the job."""
        try:
            self._replicated.end(checked=not failed)
        finally:
            try:
                self._core.close(failed)
            finally:
                self._hosts.close()

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
                output.seq.arrival_us = added.arrival_us
                self._core.scheduler.set_priority(output.seq.seq_id, output.seq.priority)

    def dispatched(self, plan: StepPlan) -> None:
        """Adds the plan to the digest."""
        self._replicated.add_plan(plan)

    def read(self, step: DispatchedStep, results: StepResults, us: int) -> None:
        """Logs the step time: every host's scheduler observes host 0's, from the next entry."""
        self._read.append(step.together)
        self._replicated.observe_step_time(us)
        self._replicated.add_tokens(results.token_ids)
