"""A replica and its requests, as the router sees them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable
from typing import Any, TypeVar

from jaxserve.cluster.policies.dispatch import ReplicaLoad
from jaxserve.cluster.replicas.replica_client import ReplicaClient
from jaxserve.cluster.routed_request import RoutedRequest
from jaxserve.cluster.tasks import unless
from jaxserve.core.cluster_status import ReplicaState, ReplicaStatus, Role
from jaxserve.core.engine_info import EngineInfo
from jaxserve.core.errors import JaxserveError
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.output_queue import OutputQueue, Update

_T = TypeVar("_T")


class Submission:
    """The prompts of one `submit`: none is streamed before all have been accepted."""

    def __init__(self, output_queue: OutputQueue, num_requests: int) -> None:
        self.queue = output_queue
        self.num_waited_for = num_requests
        self.held: list[tuple[int, Update]] = []
        self.requests: list[OpenRequest] = []


@dataclasses.dataclass(eq=False)
class OpenRequest:
    """A request whose output is not complete. `number` is its place in its submission; `sent_as`
    its id in `replica`, while it is with one, and `left` is done once it is not, or is aborted;
    while it is held for a replica, once it is aborted.
    `immovable`: it has not been possible to move it. `cached_tokens`: those of the replica that
    computed its prompt; where a request moves to, all of it is cached."""

    routed: RoutedRequest
    submission: Submission
    number: int
    accepted: bool = False
    immovable: bool = False
    moving: bool = False
    cached_tokens: int | None = None
    replica: RoutedReplica | None = None
    sent_as: str = ""
    left: asyncio.Future[None] = dataclasses.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def enter(self, replica: RoutedReplica, name: str) -> None:
        """It is sent to a replica, as `name`."""
        self.replica, self.sent_as = replica, name
        self.left = asyncio.get_running_loop().create_future()

    def leave(self) -> RoutedReplica | None:
        """It is no longer with its replica, which is returned."""
        replica, self.replica = self.replica, None
        self._has_left()
        return replica

    def hold(self) -> None:
        """The process of its replica is replaced, which resumes it."""
        self.leave()
        self.routed.rewind()
        if not self.routed.aborted:
            self.left = asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        """Its client wants no more of it; its replica has it until that has ended it."""
        self.routed.aborted = True
        self._has_left()

    def _has_left(self) -> None:
        if not self.left.done():
            self.left.set_result(None)

    @property
    def movable(self) -> bool:
        """Whether another replica can go on with it: not if it was aborted. Of an embedding, what a
        replica has summed up stays there."""
        routed = self.routed
        bound = self.immovable or self.moving or routed.aborted or routed.added.pooling is not None
        return self.accepted and not bound

    def note(self, output: RequestOutput) -> None:
        """A replica has ended it. The first to say so is the one that computed its prompt."""
        if self.cached_tokens is None:
            self.cached_tokens = output.metrics.cached_tokens


class RoutedReplica:
    """The router's view of a replica.

    Attributes:
        load: what it has to do; another one each time that it is lost.
        requests: those dispatched to it, by their ids there.
        moved: those that have moved elsewhere, until it says that they have ended here.
        ended: done once it is to be loaded again: with the error by which it was lost, or with None
            when its process is to be replaced.
        unready: done while it is not ready: what is on its way to it goes elsewhere.
        removing: its process ends, and none is started in its place.
        config: what it is loaded with; `fallback` if it fails to load.
        immovable: its requests do not move to others.
        resume: called once it is loaded again, with the requests that it had; without, these are
            dispatched to others.
        num_finished: requests that have ended here, with their output.
        num_losses: how often it was lost.
    """

    def __init__(
        self,
        index: int,
        role: Role,
        client: ReplicaClient,
        config: EngineConfig,
        info: EngineInfo,
        process: str,
    ) -> None:
        self.index = index
        self._role = role
        self.client = client
        self.requests: dict[str, OpenRequest] = {}
        self.moved: dict[str, OpenRequest] = {}
        self.removing = self.immovable = False
        self.config = config
        self.fallback: EngineConfig | None = None
        self.resume: Callable[[Iterable[OpenRequest]], Awaitable[None]] | None = None
        self.num_finished = 0
        self.num_losses = 0
        self.load = self._no_load(info)
        self.unready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begin(info, process)

    def begin(self, info: EngineInfo, process: str) -> None:
        """Its engine is loaded, in this process."""
        self._info, self.fallback, self.immovable = info, None, False
        if self.load.num_pages != info.num_pages:
            self.load = self._no_load(info)
        self._process = process
        self.ended: asyncio.Future[JaxserveError | None]
        self.ended = asyncio.get_running_loop().create_future()
        self.enter("ready")

    def enter(self, state: ReplicaState) -> None:
        """Requests are dispatched to a replica that is ready."""
        self.state: ReplicaState = state
        self._since_s = time.time()
        self.load.draining = state != "ready"
        if state != "ready" and not self.unready.done():
            self.unready.set_result(None)
        elif state == "ready" and self.unready.done():
            self.unready = asyncio.get_running_loop().create_future()

    def end(self, error: JaxserveError | None) -> None:
        """It is to be loaded again: it was lost, or else its process is to be replaced."""
        if not self.ended.done():
            self.ended.set_result(error)

    def clear(self) -> dict[str, OpenRequest]:
        """It has ended; returns the requests that it had."""
        left, self.requests, self.moved = self.requests, {}, {}
        self.load = self._no_load(self._info)
        self.enter("loading")
        return left

    async def receive(
        self,
        key: Hashable,
        num_pages: int,
        copy: Callable[[], Coroutine[Any, Any, _T]],
        left: asyncio.Future[None],
    ) -> _T | None:
        """What `copy` returns or raises. It brings KV of so many pages, and begins once there is
        room for that in the host's memory. None if `left` is done before it has ended, or this
        replica is not ready any more: then the wait ends, and so does `copy`, which is
        cancelled."""
        incoming, room = self.load.incoming_kv, asyncio.get_running_loop().create_future()
        ended = left, self.unready
        incoming.enter(key, num_pages, lambda: room.set_result(None))
        try:
            await asyncio.wait({room, *ended}, return_when=asyncio.FIRST_COMPLETED)
            return await unless(ended, copy())
        finally:
            incoming.leave(key)

    @property
    def is_drained(self) -> bool:
        """Whether it has no request, and has said what those that moved took here: the tokens of
        their prompts that it had cached."""
        return not self.requests and not self.moved

    @property
    def status(self) -> ReplicaStatus:
        load, info = self.load, self._info
        return ReplicaStatus(
            index=self.index,
            role=self._role,
            state=self.state,
            since_s=self._since_s,
            process=self._process,
            model=str(info.config.model),
            fingerprint=info.fingerprint,
            version=info.version,
            num_requests=len(self.requests),
            num_sequences=load.num_sequences,
            max_num_seqs=load.max_num_seqs,
            num_used_pages=load.num_used_pages,
            num_pages=load.num_pages,
            num_finished=self.num_finished,
            num_losses=self.num_losses,
            sizes=info.config.sizes,
        )

    def _no_load(self, info: EngineInfo) -> ReplicaLoad:
        config = info.config
        return ReplicaLoad(info.num_pages, config.page_size, config.max_num_seqs, self._role)
