"""The router: several replicas as one `EngineClient`, in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jaxserve.cluster.policies.autoscale import Autoscaler
from jaxserve.cluster.pool.replica_pool import ReplicaPool
from jaxserve.cluster.replicas.replica_client import ReplicaClient
from jaxserve.cluster.replicas.routed_replica import Submission
from jaxserve.core.cluster_status import ClusterStatus
from jaxserve.core.commands import AddRequest
from jaxserve.core.engine_info import EngineInfo
from jaxserve.core.errors import ConfigError, EngineClosedError, SnapshotError
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.client import Restored
from jaxserve.engine.output_queue import OutputQueue, OutputStream
from jaxserve.engine.prompts import Prompt, TokenizedPrompt, tokenize_prompt
from jaxserve.metrics.metric import Metric
from jaxserve.text import Tokenizer

_T = TypeVar("_T")


class Router:
    """Several replicas of an engine as one; see `EngineClient`.

    Attributes:
        ended: done when the router has ended, by `close` or by `failure`.
    """

    def __init__(
        self,
        start: Callable[[], SequenceOf[ReplicaClient]],
        config: EngineConfig,
        watchdog_timeout: float | None = None,
        on_end: Callable[[], object] = lambda: None,
        num_prefill: int = 0,
        scaler: Autoscaler | None = None,
    ) -> None:
        """Loads the replicas that `start` returns, and blocks until all are ready; an interrupt
        ends them. `start` runs in the router's thread, to which Ray ties the lives of the processes
        that it starts. `on_end` runs when all replicas are closed, and when `start` fails.
        `num_prefill`: so many of the replicas, the first ones, only prefill, and the others decode;
        by default all do both. `scaler`: its least number of replicas is loaded, the first ones,
        and others when it adds them; by default all are.

        Raises what `start` raises, as `AsyncEngine.load` does, and ReplicaLostError when a replica
        is lost meanwhile.
        """
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ended.set_running_or_notify_cancel()
        self._pool = ReplicaPool(config, watchdog_timeout, num_prefill, scaler)
        self._start = start
        self._on_end = on_end
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # nothing is begun in the router's thread after its end
        self._closed = False
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="jaxserve-router", daemon=True
        )
        try:  # An interrupt may come while the thread starts.
            self._thread.start()
            ready.result()
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """What a replica says of itself, and the number of replicas."""
        return self._pool.info

    def get_tokenizer(self) -> Tokenizer:
        return self._pool.tokenizer

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the router: no replica can be loaded any more."""
        return self._pool.failure

    @property
    def stalled(self) -> bool:
        """Whether all replicas are being loaded again."""
        return self._pool.stalled

    @property
    def stuck(self) -> bool:
        """Whether the router's thread runs on after `close`."""
        return self._pool.stop.is_set() and self._thread.is_alive()

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
        """As `AsyncEngine.submit`. Each prompt is dispatched to a replica of its own choice."""
        tokenized = [
            prompt
            if isinstance(prompt, TokenizedPrompt)
            else tokenize_prompt(prompt, self._pool.tokenizer, self.info.model.vocab_size)
            for prompt in prompts
        ]
        pooling = sampling_params if isinstance(sampling_params, PoolingParams) else None
        sampling = sampling_params if pooling is None else pooling.sampling
        added = [
            AddRequest(
                request_id=request_id,
                prompt=prompt.text,
                token_ids=prompt.token_ids,
                params=sampling,
                pooling=pooling,
                priority=sampling_params.priority if priority is None else priority,
                tenant=tenant,
                cache_salt=cache_salt,
                lora_request=lora_request,
                seed=0,
                first_seq_id=0,
            )
            for request_id, prompt in zip(request_ids, tokenized, strict=True)
        ]
        output_queue = OutputQueue(asyncio.get_running_loop(), wants_deltas)
        submission = Submission(output_queue, len(added))
        abandon = functools.partial(self._in_thread, self._pool.requests.abandon, submission)
        updates = OutputStream(output_queue, len(added), abandon)
        if not self._in_thread(self._pool.requests.admit, submission, added):
            raise self._closed_error()
        try:
            await output_queue.wait()
        except BaseException:
            updates.leave()
            raise
        return updates

    async def abort(self, request_id: str) -> None:
        """End a request early; the tokens it has are its output."""
        self._in_thread(self._pool.requests.abort, request_id)

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix, of all replicas."""
        await self._result_of(self._pool.reset_prefix_cache())

    async def add_lora(self, lora_request: LoRARequest, load_inplace: bool = False) -> None:
        """Load an adapter on all replicas. Raises ConfigError with `load_inplace`: they would not
        replace it at once, and requests that keep the one before could not move."""
        if load_inplace:
            raise ConfigError(
                "load_inplace is of one engine, and there are several replicas; load the adapter "
                "under another name, and unload the one before."
            )
        await self._result_of(self._pool.add_lora(lora_request))

    async def remove_lora(self, name: str) -> None:
        """Unload an adapter on all replicas."""
        await self._result_of(self._pool.remove_lora(name))

    async def metrics_by_replica(self) -> Mapping[str, Mapping[str, Metric]]:
        """The metrics of each replica, by its number, and the router's own under ""."""
        return await self._result_of(self._pool.metrics())

    async def cluster_status(self) -> ClusterStatus:
        """What each replica is, how far a rolling restart or a resize, and what autoscaling has
        done."""
        return await self._result_of(self._pool.status())

    async def restart_replicas(self) -> None:
        """Begin to replace the process of one replica after another; none of their requests is
        lost. Raises RestartError when that is going on already, or one replica alone is left."""
        await self._result_of(self._pool.restart())

    async def resize_replica(self, index: int, sizes: Mapping[str, int]) -> None:
        """Begin to load a replica on another mesh, with these parallel sizes; its requests go on
        with the tokens and the KV that they have. Raises ConfigError for sizes that cannot be, or
        that it has, RestartError when it is not ready, or others are changed."""
        await self._result_of(self._pool.resize(index, sizes))

    @property
    def is_sleeping(self) -> bool:
        return False

    async def sleep(self, level: int = 1) -> None:
        """Raises ConfigError."""
        _refuse_live_changes()

    async def wake_up(self, tags: SequenceOf[str] | None = None) -> None:
        """Raises ConfigError."""
        _refuse_live_changes()

    async def update_weights(self, params: str) -> int:
        """Raises ConfigError."""
        _refuse_live_changes()

    async def snapshot(
        self, directory: str | Path, with_kv: bool = True, deadline_s: float | None = None
    ) -> None:
        """Raises SnapshotError."""
        _refuse_snapshots()

    async def restore(self, directory: str | Path) -> dict[str, Restored]:
        """Raises SnapshotError."""
        _refuse_snapshots()

    async def claim(self, request_id: str) -> None:
        """Raises SnapshotError."""
        _refuse_snapshots()

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort running requests, and end all replicas. Idempotent."""
        self._in_thread(self._pool.stop.set)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _in_thread(self, work: Callable[..., object], *arguments: Any) -> bool:
        """Run `work` in the router's thread; False when that ends."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(work, *arguments)
            return not self._closed

    async def _result_of(self, work: Coroutine[Any, Any, _T]) -> _T:
        with self._lock:
            if self._closed:
                work.close()
                raise self._closed_error()
            result = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(result)

    def _closed_error(self) -> EngineClosedError:
        error = EngineClosedError("the engine is closed; make a new one.")
        error.__cause__ = self._pool.failure
        return error

    # In the router's thread

    def _run(self, ready: concurrent.futures.Future[None]) -> None:
        failure: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(self._start(), ready))
        except BaseException as error:
            failure = self._pool.failure = error
        with self._lock:
            self._closed = True  # Perhaps `start` has failed.
        try:
            self._on_end()
        finally:
            self.ended.set_result(None)
            if not ready.done():
                ready.set_exception(failure or self._closed_error())

    async def _serve(
        self, clients: SequenceOf[ReplicaClient], ready: concurrent.futures.Future[None]
    ) -> None:
        try:
            if await self._loaded(clients):
                ready.set_result(None)
                await self._pool.run()
        finally:
            with self._lock:
                self._closed = True
            await asyncio.sleep(0)  # Requests that came before are admitted, and end as the others.
            await self._pool.close()

    async def _loaded(self, clients: SequenceOf[ReplicaClient]) -> bool:
        """Load the replicas; False when `close` was called meanwhile."""
        loading = asyncio.ensure_future(self._pool.load(clients))
        stopped = asyncio.ensure_future(self._pool.stop.wait())
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if loading.cancel():
            await asyncio.gather(loading, return_exceptions=True)
            return False
        loading.result()
        return True


def _refuse_live_changes() -> NoReturn:
    raise ConfigError(
        "several replicas neither sleep nor take new weights; set data_parallel_size to 1."
    )


def _refuse_snapshots() -> NoReturn:
    raise SnapshotError(
        "there are no snapshots of several replicas; set data_parallel_size to 1, or leave the "
        "directory out."
    )
