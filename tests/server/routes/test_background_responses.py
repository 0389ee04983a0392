"""Responses in the background: polled, cancelled, deleted, and drained with the others."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import time

import pytest
from test_service import run
from test_stored_responses import MORE, PATH, ask, of_key
from tiny_engines import TinyModel

from jaxserve.protocol.errors import FieldError
from jaxserve.protocol.responses_api.request import LOGPROBS, ResponsesRequest
from jaxserve.protocol.responses_api.stored import StoredResponse
from jaxserve.server.background import BackgroundResponses
from jaxserve.server.response_store import ResponseStore


def without_steps(scenario):
    """A scenario in which the engine takes requests and ends those that are aborted, and none gains
    a token, however long a client takes to its next request."""

    def step() -> list:
        time.sleep(0.001)
        return []

    async def held(client, service, engine):
        engine._engine.step = step
        await scenario(client, service, engine)

    return held


@pytest.fixture(scope="module")
def chatty(chat_model):
    return TinyModel.open(chat_model)


async def ended(client, response, **more) -> dict:
    """The response once it has ended."""
    while response["status"] in ("queued", "in_progress"):
        assert response["output"] == [] and response["usage"] is None
        await asyncio.sleep(0.01)
        answer = await client.get(f"{PATH}/{response['id']}", **more)
        assert answer.status_code == 200, answer.text
        response = answer.json()
    return response


def test_a_response_is_polled_for(chatty):
    """It is the one of a request that waits, and a conversation goes on from it."""

    async def scenario(client, service, engine):
        queued = await ask(client, "Hi", background=True)
        assert queued["status"] == "queued" and queued["background"] is True
        response = await ended(client, queued)
        waited = await ask(client, "Hi")
        assert response["status"] == waited["status"] == "incomplete"
        texts = [each["output"][0]["content"][0]["text"] for each in (response, waited)]
        assert texts[0] == texts[1]
        assert response["usage"]["output_tokens"] == MORE["max_output_tokens"]
        items = (await client.get(f"{PATH}/{response['id']}/input_items")).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["Hi"]
        more = [
            await ask(client, "And?", previous_response_id=each["id"])
            for each in (response, waited)
        ]
        assert more[0]["usage"]["input_tokens"] == more[1]["usage"]["input_tokens"]
        finished = (await client.post(f"{PATH}/{response['id']}/cancel")).json()
        assert finished == response

    run(chatty, scenario)


def test_a_response_is_cancelled(chatty):
    """Its place in the engine is free at once."""

    async def scenario(client, service, engine):
        queued = await ask(client, "Hi", background=True)
        path = f"{PATH}/{queued['id']}"
        assert service.num_sequences == 1
        early = await client.post(PATH, json={"input": "a", "previous_response_id": queued["id"]})
        assert early.status_code == 400 and "not complete" in early.text
        for _ in range(2):
            answer = await client.post(f"{path}/cancel")
            assert answer.status_code == 200 and answer.json()["status"] == "cancelled"
            assert service.num_sequences == 0
        assert (await client.get(path)).json() == answer.json()
        queued = await ask(client, "Hi", background=True)
        path = f"{PATH}/{queued['id']}"
        assert service.num_sequences == 1
        assert (await client.delete(path)).status_code == 200
        assert service.num_sequences == 0
        assert (await client.get(path)).status_code == 404

    run(chatty, without_steps(scenario))


def test_a_key_has_its_own(chatty):
    async def scenario(client, service, engine):
        mine, other = {"headers": of_key("one")}, {"headers": of_key("two")}
        body = MORE | {"input": "Hi", "background": True}
        queued = (await client.post(PATH, json=body, **mine)).json()
        path = f"{PATH}/{queued['id']}"
        assert (await client.post(f"{path}/cancel", **other)).status_code == 404
        assert (await client.delete(path, **other)).status_code == 404
        assert service.num_sequences == 1
        assert (await client.post(f"{path}/cancel", **mine)).json()["status"] == "cancelled"

    run(chatty, without_steps(scenario), keys=("one", "two"))


def test_what_cannot_be_in_the_background_is_refused(chatty):
    async def scenario(client, service, engine):
        for fields, says in (
            ({"store": False}, "can only be used when `store` is true"),
            ({"stream": True}, "poll GET"),
        ):
            body = MORE | {"input": "Hi", "background": True} | fields
            answer = await client.post(PATH, json=body)
            assert answer.status_code == 400, fields
            assert answer.json()["error"]["param"] == "background" and says in answer.text
        too_long = await client.post(PATH, json={"input": "Hi " * 5000, "background": True})
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        assert service.num_sequences == 0

    run(chatty, scenario)


@pytest.mark.parametrize(("more_bytes", "status"), [(-1, None), (200, "failed")])
def test_one_that_is_too_large_is_refused_or_fails(chatty, more_bytes, status):
    """Refused for its input, it leaves nothing behind; failed for its output, it says so."""

    async def scenario(client, service, engine):
        body = ResponsesRequest(input="Hi", background=True, include=[LOGPROBS], **MORE)
        parsed = body.parse(service.model, keep=lambda stored: True)
        begun = parsed.chunks("mine", 1_800_000_000).without_output("in_progress")
        num_bytes = StoredResponse.of(begun, parsed.input).num_bytes
        store = ResponseStore(max_response_bytes=num_bytes + more_bytes)
        responses = BackgroundResponses(service, store)
        parsed = dataclasses.replace(parsed, keep=functools.partial(store.add, None))
        if status is None:
            with pytest.raises(FieldError, match="shorten the input"):
                await responses.begin(parsed, "mine", None)
            return
        queued = await responses.begin(parsed, "mine", None)
        while service.num_sequences or responses._running:
            await asyncio.sleep(0.01)
        response = json.loads(store.get(None, queued["id"]).response)
        assert response["status"] == status and "too large" in response["error"]["message"]

    run(chatty, scenario)


def test_a_full_queue_refuses_and_a_drain_waits(chatty):
    async def scenario(client, service, engine):
        body = MORE | {"input": "Hi", "background": True}
        answers = [await client.post(PATH, json=body) for _ in range(service._room + 1)]
        assert answers[-1].status_code == 429 and answers[-2].status_code == 200
        await service.drain(0)
        await service.abort_all()
        assert await service.drain(60)
        for answer in answers[:-1]:
            response = await ended(client, answer.json())
            assert response["status"] == "incomplete"

    run(chatty, without_steps(scenario))
