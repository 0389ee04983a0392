"""What a server needs of the engine that it serves."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxserve.core.cluster_status import ClusterStatus
from jaxserve.core.engine_info import EngineInfo
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.output_queue import OutputStream
from jaxserve.engine.prompts import Prompt, TokenizedPrompt
from jaxserve.metrics.metric import Metric
from jaxserve.text import Tokenizer


class Restored(NamedTuple):
    """A request resumed from a snapshot, and the task of its output."""

    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    lora_request: LoRARequest | None
    tenant: str | None
    output: asyncio.Task[RequestOutput]


class EngineClient(Protocol):
    """An engine as servers use it: `AsyncEngine`, the engine of this process, or the `Router` of
    several replicas. The coroutines run in any event loop."""

    @property
    def ended(self) -> concurrent.futures.Future[None]:
        """Done when no more requests are served, after `close` or by `failure`."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def failure(self) -> BaseException | None:
        """The error that ended it, if any."""

    @property
    def stalled(self) -> bool:
        """Whether requests do not progress now, so that new ones should go elsewhere."""

    @property
    def stuck(self) -> bool:
        """Whether a thread runs on after `close`, so that the process must exit without it."""

    def get_tokenizer(self) -> Tokenizer: ...

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
        """Add prompts, all of them or none, and stream the outputs of each. Raises RequestError
        when one of them is rejected, AdapterError for an adapter that does not fit,
        EngineClosedError when the engine has ended."""

    async def abort(self, request_id: str) -> None:
        """End a request early; the tokens it has are its output."""

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix."""

    async def add_lora(self, lora_request: LoRARequest, load_inplace: bool = False) -> None:
        """Load a LoRA adapter, to stay until it is removed; with `load_inplace` in the place of one
        with its name. Raises AdapterError when it does not fit, RequestError when its name is
        taken, OverloadedError when no slot is free."""

    async def remove_lora(self, name: str) -> None:
        """Unload an adapter; unfinished requests keep it. Raises RequestError when it is not
        loaded."""

    @property
    def is_sleeping(self) -> bool: ...

    async def sleep(self, level: int = 1) -> None:
        """Give the devices' memory back. Raises ConfigError when it cannot."""

    async def wake_up(self, tags: SequenceOf[str] | None = None) -> None:
        """Take the memory again. Raises ConfigError."""

    async def update_weights(self, params: str) -> int:
        """Replace the weights by those of a checkpoint; returns their version. Raises ConfigError,
        ModelError."""

    async def snapshot(
        self, directory: str | Path, with_kv: bool = True, deadline_s: float | None = None
    ) -> None:
        """Save unfinished requests. Raises SnapshotError."""

    async def restore(self, directory: str | Path) -> dict[str, Restored]:
        """Resume the requests of a snapshot, returned by id. Raises SnapshotError."""

    async def claim(self, request_id: str) -> None:
        """Mark the output of a restored request as delivered."""

    async def metrics_by_replica(self) -> Mapping[str, Mapping[str, Metric]]:
        """The metrics of each replica, by exported name; an engine alone has the name ""."""

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort running requests, and end."""


class ClusterClient(EngineClient, Protocol):
    """Several replicas of an engine."""

    async def cluster_status(self) -> ClusterStatus:
        """What each replica is, and how far a rolling restart."""

    async def restart_replicas(self) -> None:
        """Begin a rolling restart. Raises RestartError."""

    async def resize_replica(self, index: int, sizes: Mapping[str, int]) -> None:
        """Begin to load a replica on another mesh. Raises ConfigError, RestartError."""
