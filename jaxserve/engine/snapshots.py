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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.core.errors import RequestError, SnapshotError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence, SharedPrefix
from jaxserve.core.version import __version__
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot_files import SnapshotReader, SnapshotWriter
from jaxserve.engine.snapshot_kv import SavedKV, kv_entries, prefixes_of
from jaxserve.engine.snapshot_parts import PartReader, parts
from jaxserve.engine.snapshot_requests import RequestSnapshot
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.tiers import PageCorruptError
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.text import Tokenizer

if TYPE_CHECKING:
    from jaxserve.runtime.paging import Paging
    from jaxserve.runtime.startup import EnginePlan


_KV_FACTS = ("dtype", "quantization", "rope_context")
"""Facts that must match for KV to be reused; rope_context is max_model_len if RoPE depends on it.
"""


def exported_params(parts: Iterable[bytes]) -> SamplingParams:
    """The sampling parameters of an exported request. Raises SnapshotError for anything else."""
    return _states_of(PartReader(parts))[0].added.params


class TakenUp(NamedTuple):
    """The contents of a snapshot: requests, some finished, and KV, if it is usable here."""

    requests: list[Request]
    kv: SavedKV | None


class Snapshots:
    """Writes and reads snapshots of one engine, between its steps."""

    def __init__(
        self,
        plan: EnginePlan,
        tokenizer: Tokenizer,
        intake: InputProcessor,
        scheduler: Scheduler,
        paging: Paging,
    ) -> None:
        self._config = plan.config
        self._model = plan.checkpoint
        self._tokenizer = tokenizer
        self._input = intake
        self._scheduler = scheduler
        self._paging = paging

    def write(
        self,
        directory: str | Path,
        requests: Iterable[Request],
        now_us: int,
        with_kv: bool,
        deadline_s: float | None,
    ) -> None:
        """Writes these requests to `directory`; then KV, that of running sequences first, for up to
        `deadline_s` seconds. Raises SnapshotError when writing fails."""
        give_up_s = math.inf if deadline_s is None else time.monotonic() + deadline_s
        writer = SnapshotWriter(directory)
        writer.add("requests", _states(requests, now_us))
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

    def export(self, request: Request, now_us: int, with_kv: bool) -> Iterator[bytes]:
        """The parts of a snapshot of one unfinished request, with the KV of its sequences. They are
        read from the pages one after another: the engine must not run until the last."""

        def entries() -> Iterator[tuple[str, Any]]:
            yield "requests", _states([request], now_us)
            if with_kv:
                with contextlib.suppress(PageCorruptError, OSError):
                    yield from self._kv([output.seq for output in request.unfinished], cache=False)

        return parts(self._facts, entries())

    def read(self, reader: SnapshotReader, in_use: Iterable[str], now_us: int) -> TakenUp:
        """The requests of a snapshot, with their progress. Does not change the engine. KV that
        cannot be used here is left out.

        Raises SnapshotError when the snapshot is damaged, of another model, or has requests that
        do not fit this engine, or whose ids are `in_use`.
        """
        self._check_model(reader.facts)
        states, ours = _states_of(reader), self._facts
        made = self._all_made(states, in_use, now_us)
        usable = all(reader.facts.get(name) == ours[name] for name in _KV_FACTS)
        return TakenUp(made, SavedKV(reader) if usable and reader.has("kv") else None)

    def read_exported(
        self, reader: PartReader, request_id: str | None, in_use: Iterable[str], now_us: int
    ) -> TakenUp:
        """As `read`, for an exported request, named `request_id` if that is not None. It must go on
        with the same tokens: raises SnapshotError also when this engine computes in another dtype
        or quantization."""
        self._check_model(reader.facts)
        theirs, ours = reader.facts, self._facts
        for name in _KV_FACTS:
            if theirs.get(name) != ours[name]:
                raise SnapshotError(
                    f"{name} is {theirs.get(name)!r} in the engine that exported the request and "
                    f"{ours[name]!r} in this one, which would go on with other tokens; import it "
                    f"into an engine with the same {name}."
                )
        (state,) = _states_of(reader)
        name = request_id or state.added.request_id
        added = dataclasses.replace(state.added, request_id=name)
        made = self._all_made([dataclasses.replace(state, added=added)], in_use, now_us)
        saved = SavedKV(reader) if reader.has("kv") else None
        for prefix in saved.prefixes if saved is not None else ():
            prefix["request_id"] = name
        return TakenUp(made, saved)

    @contextlib.contextmanager
    def kv_placed(self, taken_up: TakenUp) -> Iterator[None]:
        """Writes KV to pages, for a block that adds the unfinished requests: that of their
        sequences stays pinned until they run, that of the prefix cache is cached. What was not
        added in the end is unpinned.

        Raises SnapshotError when KV is damaged; what came before it is cached.
        """
        kv = self._scheduler.kv
        sequences = {
            (request.request_id, output.seq.index): output.seq
            for request in taken_up.requests
            for output in request.unfinished
        }
        tables = {key: PageTable(seq.token_ids, seq.salt) for key, seq in sequences.items()}

        def table_of(prefix: dict[str, Any]) -> PageTable | None:
            if prefix["request_id"] is not None:
                return tables.get((prefix["request_id"], prefix["index"]))
            if not self._config.enable_prefix_caching:
                return None
            token_ids = prefix["token_ids"]
            salt = prefix["salt"].encode()
            return PageTable(lambda start, stop: token_ids[start:stop], salt)

        try:
            if taken_up.kv is not None:
                pages = self._paging.images(self._model.config)
                taken_up.kv.restore(kv, pages, table_of, self._paging.settle)
            yield
        finally:
            for key, table in tables.items():
                added = self._scheduler.tables.get(sequences[key].seq_id)
                if added is None:
                    kv.unpin_table(table)
                else:
                    added.pinned = table.pinned

    def _kv(self, sequences: Iterable[Sequence], cache: bool) -> Iterator[tuple[str, Any]]:
        scheduler = self._scheduler
        prefixes = prefixes_of(scheduler.kv, sequences, scheduler.tables, cache=cache)
        return kv_entries(prefixes, self._paging.images(self._model.config))

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

    def _all_made(
        self, states: list[RequestSnapshot], in_use: Iterable[str], now_us: int
    ) -> list[Request]:
        """The requests of these states. Raises SnapshotError when one does not fit this engine, or
        its id is `in_use`."""
        taken = {state.added.request_id for state in states}.intersection(in_use)
        if taken:
            raise SnapshotError(
                f"request {min(taken)!r} of the snapshot has the id of an unfinished request of "
                "this engine; restore before adding requests, or import under another id."
            )
        prefixes: dict[int, SharedPrefix] = {}
        return [self._made(state, prefixes, now_us) for state in states]

    def _made(
        self, state: RequestSnapshot, prefixes: dict[int, SharedPrefix], now_us: int
    ) -> Request:
        prefix = None
        if state.prefix is not None:
            number, num_tokens = state.prefix
            prefix = prefixes.setdefault(number, SharedPrefix(num_tokens))
        added = dataclasses.replace(state.added, shared_prefix=prefix)
        try:
            request = self._input.rebuild(added)
        except RequestError as error:
            raise SnapshotError(
                f"request {added.request_id!r} of the snapshot is refused by this engine: {error}"
            ) from error
        context = self._config.max_model_len
        state.apply(request, self._tokenizer, now_us, context, self._scheduler.kv)
        return request

    @property
    def _facts(self) -> dict[str, Any]:
        stretched = self._model.config.rope.kind != "default"
        return {
            "jaxserve": __version__,
            "model": self._model.config.name or self._model.config.architecture,
            "fingerprint": self._model.fingerprint,
            "dtype": self._config.dtype,
            "quantization": self._config.quantization,
            "vocabulary": self._tokenizer.fingerprint,
            "rope_context": self._config.max_model_len if stretched else None,
        }


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
