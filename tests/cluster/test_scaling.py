"""Replicas of this process are added while much is asked, and removed later; nothing is lost."""

from __future__ import annotations

import asyncio

import pytest
from mortal import GREEDY, Mortal, ask, metric, run
from patience import PATIENCE_S
from tiny_engines import LONGEST

from jaxserve.cluster.policies.autoscale import Autoscaler
from jaxserve.cluster.policies.dispatch import Demand, ReplicaLoad
from jaxserve.cluster.pool.scaling import Scaling
from jaxserve.cluster.replicas.routed_replica import RoutedReplica
from jaxserve.cluster.router import Router
from jaxserve.core.errors import RestartError
from jaxserve.core.settings.config import EngineConfig


@pytest.fixture(scope="module")
def scaled(llama):
    scaler = Autoscaler(1, 3, add_after_s=0.5, remove_after_s=1)
    replicas = [Mortal() for _ in range(3)]
    config = EngineConfig.of(model=llama.path, **llama.settings())
    router = Router(lambda: replicas, config, scaler=scaler)
    yield router, replicas
    router.close()
    assert not router.stuck and router.failure is None


async def until(condition) -> None:
    while not await condition():
        await asyncio.sleep(0.05)


def number_is(router, number):
    async def holds():
        replicas = (await router.cluster_status()).replicas
        counted = router.info.data_parallel_size
        return counted == number and [each.state for each in replicas] == ["ready"] * number

    return holds


async def ask_until(llama, router, condition, prefix):
    """Requests without a pause, many at once, until a condition holds; all are answered well."""
    met = asyncio.ensure_future(until(condition))

    async def client(number):
        count = 0
        while not met.done():
            index = number % len(llama.prompts)
            name = f"{prefix}-{number}-{count}"
            tokens, output = await ask(router, llama.prompts[index], GREEDY, name)
            assert tokens == list(output.outputs[0].token_ids) and len(tokens) == LONGEST
            assert tokens == llama.answers[index]
            count += 1

    await asyncio.gather(*(client(number) for number in range(40)), met)


def test_replicas_come_under_load_and_go_after_it(llama, scaled):
    router, _ = scaled

    async def all_removed():
        added = await metric(router, "replicas_added_total")
        return added == await metric(router, "replicas_removed_total")

    async def scenario():
        assert await metric(router, "replicas") == router.info.data_parallel_size == 1
        await ask_until(llama, router, number_is(router, 3), "up")
        assert await metric(router, "replicas_added_total") >= 2
        await until(number_is(router, 1))
        await until(all_removed)
        scaling = (await router.cluster_status()).scaling
        assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
        tokens, _ = await ask(router, llama.prompts[4], GREEDY, "after")
        assert tokens == llama.answers[4]
        with pytest.raises(RestartError, match="one replica is left"):
            await router.restart_replicas()

    run(scenario())


def test_one_that_cannot_be_loaded_is_given_up_and_another_one_added(llama, scaled):
    router, replicas = scaled

    async def states():
        return [each.state for each in (await router.cluster_status()).replicas]

    async def another_came():
        return await states() == ["ready", "failed", "ready"]

    async def it_went():
        return await states() == ["ready", "failed"]

    async def scenario():
        replicas[1].loads, num_ends = ["failed"] * 6, replicas[1].num_ends
        await ask_until(llama, router, another_came, "again")
        assert replicas[1].num_ends == num_ends + 1
        await until(it_went)

    run(scenario())


def test_when_the_last_one_is_given_up_another_one_is_loaded(llama):
    """There are devices for more; its request goes on there."""
    replicas = [Mortal(), Mortal()]
    config = EngineConfig.of(model=llama.path, **llama.settings())
    router = Router(lambda: replicas, config, scaler=Autoscaler(1, 2))

    async def scenario():
        replicas[0].ends_after, replicas[0].loads = 3, ["failed"] * 6
        tokens, _ = await ask(router, llama.prompts[4], GREEDY, "it")
        assert tokens == llama.answers[4]
        states = [each.state for each in (await router.cluster_status()).replicas]
        assert states == ["failed", "ready"] and router.failure is None

    try:
        run(scenario())
    finally:
        router.close()


class Counted:
    """A replica as `Scaling` sees it, with this many sequences."""

    is_drained = RoutedReplica.is_drained

    def __init__(self, index: int, num_sequences: int) -> None:
        self.index, self.leaves = index, False
        self.load = ReplicaLoad(num_pages=60, page_size=4, max_num_seqs=8)
        self.requests, self.moved = dict.fromkeys(range(num_sequences)), {}
        for key in self.requests:
            self.load.add(key, Demand((), 4))
        self.enter("ready")

    def enter(self, state: str) -> None:
        self.state = state
        self.load.draining = state != "ready"


def scaling_of(replicas, routed):
    return Scaling(
        Autoscaler(1, 3),
        replicas,
        add=lambda: False,
        may_change=lambda: True,
        route_waiting=lambda: routed.append("all"),
    )


def test_one_that_drains_serves_again_when_another_one_is_lost():
    """The pages and slots of one that is being loaded again are of no use to its requests."""
    leaving, lost, full = (Counted(index, number) for index, number in enumerate((1, 0, 9)))
    lost.enter("loading")
    routed = []
    removing = scaling_of([leaving, lost, full], routed)._removed(leaving)
    assert not asyncio.run(asyncio.wait_for(removing, PATIENCE_S))
    assert (leaving.state, leaving.leaves, routed) == ("ready", False, ["all"])


def test_one_ends_when_it_has_said_how_its_requests_ended():
    """What of their prompts it had cached is in the `usage` of those that moved."""
    leaving = Counted(0, 0)
    leaving.moved["elsewhere"] = None
    replicas = [leaving, Counted(1, 0)]
    leaving.end = lambda error: replicas.remove(leaving)

    async def scenario():
        removing = asyncio.ensure_future(scaling_of(replicas, [])._removed(leaving))
        await asyncio.sleep(0.2)
        assert leaving in replicas
        leaving.moved.clear()
        assert await removing and leaving not in replicas

    run(scenario())
