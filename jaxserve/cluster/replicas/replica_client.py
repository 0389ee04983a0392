"""A replica as its router calls it, and how the router notices that it answers nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from jaxserve.core.commands import AddRequest
from jaxserve.core.engine_info import EngineInfo
from jaxserve.core.errors import EngineClosedError, JaxserveError, ReplicaLostError
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.output_queue import Update
from jaxserve.engine.snapshot.requests import RequestSnapshot
from jaxserve.metrics.metric import Metric
from jaxserve.text import Tokenizer

PING_S = 1.0
SILENT_S = 10
"""A replica that has not answered for so many seconds is lost: it is stopped, or hangs."""


class ReplicaClient(Protocol):
    """A `Replica`, in this process or another. Each coroutine may raise ReplicaLostError."""

    async def plan(self, config: EngineConfig, num_replicas: int) -> EngineConfig: ...
    async def load(self, config: EngineConfig, watchdog_timeout: float | None) -> EngineInfo: ...
    async def get_tokenizer(self) -> Tokenizer: ...
    async def get_process(self) -> str: ...
    async def submit(self, request: AddRequest | RequestSnapshot) -> None: ...
    async def updates(self) -> list[tuple[str, Update]]: ...
    async def abort(self, request_id: str) -> None: ...
    async def computed(self, request_id: str, num_tokens: int) -> int: ...
    async def stage_in(
        self, destination: Any, request_id: str, name: str, start: int, stop: int | None
    ) -> int: ...
    async def stage_request(self, parts: Any, name: str) -> int: ...
    async def unstage_request(self, request_id: str) -> None: ...
    async def max_kept_bytes(self) -> int: ...
    async def keep_request(
        self, request_id: str, start: int, stop: int, max_bytes: int
    ) -> tuple[int, Any]: ...
    async def prefill_us(self, start: int, stop: int) -> int | None: ...
    async def import_prefix(self, parts: Any) -> int: ...
    async def exchange_shares(
        self, counters: Mapping[str | None, int]
    ) -> tuple[Mapping[str | None, int], SequenceOf[str | None]]: ...
    async def reset_prefix_cache(self) -> None: ...
    async def add_lora(self, lora_request: LoRARequest) -> None: ...
    async def remove_lora(self, name: str) -> None: ...
    async def get_metrics(self) -> Mapping[str, Metric]: ...
    async def close(self) -> None: ...

    async def pull_to(
        self,
        destination: Any,
        token_ids: SequenceOf[int],
        tenant: str | None,
        cache_salt: str | None,
    ) -> int:
        """Cache a prefix of this replica in another one."""

    async def restart(self, num_devices: int) -> None:
        """End its process, which may not answer, and have another one start in its place, for an
        engine of so many devices."""


class ReplicaSilentError(ReplicaLostError):
    """A replica's process runs but does not respond."""


async def wait_until_unresponsive(client: ReplicaClient) -> JaxserveError:
    """Returns once a replica has answered nothing for `SILENT_S`, or is lost.

    The clock counts the seconds that this process has waited, so that none pass while the machine
    sleeps.
    """
    while True:
        ping = asyncio.ensure_future(client.get_process())
        try:
            for _ in range(SILENT_S):
                await asyncio.wait({ping}, timeout=1)
                if ping.done():
                    break
            else:
                return ReplicaSilentError(f"its process has not answered for {SILENT_S} s")
            ping.result()
        except JaxserveError as error:
            return error
        finally:
            ping.cancel()
        await asyncio.sleep(PING_S)


async def ignore_lost(work: Coroutine[Any, Any, object]) -> None:
    """Does nothing about a lost replica, whose updates say so too."""
    with contextlib.suppress(ReplicaLostError, EngineClosedError):
        await work
