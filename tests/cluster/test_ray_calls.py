"""Calls of a replica in a process of Ray that end early, and what is kept of one that ends."""

from __future__ import annotations

import asyncio

import pytest
from mortal import run

from jaxserve.cluster.replicas.replica import Replica

pytestmark = pytest.mark.cluster
ray = pytest.importorskip("ray")

STORE_BYTES = 100 << 20


@pytest.fixture(scope="module")
def replica():
    """Whose process is there, without an engine: its exports and imports hang if told to."""
    from jaxserve.cluster.ray_replicas import RayReplica

    class Hanging(Replica):  # Sent by value, as Ray does with what is no module's.
        def __init__(self):
            super().__init__()
            self.told, self.hangs = [], ""

        async def hang_in(self, name):
            self.hangs, self.told = name, []

        async def what_was_told(self):
            return self.told

        async def _come_to(self, name):
            if name == self.hangs:
                self.told.append(f"{name} begins")
                try:
                    await asyncio.sleep(1000)
                finally:
                    self.told.append(f"{name} ends")

        async def export_prefix(self, *_):
            await self._come_to("export")
            return [b"12345", b"678"]

        async def import_prefix(self, parts):
            await self._come_to("import")
            return len(parts)

        async def export_request(self, *_):
            return await self.export_prefix()

    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
    )
    replica = RayReplica(lambda _: ray.remote(Hanging).remote(), 1, True)
    replica.begin()
    yield replica
    ray.shutdown()


@pytest.mark.parametrize("where", ["export", "import"])
def test_a_pull_that_is_cancelled_ends_in_its_process(replica, where):
    async def scenario():
        await replica._call("hang_in", where)
        pull = asyncio.create_task(replica.pull_to(replica, [1, 2], None, None))
        while await replica._call("what_was_told") != [f"{where} begins"]:
            await asyncio.sleep(0.01)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        while (told := await replica._call("what_was_told")) == [f"{where} begins"]:
            await asyncio.sleep(0.01)
        assert told == [f"{where} begins", f"{where} ends"]
        await replica._call("hang_in", "")
        assert await replica.pull_to(replica, [1, 2], None, None) == 2

    run(scenario())


def test_what_is_kept_is_in_the_object_store_up_to_its_share(replica):
    async def scenario():
        await replica._call("hang_in", "")
        assert await replica.max_kept_bytes() == STORE_BYTES // 2
        num_bytes, kept = await replica.keep_request("it", 0, 9, 8)
        assert (num_bytes, await kept) == (8, [b"12345", b"678"])
        num_bytes, kept = await replica.keep_request("it", 0, 9, 7)
        assert (num_bytes, await kept) == (8, [])

    run(scenario())
