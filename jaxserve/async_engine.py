"""The engine for asyncio: one thread steps it, any number of coroutines wait for outputs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Self, Unpack

from jaxserve.core.engine_info import EngineInfo
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.outputs import Delta, RequestOutput
from jaxserve.core.requests.pooling import EmbeddingRequestOutput, PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.settings.engine_settings import EngineSettings
from jaxserve.engine.client import Restored
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.output_queue import OutputQueue, OutputStream, left_output, output_of
from jaxserve.engine.prompts import Prompt, TokenizedPrompt
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot.migration import Received
from jaxserve.engine.snapshot.requests import RequestSnapshot
from jaxserve.metrics.metric import Metric
from jaxserve.metrics.perfetto import write_trace
from jaxserve.runtime.live_weights import WeightsSource
from jaxserve.runtime.startup.engine_plan import EnginePlan
from jaxserve.runtime.startup.start import StartupProgress, no_progress
from jaxserve.text import Tokenizer


class AsyncEngine:
    """LLM for servers, with coroutines. Requests of any number of tasks are batched.

    An `EngineThread` steps the engine; everything else calls it there, between steps.
    """

    def __init__(
        self,
        engine: Engine,
        trace_file: str | Path | None = None,
        watchdog_timeout: float | None = None,
    ) -> None:
        """`trace_file` receives a timeline for Perfetto when the engine is closed, if the engine
        keeps its events. `watchdog_timeout`: seconds that a step may take before the engine fails;
        0 is no limit. By default it is 20 times the slowest step so far, but at least 60 s, and
        600 s for each of the first hundred steps."""
        self._engine = engine
        self._trace_file = trace_file
        self._unclaimed: dict[str, Request] = {}
        self._ids = itertools.count()
        self._thread = EngineThread(engine, watchdog_timeout)

    @classmethod
    def load(
        cls,
        model: str | Path = EngineConfig.model,
        *,
        progress: StartupProgress = no_progress,
        trace_file: str | Path | None = None,
        watchdog_timeout: float | None = None,
        **settings: Unpack[EngineSettings],
    ) -> Self:
        """Load a model and start serving it; arguments as for LLM and `AsyncEngine`. Blocks until
        ready."""
        config = EngineConfig.of(model=model, **settings)
        engine = Engine.load(config, progress=progress, keep_events=trace_file is not None)
        return cls(engine, trace_file, watchdog_timeout)

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def plan(self) -> EnginePlan:
        """Sizes, memory and programs of this engine."""
        return self._engine.plan

    @property
    def info(self) -> EngineInfo:
        """What servers need to know of this engine."""
        return dataclasses.replace(
            self._engine.plan.info,
            eos_token_ids=self._engine.eos_token_ids,
            weights_version=self.weights_version,
        )

    def chat_prompt(
        self,
        messages: SequenceOf[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        *,
        continue_final_message: bool = False,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the chat template's form; see `LLM.chat_prompt`."""
        return self._engine.tokenizer.encode_chat(
            messages,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The defaults of the model's generation_config.json, with `overrides`."""
        return self._engine.default_sampling_params(**overrides)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """The finished output of one prompt. Cancelling the task aborts the request.

        Raises RequestError when the request is rejected, EngineClosedError when the engine ends.
        """
        options = request_id, priority, tenant, lora_request
        async with self._one(prompt, sampling_params, options, wants_deltas=False) as updates:
            return await output_of(updates)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[Delta]:
        """Deltas of one prompt as they arrive; those that arrive between reads are merged.
        Leaving the loop early aborts the request."""
        options = request_id, priority, tenant, lora_request
        async with self._one(prompt, sampling_params, options, wants_deltas=True) as updates:
            async for _, update in updates:
                if not isinstance(update, RequestOutput):
                    for delta in update:
                        yield delta

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """The embedding of one prompt. Raises as `generate`."""
        params = PoolingParams() if pooling_params is None else pooling_params
        options = request_id, priority, tenant, lora_request
        async with self._one(prompt, params, options, wants_deltas=False) as updates:
            return EmbeddingRequestOutput.of(await output_of(updates))

    async def submit(
        self,
        prompts: SequenceOf[Prompt | TokenizedPrompt],
        sampling_params: SamplingParams | PoolingParams,
        request_ids: SequenceOf[str],
        priority: int | None = None,
        tenant: str | None = None,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        wants_deltas: bool = True,
    ) -> OutputStream:
        """Add prompts to the engine, all of them or none, and stream the outputs of each.
        Prompts with different `cache_salt`s share no cached prefix. `lora_request` is their
        adapter, which is read while other requests run, if it is not loaded.

        Raises RequestError when one of them is rejected, AdapterError for an adapter that does not
        fit, EngineClosedError when the engine has ended.
        """
        # Compiling a grammar may take long, so it must not block the engine's thread.
        preparation = self._engine.preparation(sampling_params)
        grammar = None if preparation is None else await asyncio.wrap_future(preparation)
        adapter = lora_request
        if lora_request is not None:
            staged = await asyncio.to_thread(self._engine.adapters.staged, lora_request)
            adapter = staged or lora_request
        output_queue = OutputQueue(asyncio.get_running_loop(), wants_deltas)
        listeners = dict(
            zip(request_ids, ((output_queue, i) for i in range(len(prompts))), strict=True)
        )
        thread = self._thread
        updates = thread.stream(output_queue, listeners)

        def add() -> None:
            try:
                if adapter is not None:
                    self._engine.load_adapter(adapter, pinned=False)
                for prompt, (request_id, listener) in zip(prompts, listeners.items()):
                    self._engine.add(
                        request_id,
                        prompt,
                        sampling_params,
                        priority,
                        tenant,
                        grammar=grammar,
                        cache_salt=cache_salt,
                        lora_request=lora_request,
                    )
                    thread.listeners[request_id] = listener
            except Exception as error:
                thread.abandon(listeners)
                thread.send((output_queue, 0), error)
            else:
                thread.send((output_queue, 0), [])

        thread.call_open(add)
        try:
            await output_queue.wait()
        except BaseException:
            updates.leave()
            raise
        return updates

    @contextlib.asynccontextmanager
    async def _one(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None,
        options: tuple[str | None, int | None, str | None, LoRARequest | None],
        wants_deltas: bool,
    ) -> AsyncIterator[OutputStream]:
        """One prompt's updates, with defaults for missing arguments of `generate`."""
        request_id, priority, tenant, lora_request = options
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        ids = [request_id or self._next_id()]
        submitted = self.submit(
            [prompt],
            params,
            ids,
            priority,
            tenant,
            lora_request=lora_request,
            wants_deltas=wants_deltas,
        )
        async with await submitted as updates:
            yield updates

    async def abort(self, request_id: str) -> None:
        """End a request early, if it is still running."""
        self._thread.call(lambda: self._thread.abort(request_id))

    async def set_priority(self, request_id: str, priority: int) -> None:
        """Change the priority of a request, lower running first, if it is still running.

        Raises RequestError unless `priority` is an integer, EngineClosedError when the engine has
        ended.
        """
        await self._thread.result_of(lambda: self._engine.set_priority(request_id, priority))

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix."""
        self._thread.call(self._engine.reset_prefix_cache)

    async def add_lora(self, lora_request: LoRARequest, load_inplace: bool = False) -> None:
        """Load a LoRA adapter, as `LLM.add_lora`; it is read while requests run."""
        engine = self._engine
        staged = await asyncio.to_thread(engine.adapters.staged, lora_request, load_inplace)
        adapter = staged or lora_request
        await self._thread.result_of(lambda: engine.load_adapter(adapter, load_inplace))

    async def remove_lora(self, name: str) -> None:
        """Unload a LoRA adapter, as `LLM.remove_lora`."""
        await self._thread.result_of(lambda: self._engine.unload_adapter(name))

    async def update_weights(self, params: WeightsSource) -> int:
        """Replace the weights between two steps, and return their version; as
        `LLM.update_weights`. Requests in flight keep their tokens, and the new weights make the
        next ones. A checkpoint is read while requests run."""
        staged = await asyncio.to_thread(self._engine.weights.stage, params)
        return await self._thread.result_of(lambda: self._engine.weights.update(staged))

    async def sleep(self, level: int = 1) -> None:
        """Give the devices' memory back, as `LLM.sleep`. Requests in flight continue after
        `wake_up`; new ones are refused until then."""
        await self._thread.result_of(lambda: self._engine.weights.sleep(level))

    async def wake_up(self, tags: SequenceOf[str] | None = None) -> None:
        """Take the memory again, as `LLM.wake_up`."""
        await self._thread.result_of(lambda: self._engine.weights.wake_up(tags))

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is missing that `sleep` gave back."""
        return self._engine.weights.asleep

    @property
    def weights_version(self) -> int:
        """How often the weights that serve have been replaced."""
        return self._engine.weights.version

    async def snapshot(
        self, directory: str | Path, with_kv: bool = True, deadline_s: float | None = None
    ) -> None:
        """Save unfinished requests, like LLM.snapshot, before a server shuts down."""

        def snapshot() -> None:
            ended = [request for request in self._unclaimed.values() if request.finished]
            self._engine.snapshots.write(directory, with_kv, deadline_s, ended)

        await self._thread.result_of(snapshot)

    async def restore(self, directory: str | Path) -> dict[str, Restored]:
        """Resume the requests of a snapshot, returned by id. Cancelling a task aborts its request.
        Later snapshots include them, even finished ones, until they are claimed. Raises
        SnapshotError."""
        loop = asyncio.get_running_loop()
        restored: dict[str, tuple[Request, OutputStream]] = {}

        def restore() -> None:
            for request in self._engine.snapshots.restore(directory):
                updates = self._resume(request, OutputQueue(loop, wants_deltas=False))
                restored[request.request_id] = request, updates
                self._unclaimed[request.request_id] = request

        await self._thread.result_of(restore)
        return {
            request_id: Restored(
                request.prompt_token_ids,
                request.pooling or request.params,
                request.lora_request,
                request.sequence_outputs[0].seq.tenant,
                asyncio.create_task(left_output(updates)),
            )
            for request_id, (request, updates) in restored.items()
        }

    async def claim(self, request_id: str) -> None:
        """Mark the output of a restored request as delivered: later snapshots omit it."""
        self._thread.call(lambda: self._unclaimed.pop(request_id, None))

    async def export_request(
        self,
        request_id: str,
        with_kv: bool = True,
        start: int | None = None,
        stop: int | None = None,
    ) -> list[bytes]:
        """An unfinished request as bytes, for `import_request` of another engine; it runs on here
        until `abort`. With `start` and `stop` the KV of one stage, as `Migration.export_request`.
        What the prompts of two steps have computed is read while steps continue, as far as device
        memory is free for copies of it and no page is on a lower tier; else all is read between two
        steps, which takes as long as its bytes take from the devices to memory.
        Raises as `LLM.export_request`."""
        parts = await self._thread.result_of(
            lambda: self._engine.migration.begin_export(request_id, with_kv, start, stop)
        )
        return await asyncio.to_thread(list, parts)

    def num_computed(self, request_id: str) -> int | None:
        """How many tokens of a request's first sequence have their KV, by the steps that were
        dispatched; None when it is not unfinished."""
        return self._engine.migration.num_computed(request_id)

    async def import_request(
        self, parts: SequenceOf[bytes], request_id: str | None = None, *, wants_deltas: bool = True
    ) -> OutputStream:
        """Add a request that another engine has exported, by default under the id that it had
        there, and stream its output from its first token on. Leaving the stream early aborts the
        request. Raises SnapshotError as `LLM.import_request`, or when the id is in use."""
        received = await self._received(parts)
        output_queue = OutputQueue(asyncio.get_running_loop(), wants_deltas)
        return await self._thread.result_of(
            lambda: self._resume(
                self._engine.migration.import_request(received, request_id), output_queue
            )
        )

    async def resume_request(
        self, state: RequestSnapshot, *, wants_deltas: bool = True
    ) -> OutputStream:
        """Add a request of another engine, with the tokens that it had generated, and stream its
        output from its first token on. Leaving the stream early aborts the request.
        Raises SnapshotError as `Migration.resume_request`."""
        preparation = self._engine.preparation(state.added.params)
        if preparation is not None:
            await asyncio.wrap_future(preparation)
        output_queue = OutputQueue(asyncio.get_running_loop(), wants_deltas)
        return await self._thread.result_of(
            lambda: self._resume(self._engine.migration.resume_request(state), output_queue)
        )

    async def stage_request(self, parts: SequenceOf[bytes], request_id: str) -> int:
        """Take the KV of a request that another engine has exported and runs on, for
        `resume_request`; returns how many tokens have theirs. Raises SnapshotError as
        `Migration.stage_request`."""
        received = await self._received(parts)
        return await self._thread.result_of(
            lambda: self._engine.migration.stage_request(received, request_id)
        )

    async def unstage_request(self, request_id: str) -> None:
        """Give up the KV of a request that does not come."""
        self._thread.call(lambda: self._engine.migration.unstage_request(request_id))

    async def export_prefix(
        self, token_ids: SequenceOf[int], tenant: str | None = None, cache_salt: str | None = None
    ) -> list[bytes]:
        """The cached KV of these tokens, for `import_prefix` of another engine, copied between two
        steps. Raises as `Migration.export_prefix`."""
        return await self._thread.result_of(
            lambda: list(self._engine.migration.export_prefix(token_ids, tenant, cache_salt))
        )

    async def import_prefix(self, parts: SequenceOf[bytes]) -> int:
        """Cache a prefix of another engine; returns how many of its tokens are cached. Raises
        SnapshotError as `Migration.import_prefix`."""
        received = await self._received(parts)
        return await self._thread.result_of(lambda: self._engine.migration.import_prefix(received))

    async def _received(self, parts: SequenceOf[bytes]) -> Received:
        """What another engine has exported, read and converted while steps continue, and its
        grammar compiled."""
        wanted = True  # until this is cancelled
        read = itertools.takewhile(lambda _: wanted, parts)
        try:
            received = await asyncio.to_thread(self._engine.migration.received, read)
        finally:
            wanted = False
        if received.state is not None:
            preparation = self._engine.preparation(received.state.added.params)
            if preparation is not None:  # Compiled grammars are cached.
                await asyncio.wrap_future(preparation)
        return received

    async def exchange_shares(
        self, counters: Mapping[str | None, int]
    ) -> tuple[dict[str | None, int], list[str | None]]:
        """As `FairQueue.exchange`, between two steps; nothing without `fair_share`."""
        return await self._thread.result_of(
            lambda: self._engine.scheduler.waiting.exchange(counters)
        )

    def prefill_us(self, start: int, stop: int) -> int | None:
        """How long this engine would compute tokens start .. stop - 1 of a prompt, in microseconds,
        by the steps that it has made; None before the first one."""
        return self._engine.kv.rates.prefill_us(start, stop)

    @property
    def ended(self) -> concurrent.futures.Future[None]:
        """Done when the engine has ended, by `close` or by `failure`."""
        return self._thread.ended

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine, if any."""
        return self._thread.failure

    @property
    def stalled(self) -> bool:
        """Whether the step in progress has taken more than half of the time that it may."""
        return self._thread.stalled

    @property
    def stuck(self) -> bool:
        """Whether the engine's thread runs on after `close`: it hangs in a step."""
        return self._thread.stuck

    def get_metrics(self) -> dict[str, Metric]:
        return self._engine.get_metrics()

    async def metrics_by_replica(self) -> dict[str, dict[str, Metric]]:
        """As `EngineClient`: the metrics of the only replica."""
        return {"": self.get_metrics()}

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort running requests, stop the thread, free the device, write the trace file.
        Idempotent."""
        self._thread.close(timeout_s)
        if self._trace_file is not None:
            write_trace(self._trace_file, self._engine.log.records)
            self._trace_file = None

    def _resume(self, request: Request, output_queue: OutputQueue) -> OutputStream:
        """The output of a request that begins with what another engine generated."""
        listeners = {request.request_id: (output_queue, 0)}
        self._thread.listeners |= listeners
        self._thread.publish(request)
        return self._thread.stream(output_queue, listeners)

    def _next_id(self) -> str:
        """An id that no open request has; restored requests keep theirs."""
        ids = (f"async-{number}" for number in self._ids)
        return next(request_id for request_id in ids if request_id not in self._thread.listeners)
