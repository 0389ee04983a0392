"""The engine behind the routes: admission, streaming of updates, drain and resume."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from jaxserve.async_engine import AsyncEngine, Restored
from jaxserve.core.chat_settings import ChatSettings
from jaxserve.core.errors import RequestError
from jaxserve.core.outputs import CompletionOutput, Delta, RequestOutput
from jaxserve.core.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.engine.output_queue import Update
from jaxserve.engine.snapshot_files import exists
from jaxserve.metrics.metrics import Metric
from jaxserve.protocol.endpoints import ParsedRequest
from jaxserve.protocol.errors import FieldError, OverloadedError, UnavailableError
from jaxserve.protocol.model import Model
from jaxserve.protocol.responses import State
from jaxserve.server.exposition import Exposition
from jaxserve.server.workers import NUM_THREADS, Kind, Workers

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ClientPolicy:
    """What clients may set and see.

    Attributes:
        min_priority: the best priority that a request may have; None for any.
        hide_cached_tokens: report no prompt token as cached.
    """

    min_priority: int | None = None
    hide_cached_tokens: bool = False

    def check(self, params: SamplingParams) -> None:
        """Raises FieldError for a priority that is better than allowed."""
        if self.min_priority is not None and params.priority < self.min_priority:
            raise FieldError(
                "priority",
                f"is {params.priority}; on this server it must be {self.min_priority} or more.",
            )


class Service:
    """One engine, while it loads, serves and drains. For one event loop.

    Attributes:
        policy: what clients may set and see.
        model_names: names that requests may use for the model.
        num_sequences: sequences of requests admitted and not yet answered.
        exposition: the metrics; only the server's own before the engine is ready.
    """

    def __init__(
        self,
        model_names: Sequence[str],
        max_queued_requests: int,
        policy: ClientPolicy = ClientPolicy(),
        chat: ChatSettings | None = None,
        max_logprobs: int = MAX_LOGPROBS,
    ) -> None:
        self.policy = policy
        self.model_names = model_names
        self._chat = chat
        self._max_logprobs = max_logprobs
        self._max_queued = max_queued_requests
        self._engine: AsyncEngine | None = None
        self._model: Model | None = None
        self._draining = False
        self._aborted = False
        self._running: set[str] = set()
        self._restored: dict[str, Restored] = {}
        self._workers = {kind: Workers(number) for kind, number in NUM_THREADS.items()}
        self.num_sequences = 0
        self.exposition = Exposition(self._metrics, model_names[0])

    @property
    def state(self) -> State:
        if self._engine is not None and self._engine.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        if self._engine is None:
            return "starting"
        return "stalled" if self._engine.stalled else "ready"

    @property
    def engine(self) -> AsyncEngine:
        """Raises UnavailableError unless the engine is ready."""
        if self.state != "ready":
            raise UnavailableError(
                f"the server is {self.state}; retry later, or on another server."
            )
        return self._engine

    @property
    def model(self) -> Model:
        """Raises UnavailableError as `engine` does."""
        engine = self.engine
        if self._model is None:
            plan, tokenizer = engine.plan(), engine.get_tokenizer()
            self._model = Model.of(
                plan, tokenizer, self.model_names, self._chat, self._max_logprobs
            )
        return self._model

    async def begin(self, engine: AsyncEngine, snapshot_dir: Path | None) -> None:
        """Start accepting requests, and resume those of a snapshot if there is one. Raises
        SnapshotError."""
        if snapshot_dir is not None and exists(snapshot_dir):
            self._restored = await engine.restore(snapshot_dir)
        self._engine = engine

    async def prepare(self, work: Callable[[Model], T], kind: Kind) -> T:
        """The result of `work`, such as parsing a request, in a thread for this kind of request.

        Raises UnavailableError, OverloadedError when more is being prepared than can run or wait,
        and what `work` raises.
        """
        model = self.model
        return await self._workers[kind].run(self._room, work, model)

    async def reset_prefix_cache(self) -> None:
        """Forget the KV of finished requests. Raises UnavailableError."""
        await self.engine.reset_prefix_cache()

    @property
    def preparing(self) -> bool:
        """Whether a thread prepares a request, even one whose client has been refused or is
        gone."""
        return any(workers.busy for workers in self._workers.values())

    def close(self) -> None:
        """Refuse requests that are being prepared."""
        for workers in self._workers.values():
            workers.close()

    @contextlib.asynccontextmanager
    async def follow(
        self, call: ParsedRequest, request_id: str, tenant: str | None
    ) -> AsyncIterator[AsyncIterable[tuple[int, Update]]]:
        """Submit a request to the engine, and iterate over updates with the index of their prompt.
        Leaving the block aborts prompts that have not finished. `tenant` is the sender.

        Prompts get the request's id in the engine, or one derived from it if that is in use, as
        when a proxy gives one id to several requests. A request in a restored snapshot is claimed
        by its tenant, by sending it again under its id.

        Raises RequestError, OverloadedError when the queue is full, UnavailableError.
        """
        engine = self.engine
        self.policy.check(call.params)
        ids = self._ids(request_id, len(call.prompts), tenant)
        with self._let_in(len(ids) * call.params.n):
            restored = {
                i: self._restored[name] for i, name in enumerate(ids) if name in self._restored
            }
            for number, request in restored.items():
                _check_same(request, call, number, ids[number])
            anew = [number for number in range(len(ids)) if number not in restored]
            new_ids = [ids[number] for number in anew]
            self._running.update(new_ids)
            try:
                submitted = engine.submit(
                    [call.prompts[number] for number in anew],
                    call.params,
                    new_ids,
                    tenant=tenant,
                    cache_salt=call.cache_salt,
                    wants_deltas=call.stream and not restored,
                )
                async with await submitted as updates:
                    if self._aborted:  # abort_all() ran while this one was being submitted.
                        await self.abort_all()
                    seen = self._taken_up(ids, restored, anew, updates) if restored else updates
                    yield _without_cached_tokens(seen) if self.policy.hide_cached_tokens else seen
            finally:
                self._running.difference_update(new_ids)

    @property
    def holds_unclaimed(self) -> bool:
        """Whether some request of a restored snapshot has not been claimed yet."""
        return bool(self._restored)

    async def drain(self, shutdown_timeout: float) -> bool:
        """Stop admission and drain requests in flight; False if some did not finish in time."""
        self._draining = True
        give_up = asyncio.get_running_loop().time() + shutdown_timeout
        while self.num_sequences and asyncio.get_running_loop().time() < give_up:
            await asyncio.sleep(0.05)
        return not self.num_sequences

    async def abort_all(self) -> None:
        """Abort all requests in flight, which return their partial output."""
        self._aborted = True
        for request_id in list(self._running):
            await self._engine.abort(request_id)

    def _metrics(self) -> dict[str, Metric]:
        open_ = Metric("gauge", "Sequences of requests not yet answered", self.num_sequences)
        engine = {} if self._engine is None else self._engine.get_metrics()
        return {"jaxserve:open_sequences": open_} | engine

    @contextlib.contextmanager
    def _let_in(self, num_sequences: int) -> Iterator[None]:
        room = self._room
        if num_sequences > room:
            raise RequestError(
                f"prompt and n make {num_sequences} sequences; this server accepts at most {room}."
            )
        if self.num_sequences + num_sequences > room:
            raise OverloadedError(
                f"{self.num_sequences} of at most {room} sequences run or wait; retry later."
            )
        self.num_sequences += num_sequences
        try:
            yield
        finally:
            self.num_sequences -= num_sequences

    @property
    def _room(self) -> int:
        """Maximum number of sequences that run or wait."""
        return self._engine.plan().config.max_num_seqs + self._max_queued

    def _ids(self, request_id: str, count: int, tenant: str | None) -> list[str]:
        """Engine ids for a request's prompts, none of them in use or that of a restored request of
        another tenant."""
        ids = [request_id] if count == 1 else [f"{request_id}-{i}" for i in range(count)]
        restored = [self._restored[name] for name in ids if name in self._restored]
        if self._running.isdisjoint(ids) and all(each.tenant == tenant for each in restored):
            return ids
        return self._ids(f"{request_id}~{uuid.uuid4().hex[:8]}", count, tenant)

    async def _taken_up(
        self,
        ids: list[str],
        restored: Mapping[int, Restored],
        anew: Sequence[int],
        updates: AsyncIterable[tuple[int, Update]],
    ) -> AsyncIterator[tuple[int, Update]]:
        """Updates of a request with restored prompts, `restored`, and new ones, `anew`. Yields only
        when all have finished, because until then the next snapshot must contain them."""
        outputs = {anew[place]: output async for place, output in updates}
        for number, request in restored.items():
            outputs[number] = await asyncio.shield(request.output)
        for number in restored:
            self._restored.pop(ids[number], None)
            await self._engine.claim(ids[number])
        for number, output in sorted(outputs.items()):
            yield number, [_as_delta(choice) for choice in output.outputs]
            yield number, output


async def _without_cached_tokens(
    updates: AsyncIterable[tuple[int, Update]],
) -> AsyncIterator[tuple[int, Update]]:
    async for number, update in updates:
        if isinstance(update, RequestOutput):
            metrics = dataclasses.replace(update.metrics, cached_tokens=0)
            update = dataclasses.replace(update, metrics=metrics)
        yield number, update


def _check_same(request: Restored, call: ParsedRequest, number: int, request_id: str) -> None:
    """Raises RequestError if a restored request differs from prompt `number`."""
    if list(request.prompt_token_ids) != list(call.prompts[number].token_ids):
        raise RequestError(f"request_id {request_id!r} was used for another prompt.")
    for field in dataclasses.fields(call.params):
        was, now = getattr(request.params, field.name), getattr(call.params, field.name)
        if was != now and field.name != "priority":
            raise FieldError(
                field.name, f"is {now!r:.80}, but request_id {request_id!r} had {was!r:.80}."
            )


def _as_delta(choice: CompletionOutput) -> Delta:
    return Delta(
        choice.index,
        choice.text,
        choice.token_ids,
        choice.logprobs,
        choice.finish_reason,
        choice.stop_reason,
    )
