"""Replicas as actors of Ray, which starts here unless it runs already."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxserve.cluster.policies.autoscale import Autoscaler
from jaxserve.cluster.policies.copies import KEPT_SHARE
from jaxserve.cluster.replicas.replica import Replica
from jaxserve.cluster.router import Router
from jaxserve.core.commands import AddRequest
from jaxserve.core.engine_info import EngineInfo
from jaxserve.core.errors import (
    ConfigError,
    DistributedError,
    MissingDependencyError,
    ReplicaLostError,
)
from jaxserve.core.process.extras import extra
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.output_queue import Update
from jaxserve.engine.snapshot.requests import RequestSnapshot
from jaxserve.metrics.metric import Metric
from jaxserve.text import Tokenizer

with extra("cluster"):
    import ray
    from ray.exceptions import RayError, RayTaskError

_OLDEST_RAY = (2, 60)
"""As pyproject.toml has it."""
_CONNECT_S = 10.0
_RESTART_S = 120.0
"""How long Ray has to start a process in the place of one that has ended."""

_RESOURCES: Mapping[str, Literal["CPU", "GPU", "TPU"]] = {
    "cpu": "CPU",
    "cuda": "GPU",
    "gpu": "GPU",
    "rocm": "GPU",
    "tpu": "TPU",
}


def load_replicas(
    config: EngineConfig,
    num_replicas: int,
    watchdog_timeout: float | None = None,
    num_prefill: int = 0,
    min_replicas: int | None = None,
    asked_by: str = "data_parallel_size",
) -> Router:
    """Load replicas, each on its share of the devices, on CPUs its share of the cores. They run in
    the Ray cluster that RAY_ADDRESS or `ray start` names, or else in one that starts here and ends
    with the router. Blocks until all are ready. `num_prefill` as for Router. With `min_replicas`,
    so many are loaded, and more, up to `num_replicas`, as the load asks for. `asked_by`: the
    option that asks for replicas, which errors name.

    Raises ConfigError when there are more replicas than devices, DistributedError when Ray does not
    start, and as `AsyncEngine.load` does.
    """
    if config.devices is not None:
        raise ConfigError(
            f"devices is {config.devices}, but Ray divides the devices among the replicas; leave "
            "it out."
        )

    def start() -> list[RayReplica]:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's default niceness, 15, starves replicas beside any busy process.
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            ray.init(include_dashboard=False, logging_level=logging.ERROR)
        except (RayError, OSError, RuntimeError, ValueError) as error:
            raise DistributedError(
                f"Ray does not start: {error}; if another one runs on this machine, end it by `ray "
                "stop`, or set RAY_ADDRESS=local to start one beside it."
            ) from error
        free = dict.fromkeys(ray.cluster_resources(), 0.0) | ray.available_resources()
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        options, num_cores = share(config, num_replicas, free, machines, asked_by)
        actor = ray.remote(**options, max_restarts=-1)(Replica)
        log_level = logging.getLogger("jaxserve").level

        def begin(index: int, num_devices: int) -> Any:
            sized = actor.options(**_sized(options, num_devices))
            return sized.remote(index, num_cores, log_level)

        replicas = [
            RayReplica(functools.partial(begin, index), config.num_devices, num_cores is not None)
            for index in range(num_replicas)
        ]
        for replica in replicas[:min_replicas]:
            replica.begin()
        return replicas

    scaler = None if min_replicas is None else Autoscaler(min_replicas, num_replicas)
    return Router(start, config, watchdog_timeout, ray.shutdown, num_prefill, scaler)


def check_ray(version: str = ray.__version__, address: str | None = None) -> None:
    """Checks Ray's version, and RAY_ADDRESS unless another `address` is given.

    Raises MissingDependencyError for a Ray that is older than replicas need, DistributedError for
    an address that no process listens on, to which Ray tries to connect for minutes.
    """
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_RAY:
        oldest = ".".join(map(str, _OLDEST_RAY))
        raise MissingDependencyError(
            f"replicas need ray {oldest} or newer, and {version} is installed; run: pip install "
            "--upgrade 'jaxserve[cluster]'"
        )
    address = os.environ.get("RAY_ADDRESS", "") if address is None else address
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # "auto", "local" or none.
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise DistributedError(
            f"RAY_ADDRESS is {address}, where no Ray cluster answers ({error}); run `ray start "
            "--head` there, or unset it to start one here."
        ) from error


def share(
    config: EngineConfig,
    num_replicas: int,
    free: Mapping[str, float],
    machines: Sequence[Mapping[str, float]],
    asked_by: str = "data_parallel_size",
) -> tuple[dict[str, Any], int | None]:
    """What Ray reserves for each replica, and on CPUs its number of cores. `free` is what Ray has
    left in all, with 0 for what is in use; `machines` is what each machine has. Raises ConfigError
    when there is less: Ray would wait for it. `asked_by`: the option that it says to lower."""
    platform = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    kind = _RESOURCES.get(platform) or next((k for k in ("TPU", "GPU") if k in free), "CPU")
    num_free = int(free.get(kind, 0))
    needed = 1 if kind == "CPU" else config.num_devices  # CPU devices are virtual: cores are not.

    def most(size: int) -> int:
        """How many there are at most that take so much of one machine each."""
        return min(num_free // size, sum(int(each.get(kind, 0)) // size for each in machines))

    if num_replicas > most(needed):
        what = {"CPU": "core", "GPU": "GPU", "TPU": "TPU chip"}[kind] + ("s" if needed > 1 else "")
        where = f" on {len(machines)} machines" if len(machines) > 1 else ""
        raise ConfigError(
            f"{num_replicas} replicas take {needed} {what} each, but Ray has "
            f"{num_free}{where}; start at most {most(needed)}, by {asked_by}, or add machines to "
            "the Ray cluster."
        )
    if kind == "CPU":
        cores = range(num_free // num_replicas, 0, -1)
        num_cores = next(each for each in cores if most(each) >= num_replicas)
        return {"num_cpus": num_cores}, num_cores
    if kind == "GPU":
        return {"num_cpus": 1, "num_gpus": needed}, None
    return {"num_cpus": 1, "resources": {"TPU": needed}}, None


def _sized(options: Mapping[str, Any], num_devices: int) -> dict[str, Any]:
    """What Ray reserves for a replica of another number of devices; on CPUs these are virtual, and
    its cores stay."""
    if "num_gpus" in options:
        return {**options, "num_gpus": num_devices}
    if "resources" in options:
        return {**options, "resources": {"TPU": num_devices}}
    return dict(options)


class RayReplica:
    """An actor's `Replica`, with the errors of jaxserve instead of Ray's."""

    def __init__(self, start: Callable[[int], Any], num_devices: int, virtual: bool) -> None:
        """`start` makes the actor of so many devices, which `load` begins unless `begin` has.
        `virtual`: Ray does not count the devices."""
        self._start = start
        self._num_devices = num_devices
        self._virtual = virtual
        self._actor: Any = None
        self._process = ""  # where the engine was loaded

    def begin(self) -> None:
        """Have the actor's process start, unless it has."""
        if self._actor is None:
            self._actor = self._start(self._num_devices)

    async def plan(self, config: EngineConfig, num_replicas: int) -> EngineConfig:
        return await self._call("plan", config, num_replicas)

    async def load(self, config: EngineConfig, watchdog_timeout: float | None) -> EngineInfo:
        self.begin()
        self._process = await self._reached()
        return await self._call("load", config, watchdog_timeout)

    async def get_tokenizer(self) -> Tokenizer:
        return await self._call("get_tokenizer")

    async def get_process(self) -> str:
        return await self._call("get_process")

    async def submit(self, request: AddRequest | RequestSnapshot) -> None:
        await self._call("submit", request)

    async def updates(self) -> list[tuple[str, Update]]:
        return await self._call("updates")

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id)

    async def computed(self, request_id: str, num_tokens: int) -> int:
        return await self._call("computed", request_id, num_tokens)

    async def stage_in(
        self, destination: RayReplica, request_id: str, name: str, start: int, stop: int | None
    ) -> int:
        """As `Replica.stage_in`. What is exported goes from one process to the other."""
        if self._actor is None:
            raise ReplicaLostError("its process has ended")
        exported = self._actor.export_request.remote(request_id, start, stop)
        with _ended_if_cancelled(exported):
            return await destination.stage_request(exported, name)

    async def stage_request(self, parts: ray.ObjectRef, name: str) -> int:
        return await self._call("stage_request", parts, name)

    async def max_kept_bytes(self) -> int:
        """A share of the object store of the machine that has least: of what a store has no room
        for, Ray writes to disk."""
        nodes = await asyncio.to_thread(ray.nodes)
        stores = [
            node["Resources"].get("object_store_memory", 0) for node in nodes if node["Alive"]
        ]
        return int(KEPT_SHARE * min(stores, default=0))

    async def keep_request(
        self, request_id: str, start: int, stop: int, max_bytes: int
    ) -> tuple[int, ray.ObjectRef]:
        """As `Replica.keep_request`. What is exported stays in Ray's object store, which outlives
        the process."""
        if self._actor is None:
            raise ReplicaLostError("its process has ended")
        keep = self._actor.keep_request.options(num_returns=2)
        num_bytes, exported = keep.remote(request_id, start, stop, max_bytes)
        return await self._result(num_bytes), exported

    async def unstage_request(self, name: str) -> None:
        await self._call("unstage_request", name)

    async def prefill_us(self, start: int, stop: int) -> int | None:
        return await self._call("prefill_us", start, stop)

    async def pull_to(
        self,
        destination: RayReplica,
        token_ids: Sequence[int],
        tenant: str | None,
        cache_salt: str | None,
    ) -> int:
        """As `Replica.pull_to`. What is exported goes from one process to the other."""
        if self._actor is None:
            raise ReplicaLostError("its process has ended")
        exported = self._actor.export_prefix.remote(token_ids, tenant, cache_salt)
        with _ended_if_cancelled(exported):
            return await destination.import_prefix(exported)

    async def import_prefix(self, parts: ray.ObjectRef) -> int:
        return await self._call("import_prefix", parts)

    async def exchange_shares(
        self, counters: Mapping[str | None, int]
    ) -> tuple[Mapping[str | None, int], Sequence[str | None]]:
        return await self._call("exchange_shares", counters)

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def add_lora(self, lora_request: LoRARequest) -> None:
        await self._call("add_lora", lora_request)

    async def remove_lora(self, name: str) -> None:
        await self._call("remove_lora", name)

    async def get_metrics(self) -> Mapping[str, Metric]:
        return await self._call("get_metrics")

    async def restart(self, num_devices: int) -> None:
        """End the actor's process, stopped or not, and wait for the one that Ray starts in its
        place; of another number of devices, for another actor."""
        if self._virtual or num_devices == self._num_devices:
            ray.kill(self._actor, no_restart=False)
            await self._reached(self._process)
            return
        await self.close()
        self._num_devices = num_devices
        self.begin()
        await self._reached()

    async def close(self) -> None:
        """End the actor, whose process frees what it has, until `load` is called again."""
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor)

    async def _reached(self, ended: str | None = None) -> str:
        """Wait until the actor's process answers, and return where it runs: Ray may be starting
        another one, in the place of `ended`, which may still answer a few calls. Raises
        ReplicaLostError if there is none in time."""
        what = "no process starts in its place" if ended is None else f"{ended} does not end"
        error = ReplicaLostError(
            f"{what}, within {_RESTART_S:.0f} s; see by `ray status` what Ray waits for"
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RESTART_S):
                while True:
                    try:
                        if (process := await self.get_process()) != ended:
                            return process
                    except ReplicaLostError as lost:
                        error = lost
                    await asyncio.sleep(0.2)
        raise error

    async def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a method; see `_result`."""
        if self._actor is None:
            raise ReplicaLostError("its process has ended")
        return await self._result(getattr(self._actor, name).remote(*arguments))

    async def _result(self, called: ray.ObjectRef) -> Any:
        """The result of a call, which ends in its actor when this is cancelled. Raises what it
        raises, and ReplicaLostError when the actor's process has ended, or its machine, or the
        result was lost with either: Ray has an error for each, such as one for a process that it
        ended because memory ran out."""
        try:
            with _ended_if_cancelled(called):
                return await called
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, RayError):
                raise cause from None
            raise ReplicaLostError(" ".join(str(error).split())[:300]) from error


@contextlib.contextmanager
def _ended_if_cancelled(called: ray.ObjectRef) -> Iterator[None]:
    """Ends a call in its actor, begun or not, when the wait for it is cancelled."""
    try:
        yield
    except asyncio.CancelledError:
        ray.cancel(called)
        raise
