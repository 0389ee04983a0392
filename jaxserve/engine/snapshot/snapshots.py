"""Snapshots of an engine's requests and KV, for another engine on other devices.

The end of a step is a natural barrier (Singularity, Shukla et al. 2022, has to create one):
between steps the host knows every request's tokens and the pages of their KV. Both are written in
terms of the model alone, so that the next engine's mesh, page size and pool may differ.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.core.errors import OverloadedError, SnapshotError
from jaxserve.core.process.signals import interrupts_held
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot.access import EngineAccess, states_of
from jaxserve.engine.snapshot.files import SnapshotReader, SnapshotWriter, check_writable
from jaxserve.engine.snapshot.multi_host import raise_on_all_hosts
from jaxserve.engine.snapshot.restorer import Contents
from jaxserve.kv.offload.stores import PageCorruptError


class Snapshots:
    """Writes the requests of one engine to a directory, and adds those of another, between its
    steps.

    In a multi-host job all hosts do so together, at the same place among their steps: those that
    run the same script by the same calls, and others by `join`, as they follow. Host 0 writes, and
    every host reads.

    Every method raises SnapshotError once weights have been replaced, EngineClosedError on a closed
    engine, EngineAsleepError where a sleeping one cannot do it, and in a multi-host job
    DistributedError as a step does.
    """

    def __init__(self, engine: EngineAccess) -> None:
        self._engine = engine

    def check(self, directory: str | Path | None = None) -> None:
        """Raises SnapshotError where there can be no snapshots, or none in `directory`."""
        self._engine.check()
        if directory is not None:
            check_writable(directory)

    def write(
        self,
        directory: str | Path,
        with_kv: bool = True,
        deadline_s: float | None = None,
        ended: Iterable[Request] = (),
    ) -> None:
        """Write every unfinished request to a directory, for `restore` in another process. The
        engine can continue. `ended`: finished requests to include, whose output no client has seen.

        Requests are committed first. `with_kv` then adds their KV and that of the prefix cache on
        the device, the most needed first, until `deadline_s` seconds from now. KV that is not
        saved is recomputed.

        Raises SnapshotError when the directory cannot be written or holds other files, on every
        host.
        """
        self._engine.check_open()
        self._engine.check()
        core, hosts = self._engine.core, self._engine.hosts
        finished = {request.request_id: request for request in ended}

        def write(now_us: int) -> None:
            requests = finished | core.requests
            self._write(directory if hosts.leads else None, requests.values(), with_kv, deadline_s)

        with interrupts_held():
            hosts.collectively(["snapshot", with_kv], write)

    def join(self, action: list[Any], now_us: int) -> None:
        """Do what host 0 does, on a host that follows."""
        what, argument = action
        with contextlib.suppress(SnapshotError, OverloadedError):  # Host 0 raises it as well.
            if what == "snapshot":
                self._write(None, (), with_kv=argument)
            else:
                self._restore(argument, now_us)

    def restore(self, directory: str | Path) -> list[Request]:
        """Add the requests of a snapshot, in order of arrival; some may have finished.

        They resume where they were, with any mesh shape and page size, and stream all their deltas
        again. KV of another dtype, or of weights of another quantization, is recomputed.

        Raises SnapshotError, before any state changes, when the snapshot is damaged, newer, of
        another model, or has requests that do not fit this engine or whose ids are in use, and
        OverloadedError when the slots of adapters are taken. Also, with the prefixes before it in
        the cache, when a file can no longer be read, on any host.
        """
        self._engine.check_ready()
        action = ["restore", str(directory)]
        restored = self._engine.hosts.collectively(
            action, lambda now: self._restore(directory, now)
        )
        return restored or []

    def _restore(self, directory: str | Path, now_us: int) -> list[Request]:
        """Adds the requests of a snapshot, which every host reads, with this time of arrival."""
        hosts = self._engine.hosts
        with raise_on_all_hosts(hosts):
            reader = SnapshotReader(directory)
            self._engine.facts.check_model(reader.facts)
        if len(set(hosts.all_gather(reader.checksum))) > 1:
            raise SnapshotError(
                f"{directory} has different snapshots on the hosts; give them all the same."
            )
        with raise_on_all_hosts(hosts):
            requests = self._engine.restorer.built(states_of(reader), now_us)
            usable = self._engine.facts.can_use_kv(reader.facts)
            kv = self._engine.saved(reader) if usable and reader.has("kv") else None
        return self._engine.restorer.add(Contents(requests, kv))

    def _write(
        self,
        directory: str | Path | None,
        requests: Iterable[Request],
        with_kv: bool,
        deadline_s: float | None = None,
    ) -> None:
        """Writes these requests to `directory`; then KV, that of running sequences first, for up to
        `deadline_s` seconds. Raises SnapshotError when writing fails. Without a directory, only
        reads the KV, as all hosts have to."""
        give_up_s = math.inf if deadline_s is None else time.monotonic() + deadline_s
        core, hosts, facts = self._engine.core, self._engine.hosts, self._engine.facts
        writer: SnapshotWriter | None = None
        with raise_on_all_hosts(hosts):
            if directory is not None:
                writer = SnapshotWriter(directory)
                writer.add("requests", self._engine.states(requests))
                writer.commit(facts.ours)
        if not with_kv:
            return
        with hosts.with_timeout():
            self._engine.core.kv_executor.settle()
        sequences = [*core.scheduler.running, *core.scheduler.waiting]
        entries = self._engine.kv(sequences, cache=core.kv.prefix_caching)
        goes_on = True
        with contextlib.suppress(PageCorruptError, OSError):  # KV that is not saved is recomputed.
            while hosts.all_gather(goes_on)[0]:
                with hosts.with_timeout():  # Its pages are read from the devices of all hosts.
                    entry = next(entries, None)
                if entry is None:
                    break
                goes_on = writer is None or _added(writer, *entry, give_up_s)
        with raise_on_all_hosts(hosts):
            if writer is not None:
                writer.commit(facts.ours)


def _added(writer: SnapshotWriter, name: str, content: Any, give_up_s: float) -> bool:
    """Whether there was time to write an entry, and it worked."""
    if isinstance(content, np.ndarray) and time.monotonic() > give_up_s:
        return False
    try:
        writer.add(name, content)
    except SnapshotError:
        return False
    return True
