"""The engine as routes see it: ids given twice, and requests taken up from a snapshot."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest
from patience import PATIENCE_S

from jaxserve.async_engine import AsyncEngine
from jaxserve.server.app import AppSettings, create_app
from jaxserve.server.http.middleware import tenant_of
from jaxserve.server.service import ClientPolicy, Service

PATH = "/v1/completions"
BODY = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
HEADERS = {"x-request-id": "mine"}


def run(llama, scenario, snapshot=None, keys=(), policy=None) -> None:
    """A scenario with a client of a service whose engine may take up a snapshot."""

    async def with_client():
        service = Service(["tiny"], max_queued_requests=8, policy=policy or ClientPolicy())
        app = create_app(service, AppSettings(keys, 1 << 20, log_requests=False))
        engine = await asyncio.to_thread(AsyncEngine.load, llama.path, **llama.settings())
        try:
            await service.begin(engine, snapshot)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                await scenario(client, service, engine)
            assert service.num_sequences == 0 and not service._running
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(asyncio.wait_for(with_client(), PATIENCE_S))


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_requests_of_one_id_are_all_served(llama):
    async def scenario(client, service, engine):
        posts = (client.post(PATH, json=BODY, headers=HEADERS) for _ in range(3))
        responses = await asyncio.gather(*posts)
        assert {answer.headers["x-request-id"] for answer in responses} == {"mine"}
        assert texts(responses[0]) == texts(responses[1]) == texts(responses[2])

    run(llama, scenario)


def test_an_answer_that_ends_while_the_server_drains_tells_the_load(llama):
    async def scenario(client, service, engine):
        header = {"endpoint-load-metrics-format": "TEXT"}
        asked = asyncio.create_task(client.post(PATH, json=BODY, headers=header))
        while not service.num_sequences:
            await asyncio.sleep(0)
        assert await service.drain(PATIENCE_S)
        answer = await asked
        assert len(texts(answer)) == 2
        assert answer.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.")

    run(llama, scenario)


@pytest.fixture
def half_done(llama, tmp_path):
    """A snapshot of BODY's second prompt, and what both come to."""
    wanted = []

    async def scenario(client, service, engine):
        wanted.extend(texts(await client.post(PATH, json=BODY)))
        params = engine.default_sampling_params(max_tokens=40, ignore_eos=True, temperature=0)
        async with await engine.submit([BODY["prompt"][1]], params, ["mine-1"]) as updates:
            await updates.__aiter__().__anext__()
            await engine.snapshot(tmp_path)

    run(llama, scenario)
    return tmp_path, wanted


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_missing_from_a_snapshot_run_from_the_start(llama, half_done, stream):
    """One of two prompts had ended, and its output went with the server."""
    snapshot, wanted = half_done

    async def scenario(client, service, engine):
        for fields, says in (
            ({"logprobs": 1}, "logprobs is 1, but request_id 'mine-1' had None"),
            ({"prompt": [[5, 6, 7], [8]]}, "another prompt"),
        ):
            other = await client.post(PATH, json=BODY | fields, headers=HEADERS)
            assert other.status_code == 400 and says in other.json()["error"]["message"]
        assert service.holds_unclaimed
        answer = await client.post(PATH, json=BODY | {"stream": stream}, headers=HEADERS)
        if not stream:
            assert texts(answer) == wanted
        else:
            *events, done = [line for line in answer.text.split("\n\n") if line]
            assert done == "data: [DONE]"
            choices = [json.loads(event[6:])["choices"][0] for event in events]
            assert [choice["text"] for choice in choices] == wanted
        assert not service.holds_unclaimed

    run(llama, scenario, snapshot)


KEYS = ("one", "two")


def of_key(key: str) -> dict[str, str]:
    return HEADERS | {"authorization": f"Bearer {key}"}


def test_a_restored_request_is_resumed_by_its_own_api_key_only(llama, tmp_path):
    body = BODY | {"prompt": [8, 9]}

    async def saved(client, service, engine):
        params = engine.default_sampling_params(max_tokens=40, ignore_eos=True, temperature=0)
        submitted = engine.submit([[8, 9]], params, ["mine"], tenant=tenant_of("one"))
        async with await submitted as updates:
            await updates.__aiter__().__anext__()
            await engine.snapshot(tmp_path)

    async def scenario(client, service, engine):
        for fields in ({}, {"prompt": [1, 2]}):  # No answer tells that there is such a request.
            other = await client.post(PATH, json=body | fields, headers=of_key("two"))
            assert other.status_code == 200 and other.headers["x-request-id"] == "mine"
            assert service.holds_unclaimed
        own = await client.post(PATH, json=body, headers=of_key("one"))
        assert own.status_code == 200 and not service.holds_unclaimed

    run(llama, saved, keys=KEYS)
    run(llama, scenario, tmp_path, keys=KEYS)


@pytest.mark.parametrize("hide", [False, True])
def test_what_one_api_key_caches_no_other_is_told_of(llama, hide):
    body = BODY | {"prompt": [list(range(5, 30))], "max_tokens": 2}

    async def scenario(client, service, engine):
        async def cached(key, **fields):
            answer = (await client.post(PATH, json=body | fields, headers=of_key(key))).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await cached("one") == 0
        assert await cached("two") == 0
        for key in KEYS:
            assert await cached(key) == (0 if hide else 24)
        assert await cached("one", cache_salt="another") == 0

    run(llama, scenario, keys=KEYS, policy=ClientPolicy(hide_cached_tokens=hide))


def test_priorities_are_bounded(llama):
    async def scenario(client, service, engine):
        for priority, status in ((-1, 400), (0, 200), (5, 200)):
            body = BODY | {"max_tokens": 1, "priority": priority}
            answer = await client.post(PATH, json=body)
            assert answer.status_code == status
            if status == 400:
                error = answer.json()["error"]
                assert error["param"] == "priority" and "must be 0 or more" in error["message"]

    run(llama, scenario, policy=ClientPolicy(min_priority=0))


def test_errors_of_the_engine_name_what_the_client_sent(llama):
    async def scenario(client, service, engine):
        for fields, param in (
            ({"guided_json": {"type": "objekt"}}, "guided_json"),
            ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
            ({"vllm_xargs": {"unknown": 1}}, "vllm_xargs"),
        ):
            for stream in (False, True):
                answer = await client.post(PATH, json=BODY | fields | {"stream": stream})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param)
                assert error["message"].startswith(param)

    run(llama, scenario)


def test_a_client_that_hangs_up_leaves_the_thread_queue(llama, monkeypatch):
    """What has begun cannot be stopped; what waits is dropped."""
    body = json.dumps(BODY | {"prompt": "text"}).encode()
    scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode()}
    scope |= {"query_string": b"", "client": None, "headers": []}
    scope["headers"].append((b"content-type", b"application/json"))

    async def scenario(client, service, engine):
        go_on, hung_up = threading.Event(), asyncio.Event()
        tokenizer = engine.get_tokenizer()
        encode = tokenizer.encode
        begun = []

        def slow(*arguments, **options):
            begun.append(arguments)
            go_on.wait(PATIENCE_S)
            return encode(*arguments, **options)

        monkeypatch.setattr(tokenizer, "encode", slow)
        app = client._transport.app

        async def post():
            sent = [{"type": "http.request", "body": body}]

            async def receive():
                if sent:
                    return sent.pop()
                await hung_up.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            await app(dict(scope), receive, send)

        statuses: list[int] = []
        posts = [asyncio.create_task(post()) for _ in range(7)]
        while len(begun) < 4:
            await asyncio.sleep(0.01)
        hung_up.set()
        await asyncio.wait_for(asyncio.gather(*posts), PATIENCE_S)
        assert statuses == [499] * 7
        assert service.preparing
        go_on.set()
        while service.preparing:
            await asyncio.sleep(0.01)
        assert len(begun) == 4
        assert "vllm:prompt_tokens_total" in (await client.get("/metrics")).text
        assert engine.get_metrics()["vllm:prompt_tokens_total"].value == 0

    run(llama, scenario)


BEAMS = {"prompt": [5, 6, 7], "use_beam_search": True, "max_tokens": 40, "ignore_eos": True}


def test_a_beam_search_that_a_shutdown_ends_may_be_sent_elsewhere(llama):
    async def scenario(client, service, engine):
        asked = asyncio.create_task(client.post(PATH, json=BEAMS | {"n": 2}))
        while not service.num_sequences:
            await asyncio.sleep(0)
        await service.abort_all()
        answer = await asked
        assert answer.status_code == 503, answer.text
        assert answer.headers["retry-after"]

    run(llama, scenario)


def test_a_beam_search_reports_as_many_logprobs_as_are_asked_for(llama):
    """More of them than continue a beam, which changes no beam."""

    async def scenario(client, service, engine):
        body = BEAMS | {"n": 2, "max_tokens": 6, "return_token_ids": True}
        plain = (await client.post(PATH, json=body)).json()["choices"]
        more = {"logprobs": 9, "return_tokens_as_token_ids": True}
        scored = (await client.post(PATH, json=body | more)).json()["choices"]
        assert [c["token_ids"] for c in scored] == [c["token_ids"] for c in plain]
        for choice in scored:
            assert all(len(top) in (9, 10) for top in choice["logprobs"]["top_logprobs"])

    run(llama, scenario)
