"""The replicated command log, by which the hosts of a job run identical engines.

Scheduling is deterministic in its commands and its time inputs. So hosts need not exchange plans,
only these: host 0 writes one entry per step, with every command since the previous step, its clock
and the measured step times; the other hosts read the entry before they plan the step. Tokens are
not sent either: every host reads them from its own devices.

A host may run the same script as host 0 and so issue the same commands, or issue none and follow.
Host 0's log is authoritative; a command that only another host issued ends the job, as does a
digest of plans and tokens that differs from host 0's.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, get_args

from jaxserve.core.commands import AddRequest, Command
from jaxserve.core.errors import DistributedError
from jaxserve.core.sequence import SharedPrefix
from jaxserve.core.steps.plan import StepPlan

_DIGEST_STEPS = 16
"""Steps between two digests."""


class Channel(Protocol):
    """Carries numbered entries from host 0 to the other hosts."""

    host: int

    def publish(self, number: int, entry: bytes) -> None:
        """Sends an entry from host 0 to all other hosts."""

    def receive(self, number: int, wait: bool) -> bytes:
        """Receives an entry on another host. Unless `wait`, raises DistributedError after a
        timeout."""


@dataclasses.dataclass(frozen=True)
class LogEntry:
    """The commands to apply before a step, and the scheduler's time inputs.

    `commands` are lists of a command's name and its arguments. `arrivals_us` has a time for each
    added request, `step_times_us` one for each step read. `joint`: what all hosts do instead of the
    step. `last`: no step follows, because host 0 closed the engine.
    """

    now_us: int
    commands: list[list[Any]]
    arrivals_us: list[int]
    step_times_us: list[int]
    digest: str | None = None
    joint: list[Any] | None = None
    last: bool = False


_COMMANDS = {kind.__name__: kind for kind in get_args(Command)}


class ReplicatedLog:
    """One host's end of the log."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = 0
        self._commands: list[list[Any]] = []
        self._arrivals_us: list[int] = []
        self._step_times_us: list[int] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._numbers: dict[SharedPrefix, int] = {}
        self._prefixes: dict[int, SharedPrefix] = {}
        self.ended = False

    @property
    def leads(self) -> bool:
        """Whether this is host 0, whose commands are authoritative."""
        return self._channel.host == 0

    def add_command(self, command: Command) -> None:
        """Adds a command applied on this host to the next entry."""
        if isinstance(command, AddRequest):
            prefix = self._number_of(command.shared_prefix)
            written = [AddRequest.__name__, command.to_json(prefix)]
            self._arrivals_us.append(command.arrival_us)
        else:
            written = [type(command).__name__, *dataclasses.astuple(command)]
        self._commands.append(json.loads(json.dumps(written)))

    def observe_step_time(self, us: int) -> None:
        """Adds a measured step time to the next entry."""
        self._step_times_us.append(us)

    def add_plan(self, plan: StepPlan) -> None:
        """Adds a plan to the digest."""
        self._update(
            (chunk.seq.seq_id, chunk.start, chunk.num_tokens)
            for chunk in (*plan.decodes, *plan.prefills)
        )

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Adds a step's tokens to the digest."""
        self._update([token_ids])

    def _number_of(self, prefix: SharedPrefix | None) -> tuple[int, int] | None:
        """A shared prefix as logged: its number and length in tokens."""
        if prefix is None:
            return None
        number = self._numbers.setdefault(prefix, len(self._numbers))
        self._prefixes.setdefault(number, prefix)
        return number, prefix.num_tokens

    def _read(self, command: list[Any], arrivals_us: Iterator[int]) -> Command:
        name, *arguments = command
        if name != AddRequest.__name__:
            return _COMMANDS[name](*arguments)
        (fields,) = arguments
        prefix = None
        if fields["prefix"] is not None:
            number, num_tokens = fields["prefix"]
            prefix = self._prefixes.setdefault(number, SharedPrefix(num_tokens))
        return AddRequest.from_json(fields, prefix, next(arrivals_us))

    def next_entry(
        self, now_us: int, wait: bool = False, joint: list[Any] | None = None
    ) -> tuple[LogEntry, list[tuple[Command, bool]]]:
        """The entry of the next step, or on host 0 of what all hosts do in its place, and its
        commands, each with whether this host noted it too.

        Raises DistributedError when the hosts have diverged, or host 0 does not respond.
        """
        own, self._commands = self._commands, []
        arrivals_us, self._arrivals_us = self._arrivals_us, []
        step_times_us, self._step_times_us = self._step_times_us, []
        if self.leads:
            digest = self._digest.hexdigest() if self._number % _DIGEST_STEPS == 0 else None
            entry = LogEntry(now_us, own, arrivals_us, step_times_us, digest, joint)
            self._publish(entry)
            return entry, self._compared(entry, own)
        entry = LogEntry(**json.loads(self._channel.receive(self._number, wait)))
        self._number += 1
        here = self._digest.hexdigest()
        if entry.digest is not None and entry.digest != here:
            raise self._diverged(f"digest {entry.digest} of plans and tokens", here)
        if entry.last:
            self.ended = True
            return entry, []
        if len(entry.step_times_us) != len(step_times_us):
            raise self._diverged(f"{len(entry.step_times_us)} steps read", str(len(step_times_us)))
        return entry, self._compared(entry, own)

    def end(self, checked: bool) -> None:
        """On host 0, logs that no step follows. `checked`: no step failed, so include a final
        digest."""
        if self.leads and not self.ended:
            self.ended = True
            digest = self._digest.hexdigest() if checked else None
            self._publish(LogEntry(0, [], [], [], digest, last=True))

    def _publish(self, entry: LogEntry) -> None:
        self._channel.publish(self._number, json.dumps(dataclasses.asdict(entry)).encode())
        self._number += 1

    def _update(self, items: Iterable[Any]) -> None:
        self._digest.update(json.dumps(list(items)).encode())

    def _compared(self, entry: LogEntry, own: list[list[Any]]) -> list[tuple[Command, bool]]:
        """The commands of host 0 in order, each with whether this host noted it."""
        noted = collections.deque(own)
        arrivals_us = iter(entry.arrivals_us)
        compared = []
        for command in entry.commands:
            here = bool(noted) and noted[0] == command
            if here:
                noted.popleft()
            compared.append((self._read(command, arrivals_us), here))
        if noted:
            command = f"{noted[0][0]} {noted[0][1:]!s:.200}"
            raise self._diverged(f"{len(entry.commands)} commands", command)
        return compared

    def _diverged(self, theirs: str, ours: str | None) -> DistributedError:
        step = self._number - 1
        return DistributedError(
            f"host {self._channel.host} diverged from host 0 at step {step}: host 0 has {theirs}, "
            f"this host has {ours}. Run the same script with the same inputs on every host."
        )
