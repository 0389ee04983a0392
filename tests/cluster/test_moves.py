"""Running requests that move between replicas, with their KV: one by one, and by restarts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time

import httpx
import pytest
from mortal import SEEDED, Mortal, all_up, ask, held, metric, paced, run
from patience import PATIENCE_S

from jaxserve.cluster import open_requests, request_moves, staged_copy
from jaxserve.cluster.kept_kv import KeptKV
from jaxserve.cluster.policies.copies import LAST_TOKENS
from jaxserve.cluster.policies.incoming_kv import IncomingKV
from jaxserve.cluster.policies.moves import MAX_MOVES
from jaxserve.cluster.router import Router
from jaxserve.core.cluster_status import RestartStatus
from jaxserve.core.errors import RestartError
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.settings.config import EngineConfig
from jaxserve.server.app import AppSettings, create_app
from jaxserve.server.service import Service


async def streamed(router, prompt, params, name):
    """The tokens of each sample, delta by delta, and the output."""
    tokens, output = [[] for _ in range(params.n)], None
    async with await router.submit([prompt], params, [name]) as updates:
        async for _, update in updates:
            if isinstance(update, RequestOutput):
                output = update
            else:
                for delta in update:
                    tokens[delta.index] += delta.token_ids
    return tokens, output


async def moved(pool):
    """Moves a request that has begun, if there is one, and returns how many have moved."""
    before = pool.requests.num_moved
    for request in pool.requests._open.values():
        if request.routed.begun and request.replica is not None:
            (other,) = (each for each in pool._replicas if each is not request.replica)
            await pool.requests.move(request, other)
            break
    return pool.requests.num_moved - before


async def check_answer(asking, alone, fault):
    """The tokens of an engine alone, or the first of them if the request was ended."""
    tokens, output = await asking
    expected = list(alone.outputs[0].token_ids)
    if fault == "the request ends":
        assert output.outputs[0].finish_reason == "abort"
        expected = expected[: len(tokens)]
    assert tokens == list(output.outputs[0].token_ids) == expected


def in_books(mortal, replica):
    """What a replica and the router still have of a request that has ended, which they are told one
    after the other."""
    engine = mortal._replica._engine._engine
    taken = sum(taken.num_takes for taken in engine.migration._taken)
    pinned = any(node.pins for node in engine.kv.tree)
    staged, used = bool(engine.migration._staged), engine.kv.pool.num_used
    coming = not replica.load.incoming_kv.has_room(1000)
    in_router = coming or replica.load.num_used_pages or replica.requests
    return taken or pinned or staged or used or in_router


def test_a_move_takes_the_kv_along(llama, llm, cluster):
    """Back and forth for as long as it runs: no prompt is computed twice, no token sent twice."""
    router, replicas = cluster
    prompt, params = llama.prompts[10], dataclasses.replace(SEEDED, max_tokens=60)
    (alone,) = llm.generate(prompt, params, use_tqdm=False)

    async def computed():
        return sum([await metric(router, "prefill_tokens_total", number) for number in "01"])

    async def scenario():
        await router.reset_prefix_cache()
        before, num_moved = await computed(), 0
        asking = asyncio.create_task(ask(router, prompt, params, "move"))
        while not asking.done():
            num_moved += await router._result_of(moved(router._pool))
            await asyncio.sleep(0.002)
        tokens, output = await asking
        assert tokens == list(output.outputs[0].token_ids) == list(alone.outputs[0].token_ids)
        assert output.metrics.cached_tokens == 0  # as where it was dispatched to
        # Of a move, what came while KV was copied, and perhaps the last token before.
        assert await computed() - before <= len(prompt) + len(tokens) + num_moved
        assert num_moved * len(prompt) > len(tokens) + num_moved  # To compute it again is more.

    requests = router._pool.requests
    num_before = requests.num_moved
    with paced(
        replicas,
        lambda lengths: max(lengths, default=0) < 15 * (requests.num_moved - num_before + 1),
    ):
        run(scenario())


FAULTS = (
    "the source dies",
    "the destination dies",
    "the copy hangs",
    "a part is damaged",
    "the request ends",
    "the destination has no room",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_move_that_fails_costs_no_token(llama, llm, cluster, fault, monkeypatch):
    monkeypatch.setattr(staged_copy, "COPY_S", 0.2 if fault.endswith("hangs") else PATIENCE_S)
    router, replicas = cluster
    pool, params = router._pool, dataclasses.replace(SEEDED, max_tokens=60)
    (alone,) = llm.generate(llama.prompts[8], params, use_tqdm=False)
    tried = threading.Event()

    async def scenario():
        await all_up(router)
        asking = asyncio.create_task(ask(router, llama.prompts[8], params, "stays"))
        while not (source := [place for place in (0, 1) if await held(router, place)]):
            await asyncio.sleep(0)
        for place, replica in enumerate(replicas):
            replica.at_move = fault if (place in source) == ("source" in fault) else ""
        num_moved = 0
        while any(replica.at_move for replica in replicas) and not asking.done():
            if fault == "the request ends":
                await router.abort("stays")
                replicas[0].at_move = replicas[1].at_move = ""
            num_moved += await router._result_of(moved(pool))
        tried.set()
        # Without room for its KV it moves as a request of a lost replica does.
        assert num_moved == fault.endswith("no room")
        await check_answer(asking, alone, fault)
        assert not any(replica.at_move for replica in replicas)
        await all_up(router)
        assert [replica.load.num_moving for replica in pool._replicas] == [0, 0]
        while any(map(in_books, replicas, pool._replicas)):
            await asyncio.sleep(0.002)

    with paced(replicas, lambda lengths: max(lengths, default=0) < 20 or tried.is_set()):
        run(scenario())


def test_few_moves_are_begun_at_a_time(llama, cluster, monkeypatch):
    """One from a replica that is full, and more from one that drains."""
    router, replicas = cluster
    pool, num_sent, told = router._pool, MAX_MOVES + 2, threading.Event()

    async def begun():
        source, destination = pool._replicas
        while not all(request.accepted for request in source.requests.values()):
            await asyncio.sleep(0.002)
        room, source.immovable = destination.load.max_num_seqs, False
        destination.load.max_num_seqs = num_sent
        request_moves.move_once(pool._replicas, pool.requests)
        counts = [source.load.num_moving]
        source.load.draining = True
        request_moves.move_once(pool._replicas, pool.requests)
        counts.append(source.load.num_moving)
        source.load.draining, destination.load.max_num_seqs = False, room
        return counts, sum(request.moving for request in source.requests.values())

    async def scenario():
        await all_up(router)
        pool._replicas[0].immovable = True
        monkeypatch.setattr(open_requests, "dispatch", lambda loads, demand: 0)
        names = [f"few-{number}" for number in range(num_sent)]
        prompts = [[3 + number] for number in range(num_sent)]
        async with await router.submit(prompts, SEEDED, names) as updates:
            assert await router._result_of(begun()) == ([1, MAX_MOVES], MAX_MOVES)
            told.set()
            async for _ in updates:
                pass
        assert [each.load.num_moving for each in pool._replicas] == [0, 0]

    with paced(replicas, lambda lengths: max(lengths, default=0) < 10 or told.is_set()):
        run(scenario())


def test_one_comes_after_the_other_where_memory_is_short(llama, llm, cluster, monkeypatch):
    router, replicas = cluster
    pool, params = router._pool, dataclasses.replace(SEEDED, max_tokens=60)
    prompts, num_coming, seen, told = llama.prompts[5:7], 0, [], threading.Event()
    expected = [llm.generate(each, params, use_tqdm=False)[0] for each in prompts]

    async def stage_in(*arguments):
        nonlocal num_coming
        num_coming += 1
        seen.append(num_coming)
        try:
            return await replicas[0]._replica.stage_in(*arguments)
        finally:
            num_coming -= 1

    async def moved_both():
        source, destination = pool._replicas
        while not all(request.routed.begun for request in source.requests.values()):
            await asyncio.sleep(0.002)
        destination.load.incoming_kv = IncomingKV(0)
        requests = tuple(source.requests.values())
        moves = [pool.requests.move(request, destination) for request in requests]
        await asyncio.gather(*moves)
        destination.load.incoming_kv = IncomingKV(destination.load.num_pages)
        return len(requests)

    async def scenario():
        await all_up(router)
        monkeypatch.setattr(open_requests, "dispatch", lambda loads, demand: 0)
        asking = [
            asyncio.create_task(ask(router, prompt, params, f"both-{number}"))
            for number, prompt in enumerate(prompts)
        ]
        while await held(router, 0) < 2:
            await asyncio.sleep(0)
        before = pool.requests.num_moved
        assert await router._result_of(moved_both()) == 2
        told.set()
        assert pool.requests.num_moved - before == 2
        for alone, (tokens, _) in zip(expected, await asyncio.gather(*asking)):
            assert tokens == list(alone.outputs[0].token_ids)

    def may_step(lengths):
        return told.is_set() or (len(lengths) == 2 and max(lengths) < 20)

    replicas[0].stage_in = stage_in
    try:
        with paced(replicas[:1], may_step):
            run(scenario())
    finally:
        del replicas[0].stage_in
    assert len(seen) >= 2 and set(seen) == {1}


@pytest.mark.parametrize("how", ["abort", "disconnect", "drain"])
def test_a_wait_for_room_ends_with_its_request(llama, cluster, how, monkeypatch):
    """Or once its destination drains, and gives back what it had booked, while other KV still takes
    all the room. Its replica makes no step meanwhile, so that it ends by no other reason."""
    router, _ = cluster
    pool, params = router._pool, dataclasses.replace(SEEDED, max_tokens=60)

    def no_step():
        time.sleep(0.002)
        return []

    async def waiting():
        while not any(request.routed.begun for request in pool.requests._open.values()):
            await asyncio.sleep(0)
        (request,) = pool.requests._open.values()
        engine = request.replica.client._replica._engine._engine
        monkeypatch.setattr(engine, "step", no_step)
        (other,) = (each for each in pool._replicas if each is not request.replica)
        other.load.incoming_kv.enter("other KV", other.load.num_pages, lambda: None)
        move = pool.requests.move(request, other)
        while not other.load.incoming_kv._waiting:
            assert not move.done()
            await asyncio.sleep(0)
        return move, other

    async def given_back(move, other):
        await asyncio.wait_for(move, PATIENCE_S)
        booked = [*other.load.incoming_kv._waiting, *other.load.demands]
        other.load.incoming_kv.leave("other KV")
        return booked

    async def drained(move, other):
        (request,) = pool.requests._open.values()
        other.enter("draining")
        booked = await given_back(move, other)
        assert request.replica not in (None, other) and not request.moving
        other.enter("ready")
        return booked

    async def scenario():
        await all_up(router)
        async with await router.submit([llama.prompts[8]], params, ["waits"]) as updates:
            move, other = await router._result_of(waiting())
            if how == "abort":
                await router.abort("waits")
                output = [update async for _, update in updates][-1]
                assert output.outputs[0].finish_reason == "abort"
            elif how == "drain":
                assert await router._result_of(drained(move, other)) == []
        if how != "drain":
            assert await router._result_of(given_back(move, other)) == []

    run(scenario())


@pytest.mark.parametrize("how", ["abort", "drain"])
def test_a_stage_that_hangs_ends_with_its_request(llama, llm, cluster, how):
    """Or once its destination drains: then the request runs on where it is."""
    router, replicas = cluster
    pool, params = router._pool, dataclasses.replace(SEEDED, max_tokens=60)
    (alone,) = llm.generate(llama.prompts[8], params, use_tqdm=False)

    async def ended():
        while not any(request.routed.begun for request in pool.requests._open.values()):
            await asyncio.sleep(0)
        (request,) = pool.requests._open.values()
        (other,) = (each for each in pool._replicas if each is not request.replica)
        replicas[other.index].at_move = "the copy hangs"
        move = pool.requests.move(request, other)
        while replicas[other.index].at_move:
            await asyncio.sleep(0)
        if how == "abort":
            pool.requests.abort("hangs")
        else:
            other.enter("draining")
        await asyncio.wait_for(move, 60)
        if how == "drain":
            other.enter("ready")
        assert not request.moving and other.load.incoming_kv.has_room(1000)
        assert not other.load.demands

    async def scenario():
        await all_up(router)
        moved = pool.requests.num_moved
        asking = asyncio.create_task(ask(router, llama.prompts[8], params, "hangs"))
        await router._result_of(ended())
        await check_answer(asking, alone, "the request ends" if how == "abort" else "")
        assert pool.requests.num_moved == moved
        while any(map(in_books, replicas, pool._replicas)):
            await asyncio.sleep(0.002)

    run(scenario())


def test_a_stage_brings_no_more_than_it_has_booked(llama, llm, cluster):
    """Its request generates pages of tokens while the stage waits for room."""
    router, replicas = cluster
    pool, page_size = router._pool, router.info.config.page_size
    params, stages = dataclasses.replace(SEEDED, max_tokens=60), []
    (alone,) = llm.generate(llama.prompts[8], params, use_tqdm=False)

    def num_pages(parts):
        named = (part.partition(b"\n") for part in parts)
        (listed,) = (json.loads(data) for name, _, data in named if name.startswith(b"kv.json"))
        return len({row for prefix in listed["prefixes"] for row in prefix["rows"]})

    async def waited():
        while not any(request.routed.begun for request in pool.requests._open.values()):
            await asyncio.sleep(0)
        (request,) = pool.requests._open.values()
        (other,) = (each for each in pool._replicas if each is not request.replica)
        destination = replicas[other.index]

        async def stage_request(parts, name):
            stages.append((other.load.incoming_kv.num_pages, num_pages(parts)))
            return await destination._replica.stage_request(parts, name)

        destination.stage_request = stage_request
        incoming, num_tokens = other.load.incoming_kv, request.routed.num_tokens
        incoming.enter("other KV", other.load.num_pages, lambda: None)
        move = pool.requests.move(request, other)
        while request.routed.num_tokens < num_tokens + 2 * page_size:
            await asyncio.sleep(0.002)
        incoming.leave("other KV")
        await asyncio.wait_for(move, 60)
        del destination.stage_request

    async def scenario():
        await all_up(router)
        asking = asyncio.create_task(ask(router, llama.prompts[8], params, "books"))
        await router._result_of(waited())
        await check_answer(asking, alone, "")
        assert stages and all(brought <= booked for booked, brought in stages)
        assert stages[0][0] == stages[0][1]

    run(scenario())


def test_kept_kv_is_taken_and_staged_in_pieces(llama, cluster, monkeypatch):
    """And none beyond what it may take of memory."""
    router, replicas = cluster
    pool, prompt = router._pool, llama.prompts[8]
    params = dataclasses.replace(SEEDED, max_tokens=60)

    def no_step():
        time.sleep(0.002)
        return []

    async def kept(room):
        """How many tokens are staged elsewhere, and the KV with its pieces' pages."""
        (request,) = pool.requests._open.values()
        source = request.replica
        (other,) = (each for each in pool._replicas if each is not source)
        found = KeptKV(request)
        monkeypatch.setattr(source.load.incoming_kv, "max_pages", 2)
        await found.take(source, request.sent_as, room)
        pages = [num_pages for num_pages, _ in found._pieces]
        num_staged = await found.stage(other, f"kept-{room}")
        await other.client.unstage_request(f"kept-{room}")
        await other.client.reset_prefix_cache()
        assert not found._pieces and other.load.incoming_kv.has_room(1000)
        return num_staged, found, pages

    async def scenario():
        await all_up(router)
        async with await router.submit([prompt], params, ["kept"]) as updates:
            await anext(aiter(updates))
            for replica in replicas:
                monkeypatch.setattr(replica._replica._engine._engine, "step", no_step)
            whole, all_kv, pages = await router._result_of(kept(1 << 30))
            some, some_kv, fewer = await router._result_of(kept(all_kv.num_bytes // 2))
            none, none_kv, _ = await router._result_of(kept(0))
        assert whole >= len(prompt) and not all_kv.cut
        assert len(pages) > 2 and max(pages) == 2
        assert 0 < some < whole and some_kv.cut and len(fewer) < len(pages)
        assert 0 < some_kv.num_bytes <= all_kv.num_bytes // 2
        assert (none, none_kv.cut, none_kv.num_bytes) == (0, True, 0)

    run(scenario())


def test_a_rolling_restart_loses_no_request(llama, llm, cluster, monkeypatch):
    router, replicas = cluster
    params = dataclasses.replace(SEEDED, max_tokens=60, n=2)
    prompts = [llama.prompts[index] for index in (5, 6)]  # Each replica has room for both.
    period_s = request_moves.MOVE_PERIOD_S
    monkeypatch.setattr(request_moves, "MOVE_PERIOD_S", 0.002)
    expected = [llm.generate(each, params, use_tqdm=False)[0] for each in prompts]

    async def scenario():
        await asyncio.sleep(period_s)  # From then on moves are planned more often.
        starts = [replica.num_starts for replica in replicas]
        moved = await metric(router, "moved_requests_total")
        asking = [
            asyncio.create_task(streamed(router, prompt, params, f"move-{place}"))
            for place, prompt in enumerate(prompts)
        ]
        while sum([await held(router, place) for place in (0, 1)]) < 2:
            await asyncio.sleep(0)
        await router.restart_replicas()
        with pytest.raises(RestartError, match="is going on"):
            await router.restart_replicas()
        for alone, (tokens, output) in zip(expected, await asyncio.gather(*asking)):
            assert tokens == [list(each.token_ids) for each in output.outputs]
            assert tokens == [list(each.token_ids) for each in alone.outputs]
        while (status := await router.cluster_status()).restart.running:
            await asyncio.sleep(0.02)
        assert status.restart == RestartStatus(False, 2, 2)
        assert [each.state for each in status.replicas] == ["ready", "ready"]
        assert [replica.num_starts for replica in replicas] == [each + 1 for each in starts]
        assert await metric(router, "moved_requests_total") > moved

    requests = router._pool.requests
    num_before = requests.num_moved

    def may_step(lengths):
        return max(lengths, default=0) < 20 or requests.num_moved > num_before

    with paced(replicas, may_step):
        run(scenario())


@pytest.fixture(scope="module")
def apart(llama):
    """A replica that prefills, and one that decodes."""
    replicas = [Mortal(), Mortal()]
    config = EngineConfig.of(model=llama.path, **llama.settings())
    router = Router(lambda: replicas, config, num_prefill=1)
    yield router, replicas
    router.close()


def in_steps(replica, router, length, may_step):
    """Has the steps of a replica that computes a prompt of this length wait until `may_step`, given
    how many tokens have their KV and how many of them were copied; returns the list of the numbers
    of tokens before each step."""
    engine, copies = replica._replica._engine._engine, router._pool.requests.copies
    step, written, before = engine.step, [], copies.copied

    def step_when_copied():
        requests = list(engine._requests.values())
        computed = requests[0].unfinished[0].seq.num_written if requests else 0
        if computed < length and not may_step(computed, copies.copied - before):
            time.sleep(0.002)
            return []
        written.append(computed)
        return step()

    engine.step = step_when_copied
    return written


@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_that_fails_while_the_prompt_is_computed(llama, llm, apart, fault, monkeypatch):
    """After its first pages came, and before all of the prompt is computed."""
    monkeypatch.setattr(staged_copy, "COPY_S", 0.2 if fault.endswith("hangs") else PATIENCE_S)
    router, replicas = apart
    prompt, params = llama.prompts[11], dataclasses.replace(SEEDED, max_tokens=20)
    (alone,) = llm.generate(prompt, params, use_tqdm=False)

    async def scenario():
        await all_up(router)
        await router.reset_prefix_cache()
        victim, first = replicas["source" not in fault], []

        def may_step(computed, copied):
            if not first and copied:  # Then the second chunk's copy fails.
                first.append(computed)
                victim.at_move = "" if fault == "the request ends" else fault
            if first:
                return computed == first[0] or not victim.at_move
            return not computed

        in_steps(replicas[0], router, len(prompt), may_step)
        asking = asyncio.create_task(ask(router, prompt, params, "stays"))
        while not first:
            await asyncio.sleep(0)
        if fault == "the request ends":
            await router.abort("stays")
        await check_answer(asking, alone, fault)
        assert not victim.at_move and 0 < first[0] < len(prompt)
        await all_up(router)
        while any(map(in_books, replicas, router._pool._replicas)):
            await asyncio.sleep(0.002)

    try:
        run(scenario())
    finally:
        for replica in replicas:
            vars(replica._replica._engine._engine).pop("step", None)


def test_prefill_and_decode_apart(llama, llm, apart):
    """Each prompt is computed by one replica, and all tokens but its first by the other."""
    router, replicas = apart
    params = dataclasses.replace(SEEDED, max_tokens=60)
    prompts = [llama.prompts[index] for index in (7, 8, 9)]

    async def scenario():
        await all_up(router)
        await router.reset_prefix_cache()
        num_moved = await metric(router, "moved_requests_total")
        before = [await numbers(0), await numbers(1)]

        async def gained(place):
            found = await numbers(place)
            return {name: found[name] - before[place][name] for name in found}

        for place, prompt in enumerate(prompts):
            (alone,) = llm.generate(prompt, params, use_tqdm=False)
            with paced(replicas[:1], lambda lengths: max(lengths, default=0) < 4):
                tokens, _ = await ask(router, prompt, params, f"apart-{place}")
            assert tokens == list(alone.outputs[0].token_ids)
        of_prefill, of_decode = await gained(0), await gained(1)
        assert await metric(router, "moved_requests_total") - num_moved == len(prompts)
        assert of_prefill["prefill"] == sum(map(len, prompts)) > of_decode["prefill"]
        assert of_decode["generation"] > of_prefill["generation"]
        replicas[1].ends_after = 2  # The other decodes alone until it is back.
        tokens, _ = await ask(router, prompts[0], params, "alone")
        assert len(tokens) == 60
        roles = [each.role for each in (await router.cluster_status()).replicas]
        assert roles == ["prefill", "decode"]

    async def numbers(place):
        metrics = (await router.metrics_by_replica())[str(place)]
        generated = metrics["vllm:generation_tokens_total"].value
        prefilled = await metric(router, "prefill_tokens_total", str(place))
        return {"prefill": prefilled, "generation": generated}

    async def with_slow_chunks():
        """A prompt of several chunks, each of which begins once the pages before are copied."""
        prompt, page_size = llama.prompts[11], router.info.config.page_size
        (alone,) = llm.generate(prompt, params, use_tqdm=False)
        await all_up(router)
        await router.reset_prefix_cache()
        copies, of_source = router._pool.requests.copies, (await numbers(0))["generation"]
        before, stages = dataclasses.replace(copies), []

        async def stage_in(destination, request_id, name, start, stop):
            booked = router._pool._replicas[1].load.incoming_kv.num_pages
            num_staged = await replicas[0]._replica.stage_in(
                destination, request_id, name, start, stop
            )
            stages.append((booked, -(-num_staged // page_size) - start // page_size, num_staged))
            return num_staged

        replicas[0].stage_in = stage_in
        written = in_steps(
            replicas[0],
            router,
            len(prompt),
            lambda computed, copied: computed - computed % page_size <= copied,
        )
        tokens, _ = await ask(router, prompt, params, "long")
        del replicas[0].stage_in
        assert tokens == list(alone.outputs[0].token_ids)
        of_prompt = [booked == brought for booked, brought, stop in stages if stop < len(prompt)]
        assert len(of_prompt) > 1 and all(of_prompt)  # A stage books what it brings.
        last = max(each for each in written if each < len(prompt))
        last -= last % page_size
        during = copies.during_prefill - before.during_prefill
        assert during == last > 0
        # Then those of the last chunk, and of what the source generated meanwhile.
        generated = (await numbers(0))["generation"] - of_source
        after = copies.copied - before.copied - during
        assert len(prompt) - last <= after <= len(prompt) - last + generated
        assert copies.left - before.left <= LAST_TOKENS

    run(scenario())
    run(with_slow_chunks())


def test_the_routes(cluster):
    """A second restart is refused while the first goes on, and all of a server of several keys."""
    router, _ = cluster

    async def asked(keys, scenario):
        service = Service(["tiny"], max_queued_requests=8)
        app = create_app(service, AppSettings(keys, 1 << 20, False, has_replicas=True))
        transport, headers = httpx.ASGITransport(app), {"X-Api-Key": "a"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://here", headers=headers
        ) as client:
            await scenario(client, service)

    async def restarted(client, service):
        for method, path in (("GET", "/cluster/status"), ("POST", "/cluster/restart")):
            assert (await client.request(method, path)).status_code == 503
        await service.begin(router, None)
        answer = await client.post("/cluster/restart")
        assert answer.status_code == 200 and answer.json()["restart"]["running"]
        answer = await client.post("/cluster/restart")
        assert answer.status_code == 409
        assert "a rolling restart is going on" in answer.json()["error"]["message"]
        while (found := (await client.get("/cluster/status")).json())["restart"]["running"]:
            await asyncio.sleep(0.02)
        assert [each["state"] for each in found["replicas"]] == ["ready", "ready"]
        for body, status, told in (
            ({"replica": 0, "tensor_parallel_size": 1}, 400, "has these sizes"),
            ({"replica": 0, "tensor_parallel_size": 64}, 400, "take 64 devices"),
            ({"replica": 7, "tensor_parallel_size": 2}, 409, "replica 7 is not one of those"),
        ):
            answer = await client.post("/cluster/resize", json=body)
            assert (answer.status_code, told in answer.json()["error"]["message"]) == (status, True)

    async def refused(client, service):
        await service.begin(router, None)
        assert (await client.post("/cluster/restart")).status_code == 403
        resize = await client.post("/cluster/resize", json={"replica": 0})
        assert resize.status_code == 403
        assert (await client.get("/cluster/status")).status_code == 200

    run(asked((), restarted))
    run(asked(("a", "b"), refused))
