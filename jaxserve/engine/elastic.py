"""An engine's work written down, and taken up by another engine on other devices.

A step's end is a barrier that is there anyway (Singularity, Shukla et al. 2022, has to make one):
between steps the host knows which tokens every request has, and which pages hold their KV. Both are
written in terms of the model alone, so that the next engine's mesh, page size and pool may differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jaxserve
from jaxserve.engine.checkpoint import CheckpointReader, CheckpointWriter
from jaxserve.engine.intake import Intake, NewRequest
from jaxserve.engine.request import Request
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.saved_kv import SavedKV, prefixes_of, save_kv
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.shared_prefix import SharedPrefix
from jaxserve.errors import CheckpointError, RequestError
from jaxserve.kv.table import PageTable
from jaxserve.text import Tokenizer

if TYPE_CHECKING:
    from jaxserve.runtime.paging import Paging
    from jaxserve.runtime.startup import EnginePlan


_KV_FACTS = ("dtype", "quantization", "rope_context")
"""What must be the same for KV to be of use: the context, where rotary frequencies depend on it."""


class TakenUp(NamedTuple):
    """What a checkpoint has for an engine: requests, some ended, and KV that it can use."""

    requests: list[NewRequest]
    kv: SavedKV | None


class Checkpoints:
    """Writes and reads checkpoints of one engine, between its steps."""

    def __init__(
        self,
        plan: EnginePlan,
        tokenizer: Tokenizer,
        intake: Intake,
        scheduler: Scheduler,
        paging: Paging,
    ) -> None:
        self._config = plan.config
        self._model = plan.checkpoint
        self._tokenizer = tokenizer
        self._intake = intake
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
        """Makes `directory` hold these requests; then also KV, the running sequences' first, as far
        as it goes in `deadline_s` seconds. Raises CheckpointError when the disk refuses."""
        give_up_s = None if deadline_s is None else time.monotonic() + deadline_s
        writer = CheckpointWriter(directory)
        writer.add_json("requests", _states(requests, now_us))
        writer.commit(self._facts)
        if with_kv:
            self._paging.settle()
            scheduler = self._scheduler
            prefixes = prefixes_of(
                scheduler.kv,
                [*scheduler.running, *scheduler.waiting],
                cache=self._config.enable_prefix_caching,
            )
            pages = self._paging.images(self._model.config)
            save_kv(writer, prefixes, pages, scheduler.pool.page_size, give_up_s)
            writer.commit(self._facts)

    def read(self, directory: str | Path, in_use: Iterable[str], now_us: int) -> TakenUp:
        """The requests of a checkpoint, where they were. Changes nothing yet.

        Raises CheckpointError when the checkpoint is damaged, newer, of another model, or has
        requests for which this engine has no room, or whose ids are `in_use`.
        """
        reader = CheckpointReader(directory)
        theirs, ours = reader.facts, self._facts
        if theirs["fingerprint"] != ours["fingerprint"]:
            raise CheckpointError(
                f"the checkpoint in {directory} is of model {theirs['model']!r} with fingerprint "
                f"{theirs['fingerprint']}, and this engine's is {ours['model']!r} with "
                f"{ours['fingerprint']}; load the model that it was written with."
            )
        states = [RequestState.from_json(fields) for fields in reader.json("requests")]
        taken = {state.added.request_id for state in states}.intersection(in_use)
        if taken:
            raise CheckpointError(
                f"request {min(taken)!r} of the checkpoint in {directory} has the id of one that "
                "is unfinished here; restore before adding requests."
            )
        prefixes: dict[int, SharedPrefix] = {}
        made = [self._made(state, prefixes, now_us) for state in states]
        usable = reader.has("kv") and all(theirs[name] == ours[name] for name in _KV_FACTS)
        return TakenUp(made, SavedKV(reader) if usable else None)

    def restore_kv(self, taken_up: TakenUp) -> None:
        """Puts KV on pages, for the requests taken up, which must be waiting by now, and for those
        to come."""
        if taken_up.kv is None:
            return
        tables = {
            (new.request.request_id, generation.seq.index): generation.seq.table
            for new in taken_up.requests
            for generation in new.request.generations
            if not generation.seq.finished
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
        self, state: RequestState, prefixes: dict[int, SharedPrefix], now_us: int
    ) -> NewRequest:
        prefix = None
        if state.added.prefix is not None:
            number, num_tokens = state.added.prefix
            prefix = prefixes.setdefault(number, SharedPrefix(num_tokens))
        try:
            new = self._intake.make_anew(state.added, prefix)
        except RequestError as error:
            raise CheckpointError(
                f"request {state.added.request_id!r} of the checkpoint is refused by this engine: "
                f"{error}"
            ) from error
        context, pool = self._config.max_model_len, self._scheduler.pool
        state.apply(new.request, self._tokenizer, now_us, context, pool)
        return new

    @property
    def _facts(self) -> dict[str, Any]:
        stretched = self._model.config.rope.kind != "default"
        return {
            "jaxserve": jaxserve.__version__,
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
    for request in sorted(requests, key=lambda request: request.generations[0].seq.seq_id):
        shared = request.generations[0].seq.prefixes
        if request.params.n > 1:  # The last is its own, and will be again.
            shared = shared[:-1]
        numbered = [(numbers.setdefault(p, len(numbers)), p.num_tokens) for p in shared]
        states.append(RequestState.of(request, next(iter(numbered), None), now_us).to_json())
    return states
