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

import numpy as np

from jaxserve.core.errors import SnapshotError
from jaxserve.core.process.signals import interrupts_held
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot.access import EngineAccess, states_of
from jaxserve.engine.snapshot.files import SnapshotReader, SnapshotWriter, check_writable
from jaxserve.engine.snapshot.restorer import Contents
from jaxserve.kv.offload.tiers import PageCorruptError


class Snapshots:
    """Writes the requests of one engine to a directory, and adds those of another, between its
    steps.

    Every method raises SnapshotError in a multi-host job and once weights have been replaced,
    EngineClosedError on a closed engine, and EngineAsleepError where a sleeping one cannot do it.
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

        Raises SnapshotError when the directory cannot be written or holds other files, and in a
        multi-host job.
        """
        self._engine.check_open()
        self._engine.check()
        requests = {request.request_id: request for request in ended} | self._engine.core.requests
        with interrupts_held():
            self._write(directory, requests.values(), with_kv, deadline_s)

    def restore(self, directory: str | Path) -> list[Request]:
        """Add the requests of a snapshot, in order of arrival; some may have finished.

        They resume where they were, with any mesh shape and page size, and stream all their deltas
        again. KV of another dtype, or of weights of another quantization, is recomputed.

        Raises SnapshotError, before any state changes, when the snapshot is damaged, newer, of
        another model, or has requests that do not fit this engine or whose ids are in use, and
        OverloadedError when the slots of adapters are taken.
        """
        self._engine.check_ready()
        reader = SnapshotReader(directory)
        self._engine.facts.check_model(reader.facts)
        requests = self._engine.restorer.built(states_of(reader))
        usable = self._engine.facts.can_use_kv(reader.facts)
        kv = self._engine.saved(reader) if usable and reader.has("kv") else None
        return self._engine.restorer.add(Contents(requests, kv))

    def _write(
        self,
        directory: str | Path,
        requests: Iterable[Request],
        with_kv: bool,
        deadline_s: float | None,
    ) -> None:
        """Writes these requests to `directory`; then KV, that of running sequences first, for up to
        `deadline_s` seconds. Raises SnapshotError when writing fails."""
        give_up_s = math.inf if deadline_s is None else time.monotonic() + deadline_s
        writer = SnapshotWriter(directory)
        writer.add("requests", self._engine.states(requests))
        writer.commit(self._engine.facts.ours)
        if with_kv:
            self._engine.page_transfers.settle()
            scheduler = self._engine.core.scheduler
            sequences = [*scheduler.running, *scheduler.waiting]
            entries = self._engine.kv(sequences, cache=self._engine.core.kv.prefix_caching)
            with contextlib.suppress(SnapshotError, PageCorruptError, OSError):
                for name, content in entries:  # KV that is not saved is recomputed.
                    if isinstance(content, np.ndarray) and time.monotonic() > give_up_s:
                        break
                    writer.add(name, content)
            writer.commit(self._engine.facts.ours)
