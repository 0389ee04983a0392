"""One engine of a cluster, as its router calls it. In Ray it is an actor."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import socket
from collections.abc import Mapping, Sequence

import jax

from jaxserve.async_engine import AsyncEngine
from jaxserve.cluster.policies.copies import KEPT_SHARE
from jaxserve.core.commands import AddRequest
from jaxserve.core.engine_info import EngineInfo
from jaxserve.core.errors import EngineClosedError, RequestError
from jaxserve.core.process.logs import configure_logging
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.output_queue import OutputStream, Update
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.engine.snapshot.migration import max_takes
from jaxserve.engine.snapshot.requests import RequestSnapshot
from jaxserve.kv.layout import TRANSFER_PAGES
from jaxserve.metrics.metric import Metric
from jaxserve.runtime.hardware.cpu_threads import make_room_for_collectives
from jaxserve.runtime.hardware.device_memory import host_memory, host_share
from jaxserve.runtime.startup.engine_plan import EnginePlan, plan_engine
from jaxserve.text import Tokenizer

_POLL_S = 0.002
"""How often a prompt that is computed in chunks is looked at; a chunk takes longer."""


class Replica:
    """An engine, its requests' updates collected for one caller. For one event loop."""

    def __init__(
        self, index: int = 0, num_cores: int | None = None, log_level: int = logging.NOTSET
    ) -> None:
        """`num_cores`: run on so many of the host's cores, those after the cores of the replicas
        with a lower `index`; by default on all. `log_level`: that of `logging`, for messages to
        stderr; by default the logging of this process stays as it is."""
        if log_level != logging.NOTSET:
            configure_logging(logging.getLevelName(log_level).lower())
        if num_cores is not None:
            _run_on(index, num_cores)
        self._engine: AsyncEngine | None = None
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._updates: list[tuple[str, Update]] = []
        self._changed = asyncio.Event()
        self._num_loads = 0

    async def plan(self, config: EngineConfig, num_replicas: int) -> EngineConfig:
        """The settings of each of `num_replicas` engines on hosts like this one, with KV pools of
        one size: memory that the replicas of a host share is divided. Raises as `plan_engine`
        does."""
        return await asyncio.to_thread(_plan, config, num_replicas)

    async def load(self, config: EngineConfig, watchdog_timeout: float | None) -> EngineInfo:
        """Load the engine, or have the one that there is abort its requests. Raises as
        `AsyncEngine.load` does, and EngineClosedError when the engine has failed."""
        if self._engine is None:
            settings = {
                field.name: getattr(config, field.name) for field in dataclasses.fields(config)
            }
            self._engine = await asyncio.to_thread(
                AsyncEngine.load, **settings, watchdog_timeout=watchdog_timeout
            )
            wake = functools.partial(
                asyncio.get_running_loop().call_soon_threadsafe, self._changed.set
            )
            self._engine.ended.add_done_callback(lambda _: wake())
        self._check()
        self._num_loads += 1
        self._changed.set()
        for request_id in self._pumps:
            await self._ready.abort(request_id)
        self._updates.clear()
        return self._ready.info

    async def get_tokenizer(self) -> Tokenizer:
        return self._ready.get_tokenizer()

    async def get_process(self) -> str:
        """Where it runs, human-readable."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    async def submit(self, request: AddRequest | RequestSnapshot) -> None:
        """Add a request, or resume one of another replica; `updates` then has its output. Raises
        RequestError when it is rejected, SnapshotError when it cannot be resumed, OverloadedError
        when it may be retried."""
        if isinstance(request, RequestSnapshot):
            added, stream = request.added, await self._ready.resume_request(request)
        else:
            added = request
            stream = await self._ready.submit(
                [TokenizedPrompt(added.prompt, added.token_ids)],
                added.pooling or added.params,
                [added.request_id],
                added.priority,
                added.tenant,
                cache_salt=added.cache_salt,
                lora_request=added.lora_request,
            )
        self._pumps[added.request_id] = asyncio.create_task(self._pump(added.request_id, stream))

    async def updates(self) -> list[tuple[str, Update]]:
        """All updates since the last call, with the ids of their requests, in order; waits for the
        first. Outputs have no prompt, which the caller has. Raises EngineClosedError when the
        engine has failed, or `load` was called again."""
        num_loads = self._num_loads
        while not self._updates:
            self._changed.clear()
            self._check()
            await self._changed.wait()
            if self._num_loads > num_loads:
                raise EngineClosedError("the requests of an earlier load were aborted.")
        updates, self._updates = self._updates, []
        return updates

    async def abort(self, request_id: str) -> None:
        """End a request early, if it is still running; the tokens it has are its output."""
        await self._ready.abort(request_id)

    async def computed(self, request_id: str, num_tokens: int) -> int:
        """Waits until so many tokens of a request have their KV, and returns how many have it.
        Raises RequestError when the request has ended."""
        while (known := self._ready.num_computed(request_id)) is not None and known < num_tokens:
            await asyncio.sleep(_POLL_S)
        if known is None:
            raise RequestError(f"request_id {request_id!r} is not an unfinished request.")
        return known

    async def export_request(
        self, request_id: str, start: int, stop: int | None = None
    ) -> list[bytes]:
        """A request and its KV from token `start` on, and before `stop`, for `stage_request` of
        another replica; it runs on here. Raises as `AsyncEngine.export_request`."""
        return await self._ready.export_request(request_id, start=start, stop=stop)

    async def stage_request(self, parts: list[bytes], name: str) -> int:
        """Take the KV of a request that is submitted later, as `name`, with the tokens that it has
        then; returns how many tokens have theirs here. Raises as `AsyncEngine.stage_request`."""
        return await self._ready.stage_request(parts, name)

    async def max_kept_bytes(self) -> int:
        """How much exported KV may lie in memory at a time while a process is replaced."""
        return int(KEPT_SHARE * host_memory())

    async def keep_request(
        self, request_id: str, start: int, stop: int, max_bytes: int
    ) -> tuple[int, list[bytes]]:
        """A request and its KV from token `start` on, and before `stop`, for `stage_request` of a
        process that takes the place of this one; and how many bytes that are. If they are more
        than `max_bytes`, nothing is exported. Raises as `export_request`."""
        exported = await self.export_request(request_id, start, stop)
        num_bytes = sum(map(len, exported))
        return num_bytes, exported if num_bytes <= max_bytes else []

    async def unstage_request(self, name: str) -> None:
        """Give up the KV of a request that is not submitted."""
        await self._ready.unstage_request(name)

    async def stage_in(
        self, destination: Replica, request_id: str, name: str, start: int, stop: int | None
    ) -> int:
        """Stage a request's KV from token `start` on, and before `stop`, in another replica, as
        `name`; returns how many tokens have theirs there. Raises as `export_request` here and
        `stage_request` there."""
        exported = await self.export_request(request_id, start, stop)
        return await destination.stage_request(exported, name)

    async def prefill_us(self, start: int, stop: int) -> int | None:
        """As `AsyncEngine.prefill_us`."""
        return self._ready.prefill_us(start, stop)

    async def export_prefix(
        self, token_ids: Sequence[int], tenant: str | None, cache_salt: str | None
    ) -> list[bytes]:
        """What is cached of a prompt, for `import_prefix` of another replica. Raises as
        `AsyncEngine.export_prefix`."""
        return await self._ready.export_prefix(token_ids, tenant, cache_salt)

    async def import_prefix(self, parts: list[bytes]) -> int:
        """Cache a prefix of another replica. Raises as `AsyncEngine.import_prefix`."""
        return await self._ready.import_prefix(parts)

    async def pull_to(
        self,
        destination: Replica,
        token_ids: Sequence[int],
        tenant: str | None,
        cache_salt: str | None,
    ) -> int:
        """Cache a prefix in another replica; returns how many of its tokens are cached there.
        Raises as `export_prefix` here and `import_prefix` there."""
        return await destination.import_prefix(
            await self.export_prefix(token_ids, tenant, cache_salt)
        )

    async def exchange_shares(
        self, counters: Mapping[str | None, int]
    ) -> tuple[Mapping[str | None, int], Sequence[str | None]]:
        """As `FairQueue.exchange`."""
        return await self._ready.exchange_shares(counters)

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix."""
        await self._ready.reset_prefix_cache()

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter. Raises as `AsyncEngine.add_lora`."""
        await self._ready.add_lora(lora_request)

    async def remove_lora(self, name: str) -> None:
        """Unload an adapter. Raises as `AsyncEngine.remove_lora`."""
        await self._ready.remove_lora(name)

    async def get_metrics(self) -> Mapping[str, Metric]:
        return self._ready.get_metrics()

    async def close(self) -> None:
        """Abort all requests and free the device, until `load` is called again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.close)

    @property
    def _ready(self) -> AsyncEngine:
        """Raises EngineClosedError before the engine is loaded, as in a restarted process."""
        if self._engine is None:
            raise EngineClosedError("the engine is not loaded.")
        return self._engine

    def _check(self) -> None:
        """Raises EngineClosedError when the engine has failed."""
        if self._ready.failure is not None:
            raise EngineClosedError(f"the engine has failed: {self._ready.failure}")

    async def _pump(self, request_id: str, stream: OutputStream) -> None:
        """Collect the updates of one request."""
        with contextlib.suppress(EngineClosedError):  # `updates` says so.
            async with stream:
                async for _, update in stream:
                    if isinstance(update, RequestOutput):
                        update = dataclasses.replace(update, prompt=None, prompt_token_ids=())
                    self._updates.append((request_id, update))
                    self._changed.set()
        del self._pumps[request_id]
        self._changed.set()


def _plan(config: EngineConfig, num_replicas: int) -> EngineConfig:
    make_room_for_collectives()
    utilization = config.memory_utilization
    if jax.default_backend() == "cpu":
        utilization /= num_replicas
    planned = plan_engine(dataclasses.replace(config, memory_utilization=utilization))
    memory, host_bytes = planned.memory, config.host_kv_bytes
    if host_bytes is None:
        pages = memory.host_pages // num_replicas
        if memory.kv_on_host:  # Those of the longest request: each replica needs them all.
            most = host_share(planned.device) // num_replicas // memory.whole_page_bytes
            pages = min(memory.host_pages, most)
        host_bytes = pages * memory.whole_page_bytes
    kv_bytes = memory.kv_bytes
    if config.kv_cache_memory_bytes is None:
        kv_bytes = _pages_beside_copies(planned) * memory.page_bytes
    return dataclasses.replace(config, kv_cache_memory_bytes=kv_bytes, host_kv_bytes=host_bytes)


def _pages_beside_copies(planned: EnginePlan) -> int:
    """Pages of a pool that leaves room for copies of requests that move: of the planned one it has
    three quarters at least, and those of the longest request; all with `kv_on` host, where what a
    request needs of the host depends on them."""
    memory = planned.memory
    if memory.kv_on_host:
        return memory.num_pages
    longest = memory.layout.pages_for(planned.config.max_model_len) + 1
    given = max(0, min(memory.num_pages // 4, memory.num_pages - longest))
    prefill_tokens, free = planned.scheduler.max_prefill_tokens, memory.num_free_pages
    copied = TRANSFER_PAGES * max_takes(prefill_tokens, memory.page_size, free + given)
    return memory.num_pages - max(0, copied - free)


def _run_on(index: int, num_cores: int) -> None:
    """Restrict all threads of this process to `num_cores` cores."""
    if not hasattr(os, "sched_setaffinity"):  # only Linux has it
        return
    cores = sorted(os.sched_getaffinity(0))
    first = index % max(1, len(cores) // num_cores) * num_cores
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # It has ended.
            os.sched_setaffinity(int(thread), cores[first : first + num_cores])
