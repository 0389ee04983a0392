"""A tenant's fair share is one of all replicas: what it was served by others counts in each."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from mortal import GREEDY, all_up, ask, run

from jaxserve.cluster.policies.fairness import FairShares
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.scheduler.request_queue import DECODE_WEIGHT, FairQueue

COST = 10


def waits(queue: FairQueue, tenant: str, number: int) -> None:
    queue.add(
        Sequence(
            seq_id=number,
            request_id=str(number),
            index=0,
            prompt_token_ids=[0] * COST,
            params=SamplingParams(),
            arrival_us=number,
            tenant=tenant,
        )
    )


def serve_one(queue: FairQueue) -> str | None:
    """Admits the first sequence, which then ends; returns its tenant."""
    for seq in queue:
        queue.remove(seq)
        queue.charge(seq, COST, 0)
        queue.finished(seq)
        return seq.tenant
    return None


def served(backlogs: list[str], rounds: int, every: int | None) -> dict[str, int]:
    """Requests of each tenant that were served by queues with a backlog of these tenants, whose
    counters are exchanged after `every` rounds."""
    queues, shares, numbers = [FairQueue() for _ in backlogs], FairShares(), itertools.count()
    counts = dict.fromkeys(sorted(set("".join(backlogs))), 0)
    for turn in range(rounds):
        for queue, tenants in zip(queues, backlogs):
            for tenant in tenants:
                waits(queue, tenant, next(numbers))
            counts[serve_one(queue)] += 1
        if every is not None and turn % every == 0:
            counters = dict(shares.counters)
            for number, queue in enumerate(queues):
                shares.exchange(number, *queue.exchange(counters))
    return counts


def test_who_waits_at_one_replica_gets_more_of_it_if_others_have_the_rest():
    """Of two replicas, one of which only `a` uses, `b` gets all of the other."""
    alone = served(["ab", "a"], 200, None)
    assert alone["b"] <= 101  # Half of one: a third of what `a` has.
    shared = served(["ab", "a"], 200, 1)
    assert abs(shared["a"] - shared["b"]) <= 4


@given(
    st.lists(st.sampled_from(["a", "b", "c", "ab", "bc", "ac", "abc"]), min_size=2, max_size=4),
    st.integers(1, 5),
)
def test_no_tenant_is_served_less_where_another_could_have_waited_instead(backlogs, every):
    """Who waits at all replicas is served no less than any other, but for what is not told yet."""
    backlogs = [*backlogs, "z"]
    backlogs = [tenants + "z" * ("z" not in tenants) for tenants in backlogs]
    counts = served(backlogs, 120, every)
    assert counts["z"] >= max(counts.values()) - 2 * every * len(backlogs)


def test_who_comes_late_has_no_credit_and_who_comes_back_no_debt_forgiven():
    shares = FairShares()
    shares.exchange(0, {"a": 1000}, ["a"])
    shares.exchange(1, {}, ["b"])  # It begins to wait: as far as the one that waits.
    assert shares.counters == {"a": 1000, "b": 1000}
    shares.exchange(1, {"b": 50}, [])
    shares.exchange(0, {"a": 100}, ["a"])
    shares.exchange(1, {}, ["b"])
    assert shares.counters == {"a": 1100, "b": 1100}
    shares.exchange(0, {"a": 500}, [])
    shares.exchange(0, {}, ["a"])
    assert shares.counters == {"a": 1600, "b": 1100}
    shares.keep({0})
    shares.exchange(0, {"a": 1}, ["a", "c"])
    assert shares.counters["c"] == 1601  # `b` waits no more.


def test_every_replica_is_told_what_tenants_were_served_by_all(llama, cluster, monkeypatch):
    """Prompts weigh 1 a token and outputs 2, wherever they were computed."""
    router, replicas = cluster
    params, told = dataclasses.replace(GREEDY, max_tokens=6), Counter()
    exchange = FairShares.exchange

    def counted(shares, replica, served, waiting):
        told.update({(tenant, replica): amount for tenant, amount in served.items()})
        exchange(shares, replica, served, waiting)

    monkeypatch.setattr(FairShares, "exchange", counted)

    async def scenario():
        asked = [(tenant, llama.prompts[n]) for n in (5, 6, 7, 8) for tenant in "ab"]
        expected = {
            tenant: sum(
                len(prompt) + 6 * DECODE_WEIGHT for other, prompt in asked if other == tenant
            )
            for tenant in "ab"
        }
        asking = (
            ask(router, prompt, params, f"fair-{number}", tenant=tenant)
            for number, (tenant, prompt) in enumerate(asked)
        )
        await asyncio.gather(*asking)
        while {tenant: told[tenant, 0] + told[tenant, 1] for tenant in "ab"} != expected:
            await asyncio.sleep(0.02)
        assert {replica for _, replica in told} == {0, 1}
        queues = [each._replica._engine._engine.scheduler.waiting for each in replicas]
        while queues[0]._shared != queues[1]._shared:
            await asyncio.sleep(0.02)

    run(scenario())


def test_a_stopped_replica_keeps_no_other_waiting(cluster, monkeypatch):
    """Long before it is found to be lost."""
    router, replicas = cluster
    exchange, exchanged = FairShares.exchange, []

    def counted(shares, replica, served, waiting):
        exchanged.append(replica)
        exchange(shares, replica, served, waiting)

    async def scenario():
        await all_up(router)
        replicas[1].is_stopped = True
        while 1 in exchanged[-3:] or len(exchanged) < 3:
            await asyncio.sleep(0.02)
        assert replicas[1].is_stopped
        replicas[1].is_stopped = False
        await router._result_of(replicas[1].die())
        await all_up(router)

    monkeypatch.setattr(FairShares, "exchange", counted)
    run(scenario())
