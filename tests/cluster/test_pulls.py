"""Prefixes that one replica pulls from another: when, and what a pull that fails costs."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from mortal import SEEDED, all_up, ask, metric, run
from patience import PATIENCE_S

from jaxserve.cluster import open_requests, prefix_pull
from jaxserve.cluster.policies.dispatch import Demand, ReplicaLoad
from jaxserve.cluster.policies.pulls import MAX_PULLS, RETRY, Pull, Pulls, plan_pull

PAGES = (b"a", b"b", b"c", b"d")


def loads(*cached: int) -> list[ReplicaLoad]:
    """Replicas, each with so many pages of a prompt cached."""
    found = [ReplicaLoad(num_pages=40, page_size=4, max_num_seqs=4) for _ in cached]
    for load, count in zip(found, cached):
        load.cached.add(PAGES[:count])
    return found


def test_the_longest_prefix_of_another_replica():
    demand = Demand(PAGES, 1)
    assert plan_pull(loads(0, 2, 4), 0, demand) == Pull(2, 4, 0)
    assert plan_pull(loads(3, 2, 4), 0, demand) == Pull(2, 4, 3)
    assert plan_pull(loads(4, 4, 1), 0, demand) is None
    assert plan_pull(loads(0, 0, 0), 1, demand) is None
    busy = loads(0, 4, 4)
    busy[1].add("one", Demand((), 1))
    assert plan_pull(busy, 0, demand) == Pull(2, 4, 0)
    busy[2].draining = True
    assert plan_pull(busy, 0, demand) == Pull(1, 4, 0)
    busy[1].num_pulled = MAX_PULLS
    assert plan_pull(busy, 0, demand) is None
    busy[1].num_pulled = 0
    busy[0].incoming_kv.enter("a move", 5, lambda: None)
    assert plan_pull(busy, 0, demand) is None


def test_a_pull_is_made_when_it_takes_less_time_than_computing():
    pulls, pull = Pulls(), Pull(1, 8, 0)
    assert pulls.pays(8, 100)  # Nothing is known, so one is made.
    for _ in range(8):
        pulls.pulled(pull, 32, 4, 800)
    assert pulls.pays(8, 1000) and pulls.pays(8, None)
    tried = [pulls.pays(8, 500) for _ in range(3 * RETRY)]
    assert sum(tried) == 3 and not any(tried[: RETRY - 1])
    pulls.failed()
    assert not any(pulls.pays(8, 10_000) for _ in range(RETRY - 1)) and pulls.pays(8, 10_000)


@pytest.fixture
def chosen_replica(monkeypatch):
    """Has all requests dispatched to the replica of a number that is set."""
    chosen = [0]
    monkeypatch.setattr(open_requests, "dispatch", lambda loads, demand: chosen[0])
    return chosen


def test_a_prefix_is_pulled_and_not_computed_again(
    llama, llm, cluster, chosen_replica, monkeypatch
):
    monkeypatch.setattr(prefix_pull, "PULL_S", PATIENCE_S)
    router, _ = cluster
    prompt, params = llama.prompts[7], dataclasses.replace(SEEDED, max_tokens=12)
    expected = list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
    page_size = router.info.config.page_size
    num_full = (len(prompt) - 1) // page_size * page_size
    assert num_full

    async def scenario():
        await all_up(router)
        await router.reset_prefix_cache()
        router._pool.requests._pulls = Pulls()
        pulled = await metric(router, "pulled_prefix_tokens_total")
        for place in (0, 1):
            chosen_replica[0] = place
            before = await metric(router, "prefill_tokens_total", str(place))
            tokens, output = await ask(router, prompt, params, f"pull-{place}")
            assert tokens == expected
            computed = await metric(router, "prefill_tokens_total", str(place)) - before
            assert computed == len(prompt) - (output.metrics.cached_tokens if place else 0)
        assert output.metrics.cached_tokens >= num_full
        pulled = await metric(router, "pulled_prefix_tokens_total") - pulled
        assert num_full <= pulled <= len(prompt)
        chosen_replica[0] = 0
        tokens, output = await ask(router, prompt, params, "other", tenant="other")
        assert tokens == expected and output.metrics.cached_tokens == 0

    run(scenario())


def test_the_prompts_of_one_list_pull_few_prefixes_at_a_time(cluster, monkeypatch):
    router, _ = cluster
    prompts = [[token] * 9 for token in range(3, 5 + MAX_PULLS)]
    params, counted = dataclasses.replace(SEEDED, max_tokens=2), [[], []]

    async def send_to(place):
        def chosen(loads, demand):
            counted[place].append(loads[0].num_pulled)
            return place

        monkeypatch.setattr(open_requests, "dispatch", chosen)
        names = [f"list-{place}-{number}" for number in range(len(prompts))]
        async with await router.submit(prompts, params, names) as updates:
            async for _ in updates:
                pass

    async def scenario():
        await all_up(router)
        await router.reset_prefix_cache()
        await send_to(0)
        await send_to(1)
        assert router._pool._replicas[0].load.num_pulled == 0

    run(scenario())
    assert counted == [[0] * len(prompts), [*range(MAX_PULLS + 1), MAX_PULLS]]


ENDS = ("the client leaves", "the request ends", "the destination drains")
"""What ends a pull that hangs."""
FAULTS = ("the source dies", "the pull hangs", "a part is damaged", "no room", *ENDS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pull_that_fails_costs_no_token(llama, llm, cluster, chosen_replica, fault, monkeypatch):
    monkeypatch.setattr(prefix_pull, "PULL_S", 0.2 if fault == "the pull hangs" else PATIENCE_S)
    router, replicas = cluster
    prompt, params = llama.prompts[8], dataclasses.replace(SEEDED, max_tokens=12)
    expected = list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)

    async def entered(state):
        router._pool._replicas[1].enter(state)

    async def ended(asking):
        """The pull hangs in its destination, and is ended there."""
        while replicas[1].at_move:
            await asyncio.sleep(0)
        if fault == "the client leaves":
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        elif fault == "the request ends":
            await router.abort("second")
            assert (await asking)[1].outputs[0].finish_reason == "abort"
        else:
            chosen_replica[0] = 0
            await router._result_of(entered("draining"))
            tokens, output = await asking
            assert tokens == expected and output.metrics.cached_tokens
            await router._result_of(entered("ready"))
        while router._pool._replicas[0].load.num_pulled:
            await asyncio.sleep(0.01)

    async def scenario():
        await all_up(router)
        await router.reset_prefix_cache()
        router._pool.requests._pulls = Pulls()
        chosen_replica[0] = 0
        await ask(router, prompt, params, "first")
        chosen_replica[0] = 1
        replicas["source" not in fault].at_move = "hangs" if fault in ENDS else fault
        pulled = await metric(router, "pulled_prefix_tokens_total")
        asking = asyncio.create_task(ask(router, prompt, params, "second"))
        if fault in ENDS:
            await ended(asking)
        else:
            tokens, output = await asking
            assert tokens == expected and output.metrics.cached_tokens == 0
        assert await metric(router, "pulled_prefix_tokens_total") == pulled
        assert not any(replica.at_move for replica in replicas)
        await all_up(router)
        for routed, mortal in zip(router._pool._replicas, replicas):
            assert (routed.load.num_used_pages, routed.load.num_pulled) == (0, 0)
            assert routed.load.incoming_kv.has_room(1000) and not routed.requests
            assert not any(node.pins for node in mortal._replica._engine._engine.kv.tree)
            assert mortal._replica._engine._engine.kv.pool.num_used == 0

    run(scenario())
