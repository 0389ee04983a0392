"""What the hosts of a job agree on, so that each runs the same engine on its own devices.

A scheduler is a function of the commands it is given and of what it is told about time. So the
hosts need not share plans, only those: host 0 writes one entry a step, with every command since the
step before, its clock, and how long steps took; all others read the entry before they plan the
step. Tokens need not be sent either, for every host has them from its own devices.

A host may run the same script as host 0, and then gives the same commands itself, or none and
follow. What host 0 wrote is what counts; a command that only another host gave ends the job, as
does a digest of plans and tokens that is not host 0's.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from jaxserve.engine.plan import StepPlan
from jaxserve.engine.shared_prefix import SharedPrefix
from jaxserve.errors import DistributedError
from jaxserve.sampling_params import SamplingParams

_DIGEST_STEPS = 16
"""Steps between two digests."""


class Channel(Protocol):
    """Entries from host 0 to the others, by number."""

    host: int

    def publish(self, number: int, entry: bytes) -> None:
        """Host 0 gives an entry to all others."""

    def receive(self, number: int, wait: bool) -> bytes:
        """Another host takes an entry. Unless it is to `wait`, it raises DistributedError when
        host 0 has none for a long time."""


@dataclasses.dataclass(frozen=True)
class Addition:
    """A request as host 0 accepted it. `prefix` is the number of what it shares with others, and
    how many tokens that are."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int | None
    tenant: str | None
    seed: int
    first_seq_id: int
    prefix: tuple[int, int] | None
    cache_salt: str | None = None

    def to_json(self) -> list[Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ["add", fields | {"params": dataclasses.asdict(self.params)}]

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Addition:
        params = fields["params"]
        if params["logit_bias"] is not None:
            params["logit_bias"] = {
                int(token): bias for token, bias in params["logit_bias"].items()
            }
        prefix = None if fields["prefix"] is None else tuple(fields["prefix"])
        return cls(**fields | {"params": SamplingParams(**params), "prefix": prefix})


@dataclasses.dataclass(frozen=True)
class Entry:
    """What must be done before a step, and what the scheduler is told with it.

    `commands` are lists of a verb and its arguments: "add", "abort", "set_priority" or
    "reset_prefix_cache". `arrivals_us` has a time for each request that was added, `took_us` for
    each step that was read. `last`: there is no step, for host 0 has closed the engine.
    """

    now_us: int
    commands: list[list[Any]]
    arrivals_us: list[int]
    took_us: list[int]
    digest: str | None = None
    last: bool = False


class AgreedLog:
    """One host's end of the log."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = 0
        self._commands: list[list[Any]] = []
        self._arrivals_us: list[int] = []
        self._took_us: list[int] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._numbers: dict[SharedPrefix, int] = {}
        self._prefixes: dict[int, SharedPrefix] = {}
        self.ended = False

    @property
    def leads(self) -> bool:
        """Whether this is host 0, whose commands count."""
        return self._channel.host == 0

    def note(self, command: list[Any], arrival_us: int | None = None) -> None:
        """Remember a command for the next entry, given on any host."""
        self._commands.append(json.loads(json.dumps(command)))
        if arrival_us is not None:
            self._arrivals_us.append(arrival_us)

    def took(self, us: int) -> None:
        """Remember how long a step took that was read."""
        self._took_us.append(us)

    def saw(self, plan: StepPlan) -> None:
        """Takes a plan into the digest."""
        self._update(
            (chunk.seq.seq_id, chunk.start, chunk.num_tokens)
            for chunk in (*plan.decodes, *plan.prefills)
        )

    def sampled(self, token_ids: Sequence[int]) -> None:
        """Takes a step's tokens into the digest."""
        self._update([token_ids])

    def number_of(self, prefix: SharedPrefix | None) -> tuple[int, int] | None:
        """What an Addition says of a prefix."""
        if prefix is None:
            return None
        number = self._numbers.setdefault(prefix, len(self._numbers))
        return number, prefix.num_tokens

    def prefix_of(self, number: tuple[int, int] | None) -> SharedPrefix | None:
        """What an Addition's prefix is on this host."""
        if number is None:
            return None
        return self._prefixes.setdefault(number[0], SharedPrefix(number[1]))

    def agree(self, now_us: int, wait: bool = False) -> tuple[Entry, list[tuple[list[Any], bool]]]:
        """The entry of the next step, and its commands, each with whether it was given here too.

        Raises DistributedError when the hosts have gone apart, or host 0 is silent.
        """
        own, self._commands = self._commands, []
        arrivals_us, self._arrivals_us = self._arrivals_us, []
        took_us, self._took_us = self._took_us, []
        if self.leads:
            digest = self._digest.hexdigest() if self._number % _DIGEST_STEPS == 0 else None
            entry = Entry(now_us, own, arrivals_us, took_us, digest)
            self._publish(entry)
            return entry, [(command, True) for command in own]
        entry = Entry(**json.loads(self._channel.receive(self._number, wait)))
        self._number += 1
        here = self._digest.hexdigest()
        if entry.digest is not None and entry.digest != here:
            raise self._apart(f"digest {entry.digest} of plans and tokens", here)
        if entry.last:
            self.ended = True
            return entry, []
        if len(entry.took_us) != len(took_us):
            raise self._apart(f"{len(entry.took_us)} steps were read", str(len(took_us)))
        return entry, self._compared(entry.commands, own)

    def end(self, checked: bool) -> None:
        """Host 0 tells the others that there are no more steps. `checked`: all of them were good,
        and are compared a last time."""
        if self.leads and not self.ended:
            self.ended = True
            digest = self._digest.hexdigest() if checked else None
            self._publish(Entry(0, [], [], [], digest, last=True))

    def _publish(self, entry: Entry) -> None:
        self._channel.publish(self._number, json.dumps(dataclasses.asdict(entry)).encode())
        self._number += 1

    def _update(self, items: Iterable[Any]) -> None:
        self._digest.update(json.dumps(list(items)).encode())

    def _compared(
        self, agreed: list[list[Any]], own: list[list[Any]]
    ) -> list[tuple[list[Any], bool]]:
        """The commands of host 0, each with whether this host was given it, in the same order."""
        given = collections.deque(own)
        compared = []
        for command in agreed:
            here = bool(given) and given[0] == command
            if here:
                given.popleft()
            compared.append((command, here))
        if given:
            raise self._apart(f"{len(agreed)} commands", f"{given[0][0]} {given[0][1:]!s:.200}")
        return compared

    def _apart(self, theirs: str, ours: str | None) -> DistributedError:
        step = self._number - 1
        return DistributedError(
            f"host {self._channel.host} is not where host 0 is at step {step}: there {theirs}, "
            f"here {ours}. Run the same script with the same inputs on every host."
        )
