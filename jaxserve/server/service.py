"""The engine behind the routes: admission, streaming of updates, drain and resume."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.core.settings.chat_settings import ChatSettings
from jaxserve.engine.beam_search import BeamSearch, BeamSearchParams, beam_output, search_async
from jaxserve.engine.client import ClusterClient, EngineClient, Restored
from jaxserve.engine.output_queue import OutputStream, Update
from jaxserve.engine.prompts import Prompt, TokenizedPrompt
from jaxserve.engine.snapshot.files import exists
from jaxserve.metrics.metric import Metric
from jaxserve.protocol.endpoints import ParsedRequest
from jaxserve.protocol.errors import FieldError, OverloadedError, UnavailableError
from jaxserve.protocol.model import Model
from jaxserve.protocol.response_models import State
from jaxserve.server.exposition import Exposition
from jaxserve.server.preparation import (
    NUM_THREADS,
    PreparationKind,
    PreparationPool,
    stopping_error,
)
from jaxserve.server.restored_requests import RestoredRequests

_KV_USAGE, _WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_waiting"

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

    def check(self, params: SamplingParams | PoolingParams) -> None:
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
    """

    def __init__(
        self,
        model_names: Sequence[str],
        max_queued_requests: int,
        policy: ClientPolicy = ClientPolicy(),
        chat: ChatSettings | None = None,
        max_logprobs: int = MAX_LOGPROBS,
        lora_modules: Sequence[LoRARequest] = (),
    ) -> None:
        """`lora_modules`: adapters to load before the first request."""
        self.policy = policy
        self.model_names = model_names
        self._chat = chat
        self._max_logprobs = max_logprobs
        self._lora_modules = lora_modules
        self._adapters: dict[str, LoRARequest] = {}
        self._max_queued = max_queued_requests
        self._engine: EngineClient | None = None
        self._model: Model | None = None
        self._draining = False
        self._aborted = False
        self._running: set[str] = set()
        self._restored: RestoredRequests | None = None
        self._preparation = {kind: PreparationPool(number) for kind, number in NUM_THREADS.items()}
        self.num_sequences = 0
        self._num_rejected = 0
        self._exposition = Exposition(model_names[0])

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
    def engine(self) -> EngineClient:
        """Raises UnavailableError unless the engine is ready."""
        if self.state != "ready":
            raise UnavailableError(
                f"the server is {self.state}; retry later, or on another server."
            )
        return self._engine

    @property
    def cluster(self) -> ClusterClient:
        """The replicas of a server that has several, of which none need be ready. Raises
        UnavailableError before they are loaded."""
        if self._engine is None:
            raise UnavailableError("the server is starting; retry later.")
        return cast(ClusterClient, self._engine)

    @property
    def model(self) -> Model:
        """Raises UnavailableError as `engine` does."""
        engine = self.engine
        if self._model is None:
            tokenizer = engine.get_tokenizer()
            self._model = Model.of(
                engine.info,
                tokenizer,
                self.model_names,
                self._chat,
                self._max_logprobs,
                list(self._adapters.values()),
            )
        return self._model

    async def begin(self, engine: EngineClient, snapshot_dir: Path | None) -> None:
        """Load adapters, start accepting requests, and resume those of a snapshot if there is one,
        whose adapters are then names of models too. Raises AdapterError, SnapshotError."""
        for adapter in self._lora_modules:
            await self._add_lora(engine, adapter)
        restored: dict[str, Restored] = {}
        if snapshot_dir is not None and exists(snapshot_dir):
            restored = await engine.restore(snapshot_dir)
        for request in restored.values():
            if request.lora_request is not None:
                self._adapters.setdefault(request.lora_request.name, request.lora_request)
        self._restored = RestoredRequests(engine, restored)
        self._engine = engine

    async def prepare(self, work: Callable[[Model], T], kind: PreparationKind) -> T:
        """The result of `work`, such as parsing a request, in a thread for this kind of request.

        Raises UnavailableError, OverloadedError when more is being prepared than can run or wait,
        and what `work` raises.
        """
        model = self.model
        return await self._preparation[kind].run(self._room, work, model)

    async def reset_prefix_cache(self) -> None:
        """Forget the KV of finished requests. Raises UnavailableError."""
        await self.engine.reset_prefix_cache()

    async def update_weights(self, checkpoint: str) -> int:
        """Replace the weights, and return their version. Raises UnavailableError, and as
        `AsyncEngine.update_weights`."""
        version = await self.engine.update_weights(checkpoint)
        self._model = None  # Its fingerprint is of the weights.
        return version

    async def add_lora(self, adapter: LoRARequest, load_inplace: bool = False) -> None:
        """Load an adapter, whose name is then one of a model; with `load_inplace` in the place of
        one with its name. Raises UnavailableError, RequestError for a name that is taken, and as
        `AsyncEngine.add_lora`."""
        await self._add_lora(self.engine, adapter, load_inplace)

    async def remove_lora(self, name: str) -> None:
        """Unload an adapter, whose name is then free; unfinished requests keep it. Raises
        UnavailableError, RequestError when it is not loaded."""
        await self.engine.remove_lora(name)
        self._adapters.pop(name, None)
        self._model = None

    async def _add_lora(
        self, engine: EngineClient, adapter: LoRARequest, load_inplace: bool = False
    ) -> None:
        is_loaded = adapter.name in self._adapters and not load_inplace
        if is_loaded or adapter.name in self.model_names:
            inplace = ", or load_inplace" if is_loaded else ""
            raise RequestError(
                f"a model {adapter.name!r:.200} is served already; use another name{inplace}."
            )
        await engine.add_lora(adapter, load_inplace)
        self._adapters[adapter.name] = adapter
        self._model = None

    @property
    def preparing(self) -> bool:
        """Whether a thread prepares a request, even one whose client has been refused or is
        gone."""
        return any(workers.busy for workers in self._preparation.values())

    def close(self) -> None:
        """Refuse requests that are being prepared."""
        for workers in self._preparation.values():
            workers.close()

    @contextlib.asynccontextmanager
    async def submit(
        self, parsed: ParsedRequest, request_id: str, tenant: str | None
    ) -> AsyncIterator[AsyncIterable[tuple[int, Update]]]:
        """Submit a request to the engine, and iterate over updates with the index of their prompt.
        Leaving the block aborts prompts that have not finished. `tenant` is the sender.

        Prompts get the request's id in the engine, or one derived from it if that is in use, as
        when a proxy gives one id to several requests. A request in a restored snapshot is claimed
        by its tenant, by sending it again under its id.

        Raises RequestError, OverloadedError when the queue is full, UnavailableError.
        """
        engine = self.engine
        self.policy.check(parsed.params)
        ids = self._ids(request_id, len(parsed.prompts), tenant)
        with self._admit(len(ids), parsed.params.n):
            restored = {} if parsed.beam is not None else self._restored.of(parsed, ids)
            new = [number for number in range(len(ids)) if number not in restored]
            new_ids = [ids[number] for number in new]
            self._running.update(new_ids)
            try:
                if parsed.beam is not None:
                    found = self._beams(parsed, parsed.beam, ids, tenant)
                    yield _without_cached_tokens(found) if self.policy.hide_cached_tokens else found
                    return
                submitted = engine.submit(
                    [parsed.prompts[number] for number in new],
                    parsed.params,
                    new_ids,
                    tenant=tenant,
                    cache_salt=parsed.cache_salt,
                    lora_request=parsed.lora_request,
                    wants_deltas=parsed.stream and not restored,
                )
                async with await submitted as updates:
                    if self._aborted:  # abort_all() ran while this one was being submitted.
                        await self.abort_all()
                    seen: AsyncIterable[tuple[int, Update]] = updates
                    if restored:
                        seen = self._restored.claimed(ids, restored, new, updates)
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

    async def metrics(self) -> bytes:
        """All metrics as Prometheus reads them; only the server's own before the engine is
        ready."""
        open_ = Metric("gauge", "Sequences of requests not yet answered", self.num_sequences)
        engine = {} if self._engine is None else await self._engine.metrics_by_replica()
        rejected = {"max_num_queued_reqs": self._num_rejected}
        own = {
            "jaxserve:open_sequences": open_,
            "vllm:admission_rejections_total": Metric(
                "counter", "Requests refused because the queue is full", rejected, "reason"
            ),
        }
        return self._exposition.text({**engine, "": own | {**engine.get("", {})}})

    async def load(self) -> dict[str, float]:
        """What routers weigh, by the names that vLLM reports it under: the mean over replicas of
        the KV cache's use, and how many sequences wait. Also while the server drains."""
        of_each = [m for m in (await self._engine.metrics_by_replica()).values() if _KV_USAGE in m]
        usage = sum(metrics[_KV_USAGE].value for metrics in of_each) / max(1, len(of_each))
        waiting = sum(metrics[_WAITING].value for metrics in of_each)
        return {"kv_cache_usage_perc": float(usage), "num_requests_waiting": float(waiting)}

    @contextlib.contextmanager
    def _admit(self, num_prompts: int, n: int) -> Iterator[None]:
        """Counts the sequences of a request, `n` for each prompt, while it runs."""
        room, num_sequences = self._room, num_prompts * n
        if num_sequences > room:
            field = "n" if num_prompts == 1 else "prompt"
            both = "and n " if min(num_prompts, n) > 1 else ""
            raise FieldError(
                field,
                f"{both}must make at most {room} sequences on this server, got {num_sequences}.",
            )
        if self.num_sequences + num_sequences > room:
            self._num_rejected += 1
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
        return self._engine.info.max_num_seqs + self._max_queued

    def _ids(self, request_id: str, count: int, tenant: str | None) -> list[str]:
        """Engine ids for a request's prompts, none of them in use or that of a restored request of
        another tenant."""
        ids = [request_id] if count == 1 else [f"{request_id}-{i}" for i in range(count)]
        if self._running.isdisjoint(ids) and not self._restored.of_others(ids, tenant):
            return ids
        return self._ids(f"{request_id}~{uuid.uuid4().hex[:8]}", count, tenant)

    async def _beams(
        self, parsed: ParsedRequest, beam: BeamSearchParams, ids: Sequence[str], tenant: str | None
    ) -> AsyncIterator[tuple[int, Update]]:
        """The output of each prompt of a beam search, once all are found."""
        engine, model = self.engine, self.model
        asked: set[str] = set()

        async def submit(
            prompts: Sequence[Prompt | TokenizedPrompt],
            params: SamplingParams,
            step_ids: Sequence[str],
        ) -> OutputStream:
            asked.update(step_ids)
            self._running.update(step_ids)
            if self._aborted:
                raise stopping_error()
            return await engine.submit(
                prompts,
                dataclasses.replace(params, priority=parsed.params.priority),
                step_ids,
                tenant=tenant,
                cache_salt=parsed.cache_salt,
                lora_request=parsed.lora_request,
                wants_deltas=False,
            )

        async def found(number: int) -> RequestOutput:
            num_logprobs = parsed.params.logprobs or 0
            ends = engine.info.eos_token_ids
            search = BeamSearch(beam, ends, model.max_model_len, num_logprobs)
            prompt = parsed.prompts[number]
            sequences, metrics = await search_async(submit, search, prompt, ids[number])
            return beam_output(
                ids[number], prompt, parsed.params, sequences, metrics, model.tokenizer
            )

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(found(number)) for number in range(len(ids))]
        except* Exception as failed:
            raise (stopping_error() if self._aborted else failed.exceptions[0]) from None
        finally:
            self._running -= asked
        for number, task in enumerate(tasks):
            yield number, task.result()


async def _without_cached_tokens(
    updates: AsyncIterable[tuple[int, Update]],
) -> AsyncIterator[tuple[int, Update]]:
    async for number, update in updates:
        if isinstance(update, RequestOutput):
            metrics = dataclasses.replace(update.metrics, cached_tokens=0)
            update = dataclasses.replace(update, metrics=metrics)
        yield number, update
