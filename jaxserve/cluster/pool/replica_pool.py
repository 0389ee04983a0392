"""The replicas of a router: loaded, watched, loaded again when one is lost, restarted, and removed.

One task a replica waits for that replica's updates, so that a step of the replica costs one message
however many requests it has. While a replica is loaded again, its requests go on in the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from jaxserve.cluster.fair_sharing import share_fairly
from jaxserve.cluster.open_requests import OpenRequests
from jaxserve.cluster.policies.autoscale import Autoscaler
from jaxserve.cluster.pool.pool_metrics import pool_metrics, replica_metrics
from jaxserve.cluster.pool.resize import Resize, resized
from jaxserve.cluster.pool.restart import RollingRestart
from jaxserve.cluster.pool.scaling import Scaling
from jaxserve.cluster.replicas.replica_client import (
    ReplicaClient,
    ReplicaSilentError,
    ignore_lost,
    wait_until_unresponsive,
)
from jaxserve.cluster.replicas.routed_replica import RoutedReplica
from jaxserve.cluster.request_moves import move_requests
from jaxserve.cluster.tasks import Tasks
from jaxserve.core.cluster_status import ClusterStatus, Role
from jaxserve.core.engine_info import EngineInfo
from jaxserve.core.errors import (
    ConfigError,
    EngineClosedError,
    JaxserveError,
    ReplicaLostError,
    RestartError,
)
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.settings.config import EngineConfig
from jaxserve.metrics.metric import Metric
from jaxserve.text import Tokenizer

LOAD_ATTEMPTS = 3
"""A lost replica that cannot be loaded again in so many attempts is given up."""

METRICS_S = 2.0
"""How long the metrics of a replica are waited for; one that is lost has none."""

_log = logging.getLogger(__name__)


class ReplicaPool:
    """Replicas, and the requests dispatched to them.

    Attributes:
        info: what a replica says of itself, and the number of replicas.
        tokenizer: the model's.
        requests: those whose output is not complete.
        failure: why no replica can be loaded any more.
        stop: set it to end `run`.
    """

    info: EngineInfo
    tokenizer: Tokenizer

    def __init__(
        self,
        config: EngineConfig,
        watchdog_timeout: float | None,
        num_prefill: int = 0,
        scaler: Autoscaler | None = None,
    ) -> None:
        """`num_prefill`: so many of the replicas, the first ones, only prefill, and the others
        decode; by default all do both. `scaler` decides how many are loaded, by default all."""
        self.failure: BaseException | None = None
        self.stop = asyncio.Event()
        self._clients: SequenceOf[ReplicaClient] = ()
        self._asked = self._config = config
        self._watchdog_timeout = watchdog_timeout
        self._num_prefill = num_prefill
        self._replicas: list[RoutedReplica] = []
        self._given_up: list[RoutedReplica] = []
        self._restart: RollingRestart | None = None
        self._resize: Resize | None = None
        self._tasks = Tasks(self._fail)
        self.requests = OpenRequests(self._replicas, self._tasks, config.seed)
        self._scaling: Scaling | None = None
        if scaler is not None:
            self._scaling = Scaling(
                scaler,
                self._replicas,
                self._add,
                lambda: not self._is_restarting and not self._is_resizing,
                self.requests.route_waiting,
            )

    @property
    def stalled(self) -> bool:
        """Whether all replicas are being loaded again."""
        return all(replica.load.draining for replica in self._replicas)

    async def run(self) -> None:
        """Serve until `stop` is set, or no replica is left. Call `load` before."""
        for replica in self._replicas:
            self._tasks.spawn(self._supervise(replica))
        self._tasks.spawn(move_requests(self._replicas, self.requests))
        if self._config.fair_share:
            self._tasks.spawn(share_fairly(self._replicas))
        if self._scaling is not None:
            self._tasks.spawn(self._scaling.run())
        await self.stop.wait()

    async def close(self) -> None:
        """End all requests and replicas."""
        reason = f": {self.failure}" if self.failure else ""
        self.requests.close(EngineClosedError(f"the engine was closed{reason}"))
        await self._tasks.close()
        closing = (client.close() for client in self._clients)
        await asyncio.gather(*closing, return_exceptions=True)

    async def load(self, clients: SequenceOf[ReplicaClient]) -> None:
        """Load the replicas that there are from the start: the first alone, which compiles the
        programs that the others load.

        Raises as `AsyncEngine.load` does, ConfigError when replicas differ, and ReplicaLostError.
        """
        self._clients = clients
        status = self._scaling and self._scaling.status
        first, *others = clients if status is None else clients[: status.min_replicas]
        self._config = await first.plan(self._config, len(clients))
        self.info = await first.load(self._config, self._watchdog_timeout)
        self.tokenizer = await first.get_tokenizer()
        loading = (client.load(self._config, self._watchdog_timeout) for client in others)
        infos = [self.info, *await asyncio.gather(*loading)]
        for index, info in enumerate(infos):
            self._check_alike(index, info, self._config)
        self.requests.page_size = self.info.config.page_size
        caches = self.requests.caches_prefixes = self.info.config.enable_prefix_caching
        windowed = any(self.info.model.sliding_windows)  # Their pages do not hold all layers.
        self.requests.shares_prefixes = caches and not windowed
        for index, (client, info) in enumerate(zip(clients, infos)):
            process = await client.get_process()
            _log.info("replica %d is ready: %s", index, process)
            self._replicas.append(
                RoutedReplica(index, self._role(index), client, self._config, info, process)
            )
        self._count()

    def _role(self, index: int) -> Role:
        if not self._num_prefill:
            return "any"
        return "prefill" if index < self._num_prefill else "decode"

    def _check_alike(self, index: int, info: EngineInfo, config: EngineConfig) -> None:
        """Raises ConfigError for a replica that would answer otherwise than the first one. On
        another mesh its pool may have other pages."""
        names = ["version", "fingerprint", "device_kind"]
        for name in names + ["num_pages"] * (config is self._config):
            ours, theirs = getattr(self.info, name), getattr(info, name)
            if ours != theirs:
                raise ConfigError(
                    f"{name} is {theirs!r} in replica {index}, and {ours!r} in the one that was "
                    "loaded first, but replicas must be alike; give them the same jaxserve, model "
                    "and devices."
                )

    def _count(self) -> None:
        """There is another number of replicas."""
        self.info = dataclasses.replace(self.info, data_parallel_size=max(1, len(self._replicas)))

    def _add(self) -> bool:
        """Begin to load one more replica; False when there is no other, or all were given up."""
        known = {replica.index for replica in (*self._replicas, *self._given_up)}
        index = next((each for each in range(len(self._clients)) if each not in known), None)
        if index is None:
            return False
        _log.info("replica %d is added", index)
        client = self._clients[index]
        replica = RoutedReplica(index, self._role(index), client, self._config, self.info, "")
        replica.clear()
        self._replicas.append(replica)
        self._tasks.spawn(self._supervise_added(replica))
        return True

    async def _supervise_added(self, replica: RoutedReplica) -> None:
        if await self._load_again(replica, has_process=True):
            self._count()
            await self._supervise(replica)

    async def _supervise(self, replica: RoutedReplica) -> None:
        """Deliver a replica's updates, and load it again when it has ended, unless it leaves."""
        while True:
            error = await self._serve(replica)
            if error is not None:
                replica.num_losses += 1
            has_process = error is not None and not isinstance(error, ReplicaSilentError)
            lost = replica.clear()
            if error is not None:
                many = f"with {len(lost)} requests"
                _log.error("replica %d was lost %s: %s", replica.index, many, error)
            if replica.removing:
                self._replicas.remove(replica)
                self._count()
            resume, replica.resume = replica.resume, None
            left = tuple(lost.values())
            if resume is None:
                self.requests.redispatch(left)
            else:
                self.requests.hold(left)
            if replica.removing:
                await ignore_lost(replica.client.close())
                return
            if not await self._load_again(replica, has_process):
                if resume is not None:
                    self.requests.redispatch([each for each in left if each.replica is None])
                return
            if resume is not None:
                await resume(left)

    async def _serve(self, replica: RoutedReplica) -> JaxserveError | None:
        """Deliver a replica's updates until it has ended: the error by which it was lost, or None
        when its process is to be replaced."""
        watch = None
        if self._watchdog_timeout != 0:
            watch = asyncio.create_task(wait_until_unresponsive(replica.client))
            watch.add_done_callback(lambda task: task.cancelled() or replica.end(task.result()))
        try:
            while True:
                updates = asyncio.ensure_future(replica.client.updates())
                try:
                    await asyncio.wait({updates, replica.ended}, return_when="FIRST_COMPLETED")
                    if replica.ended.done():
                        return replica.ended.result()
                    self.requests.deliver(replica, updates.result())
                except JaxserveError as error:
                    return error
                finally:
                    updates.cancel()
        finally:
            if watch is not None:
                watch.cancel()

    async def _load_again(self, replica: RoutedReplica, has_process: bool) -> bool:
        """Load a replica whose process is, or is not, there; False when it has been given up."""
        error: Exception | None = None
        for _ in range(LOAD_ATTEMPTS):
            try:
                if not has_process:
                    await replica.client.restart(replica.config.num_devices)
                    has_process = True
                info = await self._loaded_anew(replica)
                process = await replica.client.get_process()
            except Exception as failed:  # Also of a device: the other replicas go on.
                _log.error("replica %d cannot be loaded again: %s", replica.index, failed)
                error = failed
                if replica.fallback is not None:
                    replica.config, replica.fallback = replica.fallback, None
                    has_process = False
                continue
            _log.info("replica %d is ready again: %s", replica.index, process)
            replica.begin(info, process)
            self.requests.route_waiting()
            return True
        _log.error("replica %d is given up; to have it again, restart the server", replica.index)
        replica.enter("failed")
        self._replicas.remove(replica)
        self._given_up.append(replica)
        if not self._replicas and not self._add():
            self.failure = error
            self.stop.set()
        self._count()
        await ignore_lost(replica.client.close())  # Its devices are free for others.
        return False

    async def _loaded_anew(self, replica: RoutedReplica) -> EngineInfo:
        client, config = replica.client, replica.config
        planned = config
        if config is not self._config:
            planned = await client.plan(config, len(self._clients))
        try:
            info = await client.load(planned, self._watchdog_timeout)
        except ReplicaLostError:
            raise
        except Exception:  # The process is there, but its engine has failed, or does not load.
            await client.restart(config.num_devices)
            info = await client.load(planned, self._watchdog_timeout)
        self._check_alike(replica.index, info, config)
        return info

    async def restart(self) -> None:
        """Begin to restart all replicas, one after another; `status` tells how far it is. Raises
        RestartError when that is going on already, or when one replica alone would be left."""
        self._check_unchanging()
        if len(self._replicas) < 2:
            raise RestartError(
                "one replica is left, whose requests would have nowhere to go; restart the server."
            )
        self._restart = RollingRestart(self._replicas, self.requests.route_waiting)
        self._tasks.spawn(self._restart.run())

    async def resize(self, index: int, sizes: Mapping[str, int]) -> None:
        """Begin to load a replica on another mesh, with these parallel sizes; `status` tells how
        far it is. Raises ConfigError for sizes that cannot be, RestartError when the replica is not
        ready, or another one is restarted, resized or removed."""
        self._check_unchanging()
        replica = next((each for each in self._replicas if each.index == index), None)
        if replica is None or replica.state != "ready":
            raise RestartError(
                f"replica {index} is not one of those that are ready; choose one of those by "
                "/cluster/status."
            )
        page_size = self.info.config.page_size
        config = resized(self._asked, replica.config, sizes, page_size)
        if self.info.device_kind == "cpu" or config.num_devices <= replica.config.num_devices:
            await replica.client.plan(config, len(self._clients))
        self._resize = Resize(replica, config, self._replicas, self.requests)
        self._tasks.spawn(self._resize.run())

    def _check_unchanging(self) -> None:
        """Raises RestartError while replicas are restarted, resized or removed."""
        if self._is_restarting:
            raise RestartError(
                "a rolling restart is going on; wait for its end, which /cluster/status tells."
            )
        if self._is_resizing:
            raise RestartError(
                "a replica is being resized; wait for its end, which /cluster/status tells."
            )
        if any(replica.removing for replica in self._replicas):
            raise RestartError("a replica is being removed; wait for its end, and try again.")

    @property
    def _is_restarting(self) -> bool:
        return self._restart is not None and self._restart.status.running

    @property
    def _is_resizing(self) -> bool:
        return self._resize is not None and self._resize.status.running

    async def status(self) -> ClusterStatus:
        replicas = sorted([*self._replicas, *self._given_up], key=lambda each: each.index)
        restart = None if self._restart is None else self._restart.status
        scaling = None if self._scaling is None else self._scaling.status
        resize = None if self._resize is None else self._resize.status
        each = tuple(replica.status for replica in replicas)
        return ClusterStatus(each, restart, scaling, resize)

    async def reset_prefix_cache(self) -> None:
        for replica in tuple(self._replicas):
            replica.load.cached.clear()
            await ignore_lost(replica.client.reset_prefix_cache())

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """Has every replica load an adapter; one that is lost loads it for its next request."""
        for replica in tuple(self._replicas):
            await ignore_lost(replica.client.add_lora(lora_request))

    async def remove_lora(self, name: str) -> None:
        for replica in tuple(self._replicas):
            await ignore_lost(replica.client.remove_lora(name))

    async def metrics(self) -> dict[str, dict[str, Metric]]:
        replicas = tuple(self._replicas)  # One of them may be given up meanwhile.
        of_engines = await asyncio.gather(*map(self._metrics_of, replicas))
        by_replica = {
            str(replica.index): {**replica_metrics(replica), **metrics}
            for replica, metrics in zip(replicas, of_engines)
        }
        status = None if self._scaling is None else self._scaling.status
        own = pool_metrics(self.requests, len(self._replicas), status)
        return {"": own} | by_replica

    async def _metrics_of(self, replica: RoutedReplica) -> Mapping[str, Metric]:
        if replica.state == "loading":
            return {}
        with contextlib.suppress(JaxserveError, TimeoutError):
            return await asyncio.wait_for(replica.client.get_metrics(), METRICS_S)
        return {}

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.stop.set()
