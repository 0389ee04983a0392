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
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.core.errors import AdapterError, OverloadedError, RequestError, SnapshotError
from jaxserve.core.process.signals import interrupts_held
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence, SharedPrefix
from jaxserve.core.version import __version__
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot.files import SnapshotReader, SnapshotWriter, check_writable
from jaxserve.engine.snapshot.kv import Prefix, SavedKV, kv_entries, prefixes_of
from jaxserve.engine.snapshot.parts import PartReader, parts
from jaxserve.engine.snapshot.requests import RequestSnapshot
from jaxserve.kv.offload.tiers import PageCorruptError
from jaxserve.kv.page_table import PageTable
from jaxserve.text import Tokenizer

if TYPE_CHECKING:
    from jaxserve.runtime.adapters import AdapterSlots
    from jaxserve.runtime.paging import Paging
    from jaxserve.runtime.planning.engine_plan import EnginePlan


_KV_FACTS = {"dtype": None, "kv_cache_dtype": "auto", "quantization": None, "rope_context": None}
"""Facts that must match for KV to be reused, with their values in older snapshots that lack them;
rope_context is max_model_len if RoPE depends on it."""


def exported_params(parts: Iterable[bytes]) -> SamplingParams:
    """The sampling parameters of an exported request. Raises SnapshotError for anything else."""
    return _states_of(PartReader(parts))[0].added.params


_Tables = dict[tuple[str, int], PageTable]
"""Page tables by request id and index of a sequence, with the KV pinned that was written for it."""


class _Staged(NamedTuple):
    """KV that waits for its request. Without a prefix cache, that shares it by its salt alone."""

    salt: bytes
    tables: _Tables


class _Contents(NamedTuple):
    """What a snapshot has for this engine: requests, some finished, and KV, if it is usable."""

    requests: list[Request]
    kv: SavedKV | None


class Snapshots:
    """Writes the requests of one engine, and adds requests of others to it, between its steps.

    Every method raises SnapshotError in a multi-host job, and once weights have been replaced.
    """

    def __init__(
        self,
        plan: EnginePlan,
        tokenizer: Tokenizer,
        input_processor: InputProcessor,
        core: EngineCore,
        paging: Paging,
        adapters: AdapterSlots,
    ) -> None:
        self._config = plan.config
        self._model = plan.checkpoint
        self._tokenizer = tokenizer
        self._input = input_processor
        self._core = core
        self._scheduler = core.scheduler
        self._paging = paging
        self._adapters = adapters
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

    def write(
        self,
        directory: str | Path,
        with_kv: bool,
        deadline_s: float | None,
        ended: Iterable[Request] = (),
    ) -> None:
        """As `Engine.snapshot`."""
        self.check()
        requests = {request.request_id: request for request in ended} | self._core.requests
        with interrupts_held():
            self._write(directory, requests.values(), with_kv, deadline_s)

    def restore(self, directory: str | Path) -> list[Request]:
        """As `Engine.restore`."""
        self.check()
        reader = SnapshotReader(directory)
        self._check_model(reader.facts)
        ours = self._facts
        requests = self._built(_states_of(reader))
        usable = all(
            reader.facts.get(name, before) == ours[name] for name, before in _KV_FACTS.items()
        )
        kv = SavedKV(reader) if usable and reader.has("kv") else None
        return self._add(_Contents(requests, kv))

    def export_request(self, request_id: str, with_kv: bool) -> Iterator[bytes]:
        """As `Engine.export_request`."""
        self.check()
        request = self._core.requests.get(request_id)
        if request is None:
            raise RequestError(f"request_id {request_id!r} is not an unfinished request.")
        return self._while_unchanged(self._parts_of(request, with_kv), self._core.num_changes)

    def import_request(self, parts: Iterable[bytes], request_id: str | None) -> Request:
        """As `Engine.import_request`."""
        self.check()
        reader = PartReader(parts)
        (request,) = self._add(self._exported(reader, request_id), finish=reader.finish)
        return request

    def resume_request(self, state: RequestSnapshot) -> Request:
        """As `Engine.resume_request`."""
        self.check()
        contents = _Contents(self._built([state]), None)
        staged = self._staged.pop(state.added.request_id, None)
        if staged is None:
            (request,) = self._add(contents)
            return request
        for output in contents.requests[0].sequence_outputs:
            output.seq.salt = staged.salt
        (request,) = self._add(contents, staged.tables)
        return request

    def stage_request(self, parts: Iterable[bytes], request_id: str) -> None:
        """As `Engine.stage_request`."""
        self.check()
        reader = PartReader(parts)
        contents = self._exported(reader, request_id)
        self.unstage_request(request_id)
        self._core.num_changes += 1
        with interrupts_held():
            tables = self._placed(contents, reader.finish)
        salt = contents.requests[0].sequence_outputs[0].seq.salt
        self._staged[request_id] = _Staged(salt, tables)

    def unstage_request(self, request_id: str) -> None:
        """As `Engine.unstage_request`."""
        staged = self._staged.pop(request_id, None)
        for table in () if staged is None else staged.tables.values():
            self._scheduler.kv.unpin_table(table)

    def export_prefix(
        self, token_ids: SequenceOf[int], tenant: str | None, cache_salt: str | None
    ) -> Iterator[bytes]:
        """As `Engine.export_prefix`."""
        self.check()
        kv, salt = self._scheduler.kv, self._input.salt(tenant, cache_salt)
        prefixes = []
        if self._config.enable_prefix_caching and not kv.windowed:
            table = PageTable(lambda start, stop: token_ids[start:stop], salt)
            num_tokens = len(token_ids) // self._config.page_size * self._config.page_size
            nodes, num_tokens = kv.known(table, num_tokens)
            if num_tokens:
                places = [node.nearest for node in nodes]
                known = list(token_ids[:num_tokens])
                prefixes.append(Prefix(num_tokens, places, salt=salt.decode(), token_ids=known))
        entries = kv_entries(prefixes, self._paging.images(self._model.config))
        return self._while_unchanged(parts(self._facts, entries), self._core.num_changes)

    def import_prefix(self, parts: Iterable[bytes]) -> int:
        """As `Engine.import_prefix`."""
        self.check()
        reader = PartReader(parts)
        self._check_model(reader.facts)
        self._check_kv(reader.facts)
        saved = SavedKV(reader)
        self._core.num_changes += 1
        with interrupts_held():
            self._placed(_Contents([], saved), reader.finish)
        num_tokens = 0
        for prefix in saved.prefixes:
            table = _cached_table(prefix)
            num_tokens += self._scheduler.kv.known(table, prefix["num_tokens"])[1]
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
        writer.commit(self._facts)
        if with_kv:
            self._paging.settle()
            scheduler = self._scheduler
            sequences = [*scheduler.running, *scheduler.waiting]
            entries = self._kv(sequences, cache=self._config.enable_prefix_caching)
            with contextlib.suppress(SnapshotError, PageCorruptError, OSError):
                for name, content in entries:  # KV that is not saved is recomputed.
                    if isinstance(content, np.ndarray) and time.monotonic() > give_up_s:
                        break
                    writer.add(name, content)
            writer.commit(self._facts)

    def _parts_of(self, request: Request, with_kv: bool) -> Iterator[bytes]:
        """The parts of a snapshot of one unfinished request, with the KV of its sequences. They are
        read from the pages one after another: the engine must not run until the last."""
        states = _states([request], self._core.log.now())

        def entries() -> Iterator[tuple[str, Any]]:
            yield "requests", states
            if with_kv:
                with contextlib.suppress(PageCorruptError, OSError):
                    yield from self._kv([output.seq for output in request.unfinished], cache=False)

        return parts(self._facts, entries())

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

    def _exported(self, reader: PartReader, request_id: str | None) -> _Contents:
        """An exported request, named `request_id` if that is not None. It must go on with the same
        tokens: raises SnapshotError also when this engine computes in another dtype or
        quantization, of weights or of KV."""
        self._check_model(reader.facts)
        self._check_kv(reader.facts)
        (state,) = _states_of(reader)
        name = request_id or state.added.request_id
        added = dataclasses.replace(state.added, request_id=name)
        requests = self._built([dataclasses.replace(state, added=added)])
        saved = SavedKV(reader) if reader.has("kv") else None
        for prefix in saved.prefixes if saved is not None else ():
            prefix["request_id"] = name
        return _Contents(requests, saved)

    def _add(
        self,
        contents: _Contents,
        staged: _Tables | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> list[Request]:
        """Adds these requests to the engine, in this order, once `finish` has not raised. Their KV
        is that of `contents` or is `staged` already."""
        for request in contents.requests:  # Of more adapters than slots, some are gone again.
            if not request.finished:
                self._adapters.check(request.sequence_outputs[0].seq.adapter)
        self._core.num_changes += 1
        with interrupts_held():
            tables = self._placed(contents, finish) | (staged or {})
            try:
                for request in contents.requests:
                    if not request.finished:
                        self._core.accept(request)
                        continue
                    for output in request.sequence_outputs:
                        output.use_weights(self._core.weights_version)
            finally:
                self._hand_over(tables, contents.requests)
        return contents.requests

    def _placed(self, contents: _Contents, finish: Callable[[], None]) -> _Tables:
        """Writes KV to pages: that of unfinished sequences is pinned by their tables here, that of
        the prefix cache is cached. Then calls `finish`.

        Raises SnapshotError when KV is damaged; what came before it is cached.
        """
        kv = self._scheduler.kv
        tables = {
            (request.request_id, output.seq.index): PageTable(output.seq.token_ids, output.seq.salt)
            for request in contents.requests
            for output in request.unfinished
        }

        def table_of(prefix: dict[str, Any]) -> PageTable | None:
            if prefix["request_id"] is not None:
                return tables.get((prefix["request_id"], prefix["index"]))
            if not self._config.enable_prefix_caching:
                return None
            return _cached_table(prefix)

        try:
            if contents.kv is not None:
                pages = self._paging.images(self._model.config)
                contents.kv.restore(kv, pages, table_of, self._paging.settle)
            finish()
        except BaseException:
            for table in tables.values():
                kv.unpin_table(table)
            raise
        return tables

    def _hand_over(self, tables: _Tables, requests: Iterable[Request]) -> None:
        """What these tables pin stays pinned until their sequences run; that of a sequence which
        was not added is unpinned."""
        scheduler = self._scheduler
        seq_ids = {
            (request.request_id, output.seq.index): output.seq.seq_id
            for request in requests
            for output in request.unfinished
        }
        for key, table in tables.items():
            added = scheduler.tables.get(seq_ids[key]) if key in seq_ids else None
            if added is None:
                scheduler.kv.unpin_table(table)
            else:
                added.pinned = table.pinned

    def _kv(self, sequences: Iterable[Sequence], cache: bool) -> Iterator[tuple[str, Any]]:
        scheduler = self._scheduler
        prefixes = prefixes_of(scheduler.kv, sequences, scheduler.tables, cache=cache)
        return kv_entries(prefixes, self._paging.images(self._model.config))

    def _check_kv(self, theirs: Mapping[str, Any]) -> None:
        """Raises SnapshotError for KV that this engine would not have computed."""
        ours = self._facts
        for name, before in _KV_FACTS.items():
            if (their := theirs.get(name, before)) != ours[name]:
                raise SnapshotError(
                    f"{name} is {their!r} in the engine that exported the request and "
                    f"{ours[name]!r} in this one, which would go on with other tokens; import it "
                    f"into an engine with the same {name}."
                )

    def _check_model(self, theirs: Mapping[str, Any]) -> None:
        """Raises SnapshotError for the facts of another model."""
        ours = self._facts
        for name in ("fingerprint", "vocabulary"):
            # Snapshots of version 0.1 do not name the vocabulary.
            if theirs.get(name, ours[name] if name == "vocabulary" else None) != ours[name]:
                raise SnapshotError(
                    f"the snapshot is of model {theirs.get('model')!r} with {name} "
                    f"{theirs.get(name)}, but this engine runs {ours['model']!r} with "
                    f"{ours[name]}; load the model that the snapshot was written with."
                )

    def _built(self, states: list[RequestSnapshot]) -> list[Request]:
        """The requests of these states, with their progress. Does not change the engine. Raises
        SnapshotError when one does not fit it, or has the id of an unfinished request, and
        OverloadedError when the slots of adapters are taken."""
        ids = {state.added.request_id for state in states}.intersection(self._core.requests)
        if ids:
            raise SnapshotError(
                f"request {min(ids)!r} of the snapshot has the id of an unfinished request of "
                "this engine; restore before adding requests, or import under another id."
            )
        now_us = self._core.log.now()
        prefixes: dict[int, SharedPrefix] = {}
        return [self._build(state, prefixes, now_us) for state in states]

    def _build(
        self, state: RequestSnapshot, prefixes: dict[int, SharedPrefix], now_us: int
    ) -> Request:
        prefix = None
        if state.prefix is not None:
            number, num_tokens = state.prefix
            prefix = prefixes.setdefault(number, SharedPrefix(num_tokens))
        added = dataclasses.replace(state.added, shared_prefix=prefix)
        if all(output.finish_reason is not None for output in state.sequence_outputs):
            added = dataclasses.replace(added, lora_request=None)  # It needs its adapter no more.
        try:
            request = self._input.rebuild(added)
        except OverloadedError:  # The adapter's slots are taken: it fits later.
            raise
        except (RequestError, AdapterError) as error:
            raise SnapshotError(
                f"request {added.request_id!r} of the snapshot is refused by this engine: {error}"
            ) from error
        request.lora_request = state.added.lora_request
        adapter = request.sequence_outputs[0].seq.adapter
        if adapter is not None and state.adapter_digest not in (None, adapter.digest):
            raise SnapshotError(
                f"request {added.request_id!r} of the snapshot had another adapter than "
                f"{adapter.request.path!r} is now; give it the same files."
            )
        context = self._config.max_model_len
        state.apply(request, self._tokenizer, now_us, context, self._scheduler.kv)
        return request

    @property
    def _facts(self) -> dict[str, Any]:
        model = self._model.config
        ropes = (model.rope, model.window_rope or model.rope)
        stretched = any(rope.kind != "default" for rope in ropes)
        return {
            "jaxserve": __version__,
            "model": self._model.config.name or self._model.config.architecture,
            "fingerprint": self._model.fingerprint,
            "dtype": self._config.dtype,
            "kv_cache_dtype": self._config.kv_cache_dtype,
            "quantization": self._config.quantization,
            "vocabulary": self._tokenizer.fingerprint,
            "rope_context": self._config.max_model_len if stretched else None,
        }


def _cached_table(prefix: dict[str, Any]) -> PageTable:
    """A page table for a prefix of the cache."""
    token_ids = prefix["token_ids"]
    return PageTable(lambda start, stop: token_ids[start:stop], prefix["salt"].encode())


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
