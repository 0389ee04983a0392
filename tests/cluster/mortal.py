"""A cluster of replicas in this process, which are lost, stop or fail as tests ask for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

from patience import PATIENCE_S
from tiny_engines import LONGEST

from jaxserve.cluster.replicas.replica import Replica
from jaxserve.core.errors import OverloadedError, ReplicaLostError
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=1.0, seed=3)


_COPIES = ("stage_in", "stage_request", "pull_to", "import_prefix")
"""What copies KV, in its source and in its destination."""


class Mortal:
    """A replica whose process can be ended; what it had not sent is lost with it."""

    def __init__(self) -> None:
        self._replica = Replica()
        self._end = asyncio.Event()
        self.ends_after: int | None = None
        self.ends_with = ""  # how the id of a request begins that ends it
        self.is_busy = 0  # how many requests of others it refuses, as those with new grammars
        self.loads: list[str] = []  # how it is loaded the next times: "failed", "other" weights
        self.is_stopped = False  # as by SIGSTOP: it answers nothing
        self.num_starts = self.num_ends = 0
        self.at_move = ""  # what happens when a request is moved from it, or to it

    def __getattr__(self, name):
        async def call(*arguments):
            if self.is_stopped:
                await self._end.wait()
                raise ReplicaLostError("it has ended")
            if name == "submit" and self.ends_with and self._is_deadly(*arguments):
                await self.die()
            if name == "submit" and self._end.is_set():
                raise ReplicaLostError("it has ended")
            if name in _COPIES and self.at_move:
                fault, self.at_move = self.at_move, ""
                if fault.endswith("no room"):
                    return await self._without_room(name, *arguments)
                if fault.endswith("hangs"):
                    await asyncio.sleep(1000)
                if fault.endswith("dies"):
                    await self.die()
                    raise ReplicaLostError("it has ended")
                arguments = ([part[:-1] + b"?" for part in arguments[0]], *arguments[1:])
            if name == "submit" and self.is_busy and hasattr(arguments[0], "added"):
                self.is_busy -= 1
                raise OverloadedError("32 grammars wait to be compiled; try again.")
            return await getattr(self._replica, name)(*arguments)

        return call

    async def _without_room(self, name, *arguments):
        kv = self._replica._engine._engine.kv
        kv.fits = lambda *_, **__: False
        try:
            return await getattr(self._replica, name)(*arguments)
        finally:
            del kv.fits

    async def close(self):
        self.num_ends += 1
        await asyncio.sleep(0.2)
        await self._replica.close()

    def _is_deadly(self, request):
        added = getattr(request, "added", request)
        return added.request_id.startswith(self.ends_with)

    async def load(self, *arguments):
        self._end.clear()
        how = self.loads.pop(0) if self.loads else ""
        if how == "failed":
            raise RuntimeError("the device has no memory left")
        info = await self._replica.load(*arguments)
        return dataclasses.replace(info, fingerprint=how) if how else info

    async def updates(self):
        polling = asyncio.ensure_future(self._replica.updates())
        ended = asyncio.ensure_future(self._end.wait())
        if self.is_stopped:
            await ended
        await asyncio.wait({polling, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in (polling, ended):
            task.cancel()
        if self._end.is_set():
            raise ReplicaLostError("it has ended")
        if self.is_stopped:
            return await self.updates()
        updates = polling.result()
        if self.ends_after is not None:
            self.ends_after -= len(updates)
            if self.ends_after <= 0:
                await self.die()
        return updates

    async def die(self):
        self.ends_after = None
        self._end.set()
        dead, self._replica = self._replica, Replica()
        await dead.close()

    async def restart(self, num_devices):
        self.is_stopped = False
        self.num_starts += 1
        await self.die()


@contextlib.contextmanager
def paced(replicas, may_step):
    """Replicas make a step only if `may_step`, given how many tokens each of their samples has. So
    what is done to a request while it runs is done in time, however busy the machine is."""
    engines = [replica._replica._engine._engine for replica in replicas]

    def pace(engine):
        step = engine.step

        def step_in_time():
            outputs = [each for r in engine._requests.values() for each in r.sequence_outputs]
            if may_step([len(output.seq.output_token_ids) for output in outputs]):
                return step()
            time.sleep(0.002)
            return []

        engine.step = step_in_time

    for engine in engines:
        pace(engine)
    try:
        yield
    finally:
        for engine in engines:
            del engine.step


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


async def ask(router, prompt, params, name="it", **options):
    """All deltas and the output of one prompt."""
    tokens, output = [], None
    async with await router.submit([prompt], params, [name], **options) as updates:
        async for _, update in updates:
            if isinstance(update, RequestOutput):
                output = update
            else:
                tokens += [token for delta in update for token in delta.token_ids]
    return tokens, output


async def metric(router, name, replica=""):
    return (await router.metrics_by_replica())[replica][f"jaxserve:{name}"].value


async def held(router, place):
    """How many requests a replica has."""
    return (await router.cluster_status()).replicas[place].num_requests


async def all_up(router):
    while True:
        metrics = await router.metrics_by_replica()
        if all(metrics[number]["jaxserve:replica_up"].value for number in "01"):
            return
        await asyncio.sleep(0.05)
