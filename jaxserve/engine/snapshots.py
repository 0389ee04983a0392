"""Snapshots of an engine's requests and KV, for another engine on other devices.

The end of a step is a natural barrier (Singularity, Shukla et al. 2022, has to create one):
between steps the host knows every request's tokens and the pages of their KV. Both are written in
terms of the model alone, so that the next engine's mesh, page size and pool may differ.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.core.errors import RequestError, SnapshotError
from jaxserve.core.sequence import SharedPrefix
from jaxserve.core.version import __version__
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot_files import SnapshotReader, SnapshotWriter
from jaxserve.engine.snapshot_kv import SavedKV, prefixes_of, save_kv
from jaxserve.engine.snapshot_requests import RequestSnapshot
from jaxserve.kv.page_table import PageTable
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.text import Tokenizer

if TYPE_CHECKING:
    from jaxserve.runtime.paging import Paging
    from jaxserve.runtime.startup import EnginePlan


_KV_FACTS = ("dtype", "quantization", "rope_context")
"""Facts that must match for KV to be reused; rope_context is max_model_len if RoPE depends on it.
"""


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
        give_up_s = None if deadline_s is None else time.monotonic() + deadline_s
        writer = SnapshotWriter(directory)
        writer.add_json("requests", _states(requests, now_us))
        writer.commit(self._facts)
        if with_kv:
            self._paging.settle()
            scheduler = self._scheduler
            prefixes = prefixes_of(
                scheduler.kv,
                [*scheduler.running, *scheduler.waiting],
                scheduler.tables,
                cache=self._config.enable_prefix_caching,
            )
            pages = self._paging.images(self._model.config)
            save_kv(writer, prefixes, pages, scheduler.pool.page_size, give_up_s)
            writer.commit(self._facts)

    def read(self, directory: str | Path, in_use: Iterable[str], now_us: int) -> TakenUp:
        """The requests of a snapshot, with their progress. Does not change the engine.

        Raises SnapshotError when the snapshot is damaged, newer, of another model, or has
        requests that do not fit this engine, or whose ids are `in_use`.
        """
        reader = SnapshotReader(directory)
        theirs, ours = reader.facts, self._facts
        if theirs["fingerprint"] != ours["fingerprint"]:
            raise SnapshotError(
                f"the snapshot in {directory} is of model {theirs['model']!r} with fingerprint "
                f"{theirs['fingerprint']}, but this engine runs {ours['model']!r} with "
                f"{ours['fingerprint']}; load the model that the snapshot was written with."
            )
        states = [RequestSnapshot.from_json(fields) for fields in reader.json("requests")]
        taken = {state.added.request_id for state in states}.intersection(in_use)
        if taken:
            raise SnapshotError(
                f"request {min(taken)!r} of the snapshot in {directory} has the id of an "
                "unfinished request of this engine; restore before adding requests."
            )
        prefixes: dict[int, SharedPrefix] = {}
        made = [self._made(state, prefixes, now_us) for state in states]
        usable = reader.has("kv") and all(theirs[name] == ours[name] for name in _KV_FACTS)
        return TakenUp(made, SavedKV(reader) if usable else None)

    def restore_kv(self, taken_up: TakenUp) -> None:
        """Writes KV to pages: of the restored requests, which must be waiting, and of the prefix
        cache."""
        if taken_up.kv is None:
            return
        tables = {
            (request.request_id, output.seq.index): self._scheduler.tables[output.seq.seq_id]
            for request in taken_up.requests
            for output in request.unfinished
        }

        def table_of(prefix: dict[str, Any]) -> PageTable | None:
            if prefix["request_id"] is not None:
                return tables.get((prefix["request_id"], prefix["index"]))
            if not self._config.enable_prefix_caching:
                return None
            token_ids = prefix["token_ids"]
            salt = prefix["salt"].encode()
            return PageTable(lambda start, stop: token_ids[start:stop], salt)

        pages = self._paging.images(self._model.config)
        taken_up.kv.restore(self._scheduler.kv, pages, table_of, self._paging.settle)

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
        context, pool = self._config.max_model_len, self._scheduler.pool
        state.apply(request, self._tokenizer, now_us, context, pool)
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
            "rope_context": self._config.max_model_len if stretched else None,
        }


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
