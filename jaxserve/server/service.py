"""The engine as the server's routes see it: who may come in, and what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Literal

from jaxserve.async_engine import AsyncEngine
from jaxserve.engine.checkpoint import exists
from jaxserve.engine.metrics import Metric
from jaxserve.errors import RequestError
from jaxserve.mailbox import Update
from jaxserve.outputs import CompletionOutput, Delta, RequestOutput
from jaxserve.protocol.endpoints import Call
from jaxserve.protocol.errors import OverloadedError, UnavailableError
from jaxserve.protocol.model import Model
from jaxserve.server.exposition import Exposition

State = Literal["starting", "ready", "draining", "failed"]


class Service:
    """One engine, while it loads, serves and drains. For one event loop.

    Attributes:
        num_sequences: of requests that have been let in and not yet answered.
        exposition: the metrics, of which there are few before the engine is ready.
    """

    def __init__(self, model_names: Sequence[str], max_queued_requests: int) -> None:
        self._model_names = model_names
        self._max_queued = max_queued_requests
        self._engine: AsyncEngine | None = None
        self._model: Model | None = None
        self._draining = False
        self._running: set[str] = set()
        self._restored: dict[str, asyncio.Task[RequestOutput]] = {}
        self.num_sequences = 0
        self.exposition = Exposition(self._metrics, model_names[0])

    @property
    def state(self) -> State:
        if self._engine is not None and self._engine.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        return "starting" if self._engine is None else "ready"

    @property
    def engine(self) -> AsyncEngine:
        """Raises UnavailableError while there is none that takes requests."""
        if self.state != "ready":
            raise UnavailableError(f"the server is {self.state}; try again later, or elsewhere.")
        return self._engine

    @property
    def model(self) -> Model:
        """Raises UnavailableError as `engine` does."""
        return Model.of(self.engine.plan(), self.engine.get_tokenizer(), self._model_names)

    async def begin(self, engine: AsyncEngine, checkpoint_dir: Path | None) -> None:
        """Take requests from now on, and take up those of a checkpoint if there is one. Raises
        CheckpointError."""
        if checkpoint_dir is not None and exists(checkpoint_dir):
            self._restored = await engine.restore(checkpoint_dir)
        self._engine = engine

    @contextlib.asynccontextmanager
    async def follow(
        self, call: Call, request_id: str
    ) -> AsyncIterator[AsyncIterable[tuple[int, Update]]]:
        """Have the engine take in a call; within the block, what becomes of its prompts, by their
        numbers. Leaving the block aborts what has not ended.

        A request that a checkpoint had under way is taken up by sending it again under its id.

        Raises RequestError, OverloadedError when the queue is full, UnavailableError.
        """
        engine, count = self.engine, len(call.prompts)
        ids = [request_id] if count == 1 else [f"{request_id}-{i}" for i in range(count)]
        with self._let_in(count * call.params.n):
            if any(request_id in self._restored for request_id in ids):
                yield self._take_up(call, ids)
                return
            submitted = engine.submit(call.prompts, call.params, ids, wants_deltas=call.stream)
            async with await submitted as updates:
                self._running.update(ids)
                try:
                    yield updates
                finally:
                    self._running.difference_update(ids)

    @property
    def holds_unclaimed(self) -> bool:
        """Whether nobody has asked yet for some request of a checkpoint."""
        return bool(self._restored)

    async def drain(self, grace_s: float) -> bool:
        """Take no more requests, and let those under way end; False if some have not in time."""
        self._draining = True
        give_up = asyncio.get_running_loop().time() + grace_s
        while self.num_sequences and asyncio.get_running_loop().time() < give_up:
            await asyncio.sleep(0.05)
        return not self.num_sequences

    async def abort_all(self) -> None:
        """End what is still under way, with what there is of it."""
        for request_id in list(self._running):
            await self._engine.abort(request_id)

    def _metrics(self) -> dict[str, Metric]:
        open_ = Metric("gauge", "Sequences of requests not yet answered", self.num_sequences)
        engine = {} if self._engine is None else self._engine.get_metrics()
        return {"jaxserve:open_sequences": open_} | engine

    @contextlib.contextmanager
    def _let_in(self, num_sequences: int) -> Iterator[None]:
        room = self._engine.plan().config.max_num_seqs + self._max_queued
        if num_sequences > room:
            raise RequestError(
                f"prompt and n make {num_sequences} sequences; this server takes {room} at once."
            )
        if self.num_sequences + num_sequences > room:
            raise OverloadedError(
                f"{self.num_sequences} sequences are being served or wait, of {room}; try again."
            )
        self.num_sequences += num_sequences
        try:
            yield
        finally:
            self.num_sequences -= num_sequences

    async def _take_up(self, call: Call, ids: list[str]) -> AsyncIterator[tuple[int, Update]]:
        """What became of requests of a checkpoint: all of it at once."""
        for number, request_id in enumerate(ids):
            task = self._restored.get(request_id)
            if task is None:
                raise RequestError(f"request_id {request_id!r} was answered before the restart.")
            output = await asyncio.shield(task)
            if list(output.prompt_token_ids) != call.prompts[number].token_ids:
                raise RequestError(f"request_id {request_id!r} was that of another prompt.")
            self._restored.pop(request_id, None)
            await self._engine.claim(request_id)
            yield number, [_as_delta(choice) for choice in output.outputs]
            yield number, output


def _as_delta(choice: CompletionOutput) -> Delta:
    return Delta(
        choice.index,
        choice.text,
        choice.token_ids,
        choice.logprobs,
        choice.finish_reason,
        choice.stop_reason,
    )
