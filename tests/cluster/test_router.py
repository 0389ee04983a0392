"""The router over replicas of this process, which are lost at any moment."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from mortal import GREEDY, SEEDED, Mortal, all_up, ask, held, metric, paced, run
from patience import PATIENCE_S
from tiny_engines import LONGEST

from jaxserve.cluster.replicas import replica_client
from jaxserve.cluster.router import Router
from jaxserve.core.errors import (
    EngineClosedError,
    PromptTooLongError,
    RequestError,
    SnapshotError,
)
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.settings.config import EngineConfig

UNSEEDED = dataclasses.replace(SEEDED, seed=None)


async def asked_all(llama, router, prefix):
    """Six requests at once: greedy, seeded, and seeded by the router."""
    kinds = [(GREEDY, 4), (GREEDY, 8), (SEEDED, 5), (SEEDED, 9), (UNSEEDED, 6), (UNSEEDED, 7)]
    return await asyncio.gather(
        *(ask(router, llama.prompts[index], params, f"{prefix}-{index}") for params, index in kinds)
    )


def test_answers_are_those_of_one_engine(llama, llm, cluster):
    router, _ = cluster
    answers = run(asked_all(llama, router, "one"))
    for (tokens, output), index in zip(answers[:2], (4, 8)):
        assert tokens == list(output.outputs[0].token_ids) == llama.answers[index]
        assert output.request_id == f"one-{index}"
    for (tokens, _), index in zip(answers[2:4], (5, 9)):
        (alone,) = llm.generate(llama.prompts[index], SEEDED, use_tqdm=False)
        assert tokens == list(alone.outputs[0].token_ids)


@pytest.mark.parametrize("ends_after", [1, 7, 20, 33])
def test_a_lost_replica_loses_no_request(llama, cluster, ends_after):
    router, replicas = cluster
    seeded = [answer[0] for answer in run(asked_all(llama, router, "before"))[:4]]

    async def scenario():
        before = await metric(router, "redispatched_requests_total")
        replicas[ends_after % 2].ends_after = ends_after
        answers = await asked_all(llama, router, "lost")
        assert [tokens for tokens, _ in answers[:4]] == seeded
        assert all(tokens == list(output.outputs[0].token_ids) for tokens, output in answers)
        assert all(len(tokens) == LONGEST for tokens, _ in answers)
        await all_up(router)
        if ends_after == 1:  # Later, on a busy machine, its requests may have ended before it.
            assert await metric(router, "redispatched_requests_total") > before
        assert await metric(router, "replica_restarts_total", str(ends_after % 2)) > 0

    run(scenario())


def test_a_busy_replica_takes_the_requests_of_a_lost_one_later(llama, cluster):
    router, replicas = cluster

    async def scenario():
        replicas[0].ends_after, replicas[1].is_busy = 3, 1
        answers = await asked_all(llama, router, "busy")
        assert [tokens for tokens, _ in answers[:2]] == [llama.answers[4], llama.answers[8]]
        assert replicas[1].is_busy == 0
        await all_up(router)

    run(scenario())


def test_a_replica_that_answers_nothing_is_ended_and_its_requests_go_on(
    llama, cluster, monkeypatch
):
    monkeypatch.setattr(replica_client, "SILENT_S", 2)
    router, replicas = cluster

    async def scenario():
        starts = replicas[1].num_starts
        asking = asyncio.create_task(asked_all(llama, router, "silent"))
        while not await held(router, 1):
            await asyncio.sleep(0.01)
        replicas[1].is_stopped = True
        answers = await asking
        assert [tokens for tokens, _ in answers[:2]] == [llama.answers[4], llama.answers[8]]
        await all_up(router)
        assert replicas[1].num_starts == starts + 1
        status = (await router.cluster_status()).replicas[1]
        assert (status.state, status.num_requests) == ("ready", 0) and status.num_losses > 0

    run(scenario())


def test_requests_wait_while_all_replicas_are_lost(llama, cluster):
    router, replicas = cluster

    async def scenario():
        for replica in replicas:
            replica.ends_after = 5
        answers = await asked_all(llama, router, "both")
        assert [tokens for tokens, _ in answers[:2]] == [llama.answers[4], llama.answers[8]]
        await all_up(router)
        assert not router.stalled

    run(scenario())


def test_a_request_that_ends_each_replica_is_given_up(llama, cluster):
    router, replicas = cluster

    async def scenario():
        for replica in replicas:
            replica.ends_with = "deadly"
        innocent = asyncio.ensure_future(ask(router, llama.prompts[4], GREEDY, "innocent"))
        with pytest.raises(EngineClosedError, match="'deadly' was given up after 3"):
            await ask(router, llama.prompts[3], GREEDY, "deadly")
        assert (await innocent)[0] == llama.answers[4]
        await all_up(router)

    run(scenario())


def test_one_refused_prompt_refuses_all(llama, cluster):
    router, _ = cluster

    async def scenario():
        prompts = [llama.prompts[4], [5] * 500]
        with pytest.raises(PromptTooLongError, match="500 tokens"):
            await router.submit(prompts, GREEDY, ["a", "b"])
        async with await router.submit([llama.prompts[4]], GREEDY, ["a"]):
            with pytest.raises(RequestError, match="request_id 'a' is in use"):
                await router.submit([llama.prompts[4]], GREEDY, ["a"])
        while router._pool.requests._open:  # Leaving a stream aborts its request.
            await asyncio.sleep(0.01)
        with pytest.raises(SnapshotError, match="several replicas"):
            await router.snapshot("here")

    run(scenario())


def test_an_aborted_request_ends_with_what_it_has(llama, cluster):
    router, replicas = cluster

    async def scenario():
        params = dataclasses.replace(GREEDY, max_tokens=100)
        async with await router.submit([llama.prompts[2]], params, ["long"]) as updates:
            async for _, update in updates:
                if isinstance(update, RequestOutput):
                    assert update.outputs[0].finish_reason == "abort"
                    assert 0 < len(update.outputs[0].token_ids) < 100
                else:
                    await router.abort("long")

    with paced(replicas, lambda lengths: max(lengths, default=0) < 50):
        run(scenario())


def test_a_prefix_goes_where_it_is_cached(llama, cluster):
    router, _ = cluster

    async def scenario():
        await router.reset_prefix_cache()
        prompt = llama.prompts[-1]
        first = (await ask(router, prompt, GREEDY, "first"))[1]
        async with await router.submit([llama.prompts[7]], GREEDY, ["other"]):
            again = (await ask(router, prompt, GREEDY, "again"))[1]
        assert first.metrics.cached_tokens == 0 < again.metrics.cached_tokens

    run(scenario())


def test_a_replica_that_cannot_be_loaded_again_costs_no_request(llama, caplog):
    """It is tried again in new processes, in the end given up, and with the last one the router."""
    replicas = [Mortal(), Mortal()]
    router = Router(lambda: replicas, EngineConfig.of(model=llama.path, **llama.settings()))

    async def lost(place, loads, prefix):
        replicas[place].ends_after, replicas[place].loads = 1, loads
        return await asked_all(llama, router, prefix)

    async def scenario():
        for prefix, loads in (("a", ["failed"]), ("b", ["other"]), ("c", ["failed"] * 6)):
            answers = await lost(1, loads, prefix)
            assert [tokens for tokens, _ in answers[:2]] == [llama.answers[4], llama.answers[8]]
            while loads:
                await asyncio.sleep(0.05)
            if prefix != "c":
                await all_up(router)
        while "1" in await router.metrics_by_replica():
            await asyncio.sleep(0.05)
        assert router.failure is None
        with pytest.raises(EngineClosedError, match="the device has no memory left"):
            await lost(0, ["failed"] * 6, "d")
        while not router.ended.done():  # None waits for ever.
            with pytest.raises(EngineClosedError):
                await router.submit([llama.prompts[4]], GREEDY, ["late"])

    try:
        run(scenario())
        router.ended.result(PATIENCE_S)
        assert "no memory left" in str(router.failure)
        assert "fingerprint is 'other' in replica 1" in caplog.text
    finally:
        router.close()
