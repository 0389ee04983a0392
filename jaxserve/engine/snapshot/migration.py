"""Requests and prefixes that move to another engine while both run.

Llumnix (Sun et al. 2024) moves requests between replicas: what they have computed is copied while
they run, in stages, and a request stops for the last one only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import RequestError, SnapshotError
from jaxserve.core.process.signals import interrupts_held
from jaxserve.engine.input_processor import prefix_salt
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot.access import EngineAccess, states_of
from jaxserve.engine.snapshot.kv import Prefix, TakenPages, kv_entries
from jaxserve.engine.snapshot.requests import RequestSnapshot
from jaxserve.engine.snapshot.restorer import Contents, Tables, cached_table
from jaxserve.engine.snapshot.saved_kv import SavedKV
from jaxserve.engine.snapshot.stream import PartReader, encode_parts
from jaxserve.kv.layout import TRANSFER_PAGES
from jaxserve.kv.offload.stores import PageCorruptError
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.tier import Tier

if TYPE_CHECKING:
    from jaxserve.runtime.planning.memory import MemoryPlan

_MAX_GIVEN_UP = 1024
"""Ids of requests whose KV was given up that are remembered: a stage of it may come later."""


def max_takes(max_prefill_tokens: int, page_size: int, num_pages: int) -> int:
    """Most copies of TRANSFER_PAGES pages that are on the devices at a time, in memory for
    `num_pages` pages beside the pool: those of the prompts of two steps, one of which is read while
    the other is computed."""
    of_step = cdiv(cdiv(max_prefill_tokens, page_size), TRANSFER_PAGES)
    return min(2 * of_step, num_pages // TRANSFER_PAGES)


class Received(NamedTuple):
    """What another engine has exported: a request, unless it is a prefix, and KV, if there is any.
    `finish` checks the parts that are left."""

    state: RequestSnapshot | None
    kv: SavedKV | None
    finish: Callable[[], None]


class _Staged(NamedTuple):
    """KV that waits for its request. Without a prefix cache, that shares it by its salt alone."""

    salt: bytes
    tables: Tables


class Migration:
    """Exports the requests and prefixes of one engine, and takes those of others, between its
    steps.

    Every method raises as those of `Snapshots`.
    """

    def __init__(self, engine: EngineAccess, memory: MemoryPlan) -> None:
        """`memory` is the engine's: what it leaves free, copies may take."""
        self._engine = engine
        self._staged: dict[str, _Staged] = {}
        self._given_up: collections.deque[str] = collections.deque(maxlen=_MAX_GIVEN_UP)
        self._taken: weakref.WeakSet[TakenPages] = weakref.WeakSet()
        prefill_tokens = engine.core.scheduler.config.max_prefill_tokens
        self._max_takes = max_takes(prefill_tokens, memory.page_size, memory.num_free_pages)

    def export_request(
        self,
        request_id: str,
        with_kv: bool = True,
        start: int | None = None,
        stop: int | None = None,
    ) -> Iterator[bytes]:
        """An unfinished request as bytes, for `import_request` of another engine: its parameters,
        its tokens and, `with_kv`, the KV of its sequences, in a form that knows neither mesh nor
        page size. In parts of about 64 MB, made one by one; read the last before the engine's next
        step. `start`: a stage of a copy, for `stage_request`: KV from about this token on, and of a
        prompt that is being computed full pages alone; with `stop` that of the tokens before it.

        The request stays here, and runs on. Once it is imported elsewhere, end it here by `abort`;
        if the import fails, nothing has to be undone. Both engines generate the same tokens.

        Raises RequestError when no unfinished request has this id, and SnapshotError in a
        multi-host job, or for a part that is read too late.
        """
        exported = self._parts_of(self._unfinished(request_id), with_kv, start, stop)
        return self._while_unchanged(exported, self._engine.core.num_page_changes)

    def begin_export(
        self,
        request_id: str,
        with_kv: bool = True,
        start: int | None = None,
        stop: int | None = None,
    ) -> Iterator[bytes]:
        """As `export_request`, but its parts may be read later, in any thread, while steps
        continue. For that its pages are copied on the devices, by up to `max_takes` copies at a
        time of all exports, which no step waits for. A request that needs more of them, or has
        pages on lower tiers, is read here."""
        request = self._unfinished(request_id)
        sequences = [output.seq for output in request.unfinished] if with_kv else []
        prefixes = list(self._engine.prefixes(sequences, start=start, stop=stop))
        places = list(dict.fromkeys(place for prefix in prefixes for place in prefix.places))
        room = self._max_takes - sum(taken.num_takes for taken in self._taken)
        needed = cdiv(len(places), TRANSFER_PAGES)
        if needed > room or any(tier is not Tier.DEVICE for tier, _ in places):
            return iter([*self.export_request(request_id, with_kv, start, stop)])
        taken = TakenPages(places, self._engine.token_kv)
        self._taken.add(taken)
        states = self._engine.states([request])
        entries = itertools.chain([("requests", states)], kv_entries(prefixes, taken))
        return encode_parts(self._engine.facts.ours, entries if with_kv else [("requests", states)])

    def _unfinished(self, request_id: str) -> Request:
        self._engine.check_open()
        self._engine.check()
        self._engine.check_one_host()
        request = self._engine.core.requests.get(request_id)
        if request is None:
            raise RequestError(f"request_id {request_id!r} is not an unfinished request.")
        return request

    def num_computed(self, request_id: str) -> int | None:
        """How many tokens of a request's first sequence have their KV, by the steps that were
        dispatched; None when it is not unfinished."""
        request = self._engine.core.requests.get(request_id)
        outputs = () if request is None else request.unfinished
        return next((output.seq.num_written for output in outputs), None)

    def received(self, parts: Iterable[bytes]) -> Received:
        """A request or prefix that another engine has exported, checked, and its KV converted to
        pages of this engine: for `import_request`, `stage_request` or `import_prefix`, which then
        only write these. Any thread may call it, while steps continue.

        Raises SnapshotError when a part is damaged or missing, or of an engine with another model,
        vocabulary, dtype or quantization.
        """
        self._engine.check_ready()
        self._engine.check_one_host()
        received = self._read(parts)
        if received.kv is not None:
            received.kv.convert()
        received.finish()
        return received

    def import_request(
        self, parts: Iterable[bytes] | Received, request_id: str | None = None
    ) -> Request:
        """Add a request that another engine has exported, by default under its id there. It resumes
        where it was, and streams all its deltas again.

        Raises SnapshotError, with the request not added, when a part is damaged or missing, when
        this engine has another model, vocabulary, dtype or quantization or is too small for the
        request, or when its id is in use, and OverloadedError when the slots of adapters are taken.
        """
        self._engine.check_ready()
        self._engine.check_one_host()
        received = parts if isinstance(parts, Received) else self._read(parts)
        contents = self._built(received, request_id)
        (request,) = self._engine.restorer.add(contents, finish=received.finish)
        return request

    def resume_request(self, state: RequestSnapshot) -> Request:
        """Add a request of another engine, with the tokens that it had generated, as
        `import_request`. Both engines have the same model and settings. KV that was staged for its
        id is not computed again; without, as for an engine that was lost, all of it is.

        Raises SnapshotError when the request does not fit this engine, or its id is in use, and
        OverloadedError when the slots of adapters are taken: it may be retried.
        """
        self._engine.check_ready()
        self._engine.check_one_host()
        contents = Contents(self._engine.restorer.built([state]), None)
        staged = self._staged.pop(state.added.request_id, None)
        if staged is None:
            (request,) = self._engine.restorer.add(contents)
            return request
        for output in contents.requests[0].sequence_outputs:
            output.seq.salt = staged.salt
        (request,) = self._engine.restorer.add(contents, staged.tables)
        return request

    def stage_request(self, parts: Iterable[bytes] | Received, request_id: str) -> int:
        """Take the KV of a request that another engine has exported, while the request runs on
        there: `resume_request` with the tokens that it has by then, under `request_id`, adds it
        here. The KV stays until then, or until `unstage_request`. It may come in several stages,
        each from where the one before has ended.

        Returns how many tokens of every sequence have their KV here now: there may be no room.
        Raises as `import_request`, and RequestError after `unstage_request`, for a stage that was
        late; what came in stages before stays.
        """
        self._engine.check_ready()
        self._engine.check_one_host()
        if request_id in self._given_up:
            raise RequestError(f"the KV of request {request_id!r} was given up here.")
        received = parts if isinstance(parts, Received) else self._read(parts)
        contents = self._built(received, request_id)
        sequences = [output.seq for output in contents.requests[0].unfinished]
        before = self._staged.get(request_id)
        if before is not None:
            for seq in sequences:
                seq.salt = before.salt
        self._engine.core.note_page_change()
        with interrupts_held():
            tables = self._engine.restorer.place(contents, received.finish)
        self._unstage(request_id)
        self._staged[request_id] = _Staged(sequences[0].salt, tables)
        known = (
            self._engine.core.kv.known(tables[request_id, seq.index], seq.num_tokens)[1]
            for seq in sequences
        )
        return min(known)

    def unstage_request(self, request_id: str) -> None:
        """Give up the KV of a request that does not come, staged already or on its way."""
        self._given_up.append(request_id)
        self._unstage(request_id)

    def _unstage(self, request_id: str) -> None:
        staged = self._staged.pop(request_id, None)
        for table in () if staged is None else staged.tables.values():
            self._engine.core.kv.unpin_table(table)

    def export_prefix(
        self, token_ids: SequenceOf[int], tenant: str | None = None, cache_salt: str | None = None
    ) -> Iterator[bytes]:
        """The KV that is cached of the first full pages of these tokens, on any tier, for
        `import_prefix` of another engine; read all parts before the next step. Without adapters.
        There may be none: of models with attention windows there never is.

        Raises SnapshotError in a multi-host job, or for a part that is read too late.
        """
        self._engine.check_ready()
        self._engine.check_one_host()
        kv, salt = self._engine.core.kv, prefix_salt(tenant, cache_salt)
        prefixes = []
        if kv.prefix_caching and not kv.windowed:
            table = PageTable(lambda start, stop: token_ids[start:stop], salt)
            num_tokens = len(token_ids) // kv.pool.page_size * kv.pool.page_size
            nodes, num_tokens = kv.known(table, num_tokens)
            if num_tokens:
                places = [node.nearest for node in nodes]
                known = list(token_ids[:num_tokens])
                prefixes.append(Prefix(num_tokens, places, salt=salt.decode(), token_ids=known))
        entries = kv_entries(prefixes, self._engine.token_kv)
        exported = encode_parts(self._engine.facts.ours, entries)
        return self._while_unchanged(exported, self._engine.core.num_page_changes)

    def import_prefix(self, parts: Iterable[bytes] | Received) -> int:
        """Cache a prefix that another engine has exported, as far as there is room, and return how
        many of its tokens are cached now.

        Raises SnapshotError for a part that is damaged or missing, and for KV of another model,
        dtype or quantization. What was cached before the damaged part stays.
        """
        self._engine.check_ready()
        self._engine.check_one_host()
        received = parts if isinstance(parts, Received) else self._read(parts)
        if received.kv is None or received.state is not None:
            raise SnapshotError("the parts have no prefix; import those of `export_prefix`.")
        self._engine.core.note_page_change()
        with interrupts_held():
            self._engine.restorer.place(Contents([], received.kv), received.finish)
        num_tokens = 0
        for prefix in received.kv.prefixes:
            table = cached_table(prefix)
            num_tokens += self._engine.core.kv.known(table, prefix["num_tokens"])[1]
        return num_tokens

    def _parts_of(
        self, request: Request, with_kv: bool, start: int | None, stop: int | None
    ) -> Iterator[bytes]:
        """The parts of a snapshot of one unfinished request, with the KV of its sequences, from
        `start` on and before `stop`. They are read from the pages one after another: the engine
        must not run until the last."""
        states = self._engine.states([request])

        def entries() -> Iterator[tuple[str, Any]]:
            yield "requests", states
            if with_kv:
                with contextlib.suppress(PageCorruptError, OSError):
                    sequences = [output.seq for output in request.unfinished]
                    yield from self._engine.kv(sequences, False, start, stop)

        return encode_parts(self._engine.facts.ours, entries())

    def _while_unchanged(self, parts: Iterator[bytes], num_changes: int) -> Iterator[bytes]:
        """These parts, while no step writes to the pages that they are read from."""
        while True:
            if self._engine.core.num_page_changes != num_changes:
                raise SnapshotError(
                    "the engine has gone on since the export began; read all parts before its next "
                    "step, and before a request is aborted."
                )
            part = next(parts, None)
            if part is None:
                return
            yield part

    def _read(self, parts: Iterable[bytes]) -> Received:
        """What has been exported, its KV not yet read. A request must continue with the same
        tokens: raises SnapshotError also when this engine computes in another dtype or
        quantization, of weights or of KV."""
        reader = PartReader(parts)
        self._engine.facts.check_model(reader.facts)
        self._engine.facts.check_kv(reader.facts)
        state = states_of(reader)[0] if reader.has("requests") else None
        kv = self._engine.saved(reader) if reader.has("kv") else None
        return Received(state, kv, reader.finish)

    def _built(self, received: Received, request_id: str | None) -> Contents:
        """A request, named `request_id` if that is not None, with its KV."""
        state, kv = received.state, received.kv
        if state is None:
            raise SnapshotError("the parts have no request; import those of `export_request`.")
        name = request_id or state.added.request_id
        added = dataclasses.replace(state.added, request_id=name)
        requests = self._engine.restorer.built([dataclasses.replace(state, added=added)])
        for prefix in () if kv is None else kv.prefixes:
            prefix["request_id"] = name
        return Contents(requests, kv)
