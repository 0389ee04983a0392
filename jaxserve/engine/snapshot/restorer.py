"""Adds requests of other engines, and their KV, to an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.core.errors import AdapterError, OverloadedError, RequestError, SnapshotError
from jaxserve.core.process.signals import interrupts_held
from jaxserve.core.sequence import SharedPrefix
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.local_commands import Resume
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot.requests import RequestSnapshot
from jaxserve.engine.snapshot.saved_kv import SavedKV
from jaxserve.kv.page_table import PageTable
from jaxserve.text import Tokenizer

if TYPE_CHECKING:
    from jaxserve.runtime.adapters import AdapterSlots

Tables = dict[tuple[str, int], PageTable]
"""Page tables by request id and index of a sequence, with the KV pinned that was written for it."""


class Contents(NamedTuple):
    """What a snapshot has for this engine: requests, some finished, and KV, if it is usable."""

    requests: list[Request]
    kv: SavedKV | None


class Restorer:
    """Builds the requests of a snapshot, and adds them to an engine between its steps."""

    def __init__(
        self,
        core: EngineCore,
        input_processor: InputProcessor,
        tokenizer: Tokenizer,
        adapters: AdapterSlots,
        max_model_len: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._input = input_processor
        self._core = core
        self._adapters = adapters

    def built(self, states: list[RequestSnapshot], now_us: int | None = None) -> list[Request]:
        """The requests of these states, with their progress; they arrive at `now_us`, by default
        now. Does not change the engine. Raises SnapshotError when one does not fit it, or has the
        id of an unfinished request, and OverloadedError when the slots of adapters are taken."""
        ids = {state.added.request_id for state in states}.intersection(self._core.requests)
        if ids:
            raise SnapshotError(
                f"request {min(ids)!r} of the snapshot has the id of an unfinished request of "
                "this engine; restore before adding requests, or import under another id."
            )
        now_us = self._core.log.now() if now_us is None else now_us
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
            added = dataclasses.replace(added, lora_request=None)  # It no longer needs its adapter.
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
        context, kv = self._max_model_len, self._core.kv
        state.apply(request, self._tokenizer, now_us, context, kv)
        return request

    def add(
        self,
        contents: Contents,
        staged: Tables | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> list[Request]:
        """Adds these requests to the engine, in this order, once `finish` has not raised. Their KV
        is that of `contents` or is `staged` already."""
        for request in contents.requests:  # Of more adapters than slots, some are gone again.
            if not request.finished:
                self._adapters.check(request.sequence_outputs[0].seq.adapter)
        self._core.note_page_change()
        with interrupts_held():
            tables = self.place(contents, finish) | (staged or {})
            try:
                for request in contents.requests:
                    if not request.finished:
                        self._core.apply(Resume(request))
                        continue
                    for output in request.sequence_outputs:
                        output.use_weights(self._core.weights_version)
            finally:
                self._hand_over(tables, contents.requests)
        return contents.requests

    def place(self, contents: Contents, finish: Callable[[], None]) -> Tables:
        """Writes KV to pages: that of unfinished sequences is pinned by their tables here, that of
        the prefix cache is cached. Then calls `finish`.

        Raises SnapshotError when KV is damaged; what came before it is cached.
        """
        kv = self._core.kv
        tables = {
            (request.request_id, output.seq.index): PageTable(output.seq.token_ids, output.seq.salt)
            for request in contents.requests
            for output in request.unfinished
        }

        def table_of(prefix: dict[str, Any]) -> PageTable | None:
            if prefix["request_id"] is not None:
                return tables.get((prefix["request_id"], prefix["index"]))
            if not kv.prefix_caching:
                return None
            return cached_table(prefix)

        try:
            if contents.kv is not None:
                contents.kv.restore(kv, table_of, self._core.kv_executor.settle)
            finish()
        except BaseException:
            for table in tables.values():
                kv.unpin_table(table)
            raise
        return tables

    def _hand_over(self, tables: Tables, requests: Iterable[Request]) -> None:
        """What these tables pin stays pinned until their sequences run; that of a sequence which
        was not added is unpinned."""
        scheduler = self._core.scheduler
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
                scheduler.kv.hand_over_pins(table, added)


def cached_table(prefix: dict[str, Any]) -> PageTable:
    """A page table for a prefix of the cache."""
    token_ids = prefix["token_ids"]
    return PageTable(lambda start, stop: token_ids[start:stop], prefix["salt"].encode())
