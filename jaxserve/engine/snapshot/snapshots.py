"""Snapshots of an engine's requests and KV, for another engine on other devices.

The end of a step is a natural barrier (Singularity, Shukla et al. 2022, has to create one):
between steps the host knows every request's tokens and the pages of their KV. Both are written in
terms of the model alone, so that the next engine's mesh, page size and pool may differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.core.errors import RequestError, SnapshotError
from jaxserve.core.process.signals import interrupts_held
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence, SharedPrefix
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.input_processor import prefix_salt
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot.facts import SnapshotFacts
from jaxserve.engine.snapshot.files import SnapshotReader, SnapshotWriter, check_writable
from jaxserve.engine.snapshot.kv import Prefix, SavedKV, kv_entries, prefixes_of
from jaxserve.engine.snapshot.parts import PartReader, encode_parts
from jaxserve.engine.snapshot.requests import RequestSnapshot
from jaxserve.engine.snapshot.restorer import Contents, Restorer, Tables, cached_table
from jaxserve.kv.offload.tiers import PageCorruptError
from jaxserve.kv.page_table import PageTable

if TYPE_CHECKING:
    from jaxserve.runtime.paging import Paging


def exported_params(parts: Iterable[bytes]) -> SamplingParams:
    """The sampling parameters of an exported request. Raises SnapshotError for anything else."""
    return _states_of(PartReader(parts))[0].added.params


class _Staged(NamedTuple):
    """KV that waits for its request. Without a prefix cache, that shares it by its salt alone."""

    salt: bytes
    tables: Tables


class Snapshots:
    """Writes the requests of one engine, and adds requests of others to it, between its steps.

    Every method raises SnapshotError in a multi-host job and once weights have been replaced,
    EngineClosedError on a closed engine, and EngineAsleepError where a sleeping one cannot do it.
    """

    def __init__(
        self,
        core: EngineCore,
        paging: Paging,
        restorer: Restorer,
        facts: SnapshotFacts,
        check_open: Callable[[], None],
    ) -> None:
        """`check_open` raises EngineClosedError when the engine is closed."""
        self._check_open = check_open
        self._facts = facts
        self._core = core
        self._paging = paging
        self._restorer = restorer
        self._staged: dict[str, _Staged] = {}

    def check(self, directory: str | Path | None = None) -> None:
        """Raises SnapshotError where there can be no snapshots, or none in `directory`."""
        if self._core.weights_version:
            raise SnapshotError(
                "snapshots name the checkpoint that an engine was loaded from, and update_weights "
                "has replaced its weights; load the new ones in a new engine."
            )
        if self._core.num_hosts > 1:
            raise SnapshotError(
                "snapshots support a single process only, and this job has "
                f"{self._core.num_hosts} processes; give all devices to one process."
            )
        if directory is not None:
            check_writable(directory)

    def _check_ready(self) -> None:
        self._check_open()
        self._core.check_awake()
        self.check()

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
        self._check_open()
        self.check()
        requests = {request.request_id: request for request in ended} | self._core.requests
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
        self._check_ready()
        reader = SnapshotReader(directory)
        self._facts.check_model(reader.facts)
        requests = self._restorer.built(_states_of(reader))
        usable = self._facts.can_use_kv(reader.facts)
        kv = self._saved(reader) if usable and reader.has("kv") else None
        return self._restorer.add(Contents(requests, kv))

    def export_request(
        self, request_id: str, with_kv: bool = True, start: int | None = None
    ) -> Iterator[bytes]:
        """An unfinished request as bytes, for `import_request` of another engine: its parameters,
        its tokens and, `with_kv`, the KV of its sequences, in a form that knows neither mesh nor
        page size. In parts of about 64 MB, made one by one; read the last before the engine's next
        step. `start`: a stage of a copy, for `stage_request`: KV from about this token on, and of a
        prompt that is being computed full pages alone.

        The request stays here, and runs on. Once it is imported elsewhere, end it here by `abort`;
        if the import fails, nothing has to be undone. Both engines generate the same tokens.

        Raises RequestError when no unfinished request has this id, and SnapshotError in a
        multi-host job, or for a part that is read too late.
        """
        self._check_open()
        self.check()
        request = self._core.requests.get(request_id)
        if request is None:
            raise RequestError(f"request_id {request_id!r} is not an unfinished request.")
        exported = self._parts_of(request, with_kv, start)
        return self._while_unchanged(exported, self._core.num_changes)

    def num_computed(self, request_id: str) -> int | None:
        """How many tokens of a request's first sequence have their KV, by the steps that were
        dispatched; None when it is not unfinished."""
        request = self._core.requests.get(request_id)
        outputs = () if request is None else request.unfinished
        return next((output.seq.num_written for output in outputs), None)

    def import_request(self, parts: Iterable[bytes], request_id: str | None = None) -> Request:
        """Add a request that another engine has exported, by default under its id there. It resumes
        where it was, and streams all its deltas again.

        Raises SnapshotError, with the request not added, when a part is damaged or missing, when
        this engine has another model, vocabulary, dtype or quantization or is too small for the
        request, or when its id is in use, and OverloadedError when the slots of adapters are taken.
        """
        self._check_ready()
        reader = PartReader(parts)
        (request,) = self._restorer.add(self._exported(reader, request_id), finish=reader.finish)
        return request

    def resume_request(self, state: RequestSnapshot) -> Request:
        """Add a request of another engine, with the tokens that it had generated, as
        `import_request`. Both engines have the same model and settings. KV that was staged for its
        id is not computed again; without, as for an engine that was lost, all of it is.

        Raises SnapshotError when the request does not fit this engine, or its id is in use, and
        OverloadedError when the slots of adapters are taken: it may be retried.
        """
        self._check_ready()
        contents = Contents(self._restorer.built([state]), None)
        staged = self._staged.pop(state.added.request_id, None)
        if staged is None:
            (request,) = self._restorer.add(contents)
            return request
        for output in contents.requests[0].sequence_outputs:
            output.seq.salt = staged.salt
        (request,) = self._restorer.add(contents, staged.tables)
        return request

    def stage_request(self, parts: Iterable[bytes], request_id: str) -> int:
        """Take the KV of a request that another engine has exported, while the request runs on
        there: `resume_request` with the tokens that it has by then, under `request_id`, adds it
        here. The KV stays until then, or until `unstage_request`. It may come in several stages,
        each from where the one before has ended.

        Returns how many tokens of every sequence have their KV here now: there may be no room.
        Raises as `import_request`; what came in stages before stays.
        """
        self._check_ready()
        reader = PartReader(parts)
        contents = self._exported(reader, request_id)
        sequences = [output.seq for output in contents.requests[0].unfinished]
        before = self._staged.get(request_id)
        if before is not None:
            for seq in sequences:
                seq.salt = before.salt
        self._core.pages_change()
        with interrupts_held():
            tables = self._restorer.place(contents, reader.finish)
        self.unstage_request(request_id)
        self._staged[request_id] = _Staged(sequences[0].salt, tables)
        known = (
            self._core.kv.known(tables[request_id, seq.index], seq.num_tokens)[1]
            for seq in sequences
        )
        return min(known)

    def unstage_request(self, request_id: str) -> None:
        """Give up the KV of a request that does not come, if it was staged."""
        staged = self._staged.pop(request_id, None)
        for table in () if staged is None else staged.tables.values():
            self._core.kv.unpin_table(table)

    def export_prefix(
        self, token_ids: SequenceOf[int], tenant: str | None = None, cache_salt: str | None = None
    ) -> Iterator[bytes]:
        """The KV that is cached of the first full pages of these tokens, on any tier, for
        `import_prefix` of another engine; read all parts before the next step. Without adapters.
        There may be none: of models with attention windows there never is.

        Raises SnapshotError in a multi-host job, or for a part that is read too late.
        """
        self._check_ready()
        kv, salt = self._core.kv, prefix_salt(tenant, cache_salt)
        prefixes = []
        if kv.prefix_caching and not kv.windowed:
            table = PageTable(lambda start, stop: token_ids[start:stop], salt)
            num_tokens = len(token_ids) // kv.pool.page_size * kv.pool.page_size
            nodes, num_tokens = kv.known(table, num_tokens)
            if num_tokens:
                places = [node.nearest for node in nodes]
                known = list(token_ids[:num_tokens])
                prefixes.append(Prefix(num_tokens, places, salt=salt.decode(), token_ids=known))
        entries = kv_entries(prefixes, self._paging.token_kv())
        exported = encode_parts(self._facts.ours, entries)
        return self._while_unchanged(exported, self._core.num_changes)

    def import_prefix(self, parts: Iterable[bytes]) -> int:
        """Cache a prefix that another engine has exported, as far as there is room, and return how
        many of its tokens are cached now.

        Raises SnapshotError for a part that is damaged or missing, and for KV of another model,
        dtype or quantization. What was cached before the damaged part stays.
        """
        self._check_ready()
        reader = PartReader(parts)
        self._facts.check_model(reader.facts)
        self._facts.check_kv(reader.facts)
        saved = self._saved(reader)
        self._core.pages_change()
        with interrupts_held():
            self._restorer.place(Contents([], saved), reader.finish)
        num_tokens = 0
        for prefix in saved.prefixes:
            table = cached_table(prefix)
            num_tokens += self._core.kv.known(table, prefix["num_tokens"])[1]
        return num_tokens

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
        writer.add("requests", _states(requests, self._core.log.now()))
        writer.commit(self._facts.ours)
        if with_kv:
            self._paging.settle()
            scheduler = self._core.scheduler
            sequences = [*scheduler.running, *scheduler.waiting]
            entries = self._kv(sequences, cache=self._core.kv.prefix_caching)
            with contextlib.suppress(SnapshotError, PageCorruptError, OSError):
                for name, content in entries:  # KV that is not saved is recomputed.
                    if isinstance(content, np.ndarray) and time.monotonic() > give_up_s:
                        break
                    writer.add(name, content)
            writer.commit(self._facts.ours)

    def _parts_of(self, request: Request, with_kv: bool, start: int | None) -> Iterator[bytes]:
        """The parts of a snapshot of one unfinished request, with the KV of its sequences, from
        `start` on. They are read from the pages one after another: the engine must not run until
        the last."""
        states = _states([request], self._core.log.now())

        def entries() -> Iterator[tuple[str, Any]]:
            yield "requests", states
            if with_kv:
                with contextlib.suppress(PageCorruptError, OSError):
                    sequences = [output.seq for output in request.unfinished]
                    yield from self._kv(sequences, cache=False, start=start)

        return encode_parts(self._facts.ours, entries())

    def _while_unchanged(self, parts: Iterator[bytes], num_changes: int) -> Iterator[bytes]:
        """These parts, while no step writes to the pages that they are read from."""
        while True:
            if self._core.num_changes != num_changes:
                raise SnapshotError(
                    "the engine has gone on since the export began; read all parts before its next "
                    "step, and before a request is aborted."
                )
            part = next(parts, None)
            if part is None:
                return
            yield part

    def _exported(self, reader: PartReader, request_id: str | None) -> Contents:
        """An exported request, named `request_id` if that is not None. It must go on with the same
        tokens: raises SnapshotError also when this engine computes in another dtype or
        quantization, of weights or of KV."""
        self._facts.check_model(reader.facts)
        self._facts.check_kv(reader.facts)
        (state,) = _states_of(reader)
        name = request_id or state.added.request_id
        added = dataclasses.replace(state.added, request_id=name)
        requests = self._restorer.built([dataclasses.replace(state, added=added)])
        saved = self._saved(reader) if reader.has("kv") else None
        for prefix in saved.prefixes if saved is not None else ():
            prefix["request_id"] = name
        return Contents(requests, saved)

    def _saved(self, reader: SnapshotReader | PartReader) -> SavedKV:
        """The KV of a snapshot. That of another engine's drafter is not used."""
        return SavedKV(reader, with_drafts=self._facts.can_use_draft_kv(reader.facts))

    def _kv(
        self, sequences: Iterable[Sequence], cache: bool, start: int | None = None
    ) -> Iterator[tuple[str, Any]]:
        scheduler = self._core.scheduler
        prefixes = prefixes_of(scheduler.kv, sequences, scheduler.tables, cache=cache, start=start)
        return kv_entries(prefixes, self._paging.token_kv())


def _states_of(reader: SnapshotReader | PartReader) -> list[RequestSnapshot]:
    """The requests of a snapshot."""
    try:
        return [RequestSnapshot.from_json(fields) for fields in reader.json("requests")]
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"the snapshot's requests are damaged ({error!r}).") from error


def _states(requests: Iterable[Request], now_us: int) -> list[dict[str, Any]]:
    """The state of each request, in the order they were accepted."""
    numbers: dict[SharedPrefix, int] = {}
    states = []
    for request in sorted(requests, key=lambda request: request.sequence_outputs[0].seq.seq_id):
        shared = request.sequence_outputs[0].seq.prefixes
        if request.params.n > 1:  # The last one is shared by its own sequences only.
            shared = shared[:-1]
        numbered = [(numbers.setdefault(p, len(numbers)), p.num_tokens) for p in shared]
        states.append(RequestSnapshot.of(request, next(iter(numbered), None), now_us).to_json())
    return states
