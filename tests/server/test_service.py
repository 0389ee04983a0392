"""The engine as routes see it: ids given twice, and requests taken up from a snapshot."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from jaxserve.async_engine import AsyncEngine
from jaxserve.server.app import AppSettings, create_app
from jaxserve.server.service import Service

PATH = "/v1/completions"
BODY = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
HEADERS = {"x-request-id": "mine"}


def run(llama, scenario, snapshot=None) -> None:
    """A scenario with a client of a service whose engine may take up a snapshot."""

    async def with_client():
        service = Service(["tiny"], max_queued_requests=8)
        app = create_app(service, AppSettings((), 1 << 20, log_requests=False))
        engine = await asyncio.to_thread(AsyncEngine.load, llama.path, **llama.settings())
        try:
            await service.begin(engine, snapshot)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                await scenario(client, service, engine)
            assert service.num_sequences == 0 and not service._running
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(asyncio.wait_for(with_client(), 120))


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
def test_what_a_snapshot_has_not_is_done_anew(llama, half_done, stream):
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
