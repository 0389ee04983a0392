"""What snapshots and migration share: the requests and KV of an engine, between its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from jaxserve.core.errors import SnapshotError
from jaxserve.core.sequence import Sequence, SharedPrefix
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot.compatibility import SnapshotFacts
from jaxserve.engine.snapshot.files import SnapshotReader
from jaxserve.engine.snapshot.kv import Prefix, kv_entries, prefixes_of
from jaxserve.engine.snapshot.multi_host import SingleHost
from jaxserve.engine.snapshot.requests import RequestSnapshot
from jaxserve.engine.snapshot.restorer import Restorer
from jaxserve.engine.snapshot.saved_kv import SavedKV
from jaxserve.engine.snapshot.stream import PartReader

if TYPE_CHECKING:
    from jaxserve.engine.replication.core import ReplicatedCore
    from jaxserve.runtime.token_kv import TokenKV


class EngineAccess:
    """The requests and KV of one engine, and the way in for those of another.

    Attributes:
        core, token_kv, restorer, facts: the engine's.
        check_open: raises EngineClosedError when the engine is closed.
        hosts: what has all hosts do something together.
    """

    def __init__(
        self,
        core: EngineCore,
        token_kv: TokenKV,
        restorer: Restorer,
        facts: SnapshotFacts,
        check_open: Callable[[], None],
        hosts: SingleHost | ReplicatedCore,
        num_hosts: int,
    ) -> None:
        self.core, self.token_kv, self.restorer, self.facts = core, token_kv, restorer, facts
        self.check_open, self.hosts = check_open, hosts
        self._num_hosts = num_hosts

    def check(self) -> None:
        """Raises SnapshotError where there can be no snapshots."""
        if self.core.weights_version:
            raise SnapshotError(
                "snapshots name the checkpoint that an engine was loaded from, and update_weights "
                "has replaced its weights; load the new ones in a new engine."
            )

    def check_one_host(self) -> None:
        """Raises SnapshotError in a multi-host job, whose requests do not move one by one."""
        if self._num_hosts > 1:
            raise SnapshotError(
                "requests move one by one between engines of a single process, and this job has "
                f"{self._num_hosts} processes; take a snapshot, or give all devices to one "
                "process."
            )

    def check_ready(self) -> None:
        """Raises as `check`, EngineClosedError for a closed engine, and EngineAsleepError for one
        that sleeps."""
        self.check_open()
        self.core.check_awake()
        self.check()

    def states(self, requests: Iterable[Request]) -> list[dict[str, Any]]:
        """The state of each request, in the order they were accepted."""
        now_us = self.core.log.now()
        numbers: dict[SharedPrefix, int] = {}
        states = []
        for request in sorted(requests, key=lambda request: request.sequence_outputs[0].seq.seq_id):
            shared = request.sequence_outputs[0].seq.prefixes
            if request.params.n > 1:  # The last one is shared by its own sequences only.
                shared = shared[:-1]
            numbered = [(numbers.setdefault(p, len(numbers)), p.num_tokens) for p in shared]
            first = next(iter(numbered), None)
            states.append(RequestSnapshot.of(request, first, now_us).to_json())
        return states

    def kv(
        self,
        sequences: Iterable[Sequence],
        cache: bool,
        start: int | None = None,
        stop: int | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """The KV of sequences, from token `start` on and before `stop`, and with `cache` that of
        the prefix cache."""
        prefixes = self.prefixes(sequences, cache, start, stop)
        return kv_entries(prefixes, self.token_kv)

    def prefixes(
        self,
        sequences: Iterable[Sequence],
        cache: bool = False,
        start: int | None = None,
        stop: int | None = None,
    ) -> Iterator[Prefix]:
        """What `kv` is the KV of."""
        scheduler = self.core.scheduler
        return prefixes_of(
            scheduler.kv, sequences, scheduler.tables, cache=cache, start=start, stop=stop
        )

    def saved(self, reader: SnapshotReader | PartReader) -> SavedKV:
        """The KV of a snapshot. That of another engine's drafter is not used."""
        return SavedKV(
            reader,
            pages=self.token_kv,
            hosts=self.hosts,
            with_drafts=self.facts.can_use_draft_kv(reader.facts),
        )


def states_of(reader: SnapshotReader | PartReader) -> list[RequestSnapshot]:
    """The requests of a snapshot."""
    try:
        return [RequestSnapshot.from_json(fields) for fields in reader.json("requests")]
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"the snapshot's requests are damaged ({error!r}).") from error
