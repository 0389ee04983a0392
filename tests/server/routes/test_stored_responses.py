"""Stored responses: conversations that go on from them, what is read of them, and what is kept."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_service import run
from tiny_engines import TinyModel

from jaxserve.core.errors import RequestError
from jaxserve.protocol.errors import ResponseNotFoundError
from jaxserve.protocol.responses_api.request import ResponsesRequest
from jaxserve.protocol.responses_api.stored import Conversation, StoredResponse
from jaxserve.server.response_store import ResponseStore

PATH = "/v1/responses"
MORE = {"max_output_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def chatty(chat_model):
    return TinyModel.open(chat_model)


def of_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(client, said, **fields) -> dict:
    answer = await client.post(PATH, json=MORE | {"input": said} | fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return answer.json()
    *_, last = [event for event in answer.text.split("\n\n") if event]
    return json.loads(last.partition("data: ")[2])["response"]


def test_a_conversation_goes_on_from_any_response(chatty):
    """As if all of it were sent, streamed or not, with calls of tools; instructions are not of the
    conversation."""

    async def scenario(client, service, engine):
        first = await ask(client, "Hi", instructions="Be brief.")
        assert first["store"] is True
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": "7"}
        second = await ask(
            client, [call, result], previous_response_id=first["id"], stream=True, store=True
        )
        assert second["previous_response_id"] == first["id"]
        whole = [{"role": "user", "content": "Hi"}, *first["output"], call, result]
        assert (await ask(client, whole))["usage"]["input_tokens"] == (
            second["usage"]["input_tokens"]
        )
        for other in ("And?", "Or?"):  # Both from the same one.
            third = await ask(client, other, previous_response_id=second["id"])
            all_of_it = [*whole, *second["output"], {"role": "user", "content": other}]
            same = await ask(client, all_of_it, store=False)
            assert third["output"][0]["content"] == same["output"][0]["content"]
            assert third["usage"]["input_tokens"] == same["usage"]["input_tokens"]
        read = (await client.get(f"{PATH}/{third['id']}")).json()
        assert read == third
        assert same["store"] is False
        missing = await client.get(f"{PATH}/{same['id']}")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "response_not_found"

    run(chatty, scenario)


def test_items_are_listed_in_pages(chatty):
    async def scenario(client, service, engine):
        said = [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
            {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "so"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "7"},
        ]
        first = await ask(client, said)
        second = await ask(client, "Go on", previous_response_id=first["id"])
        path = f"{PATH}/{second['id']}/input_items"
        everything = (await client.get(path, params={"order": "asc"})).json()
        kinds = [item["type"] for item in everything["data"]]
        assert kinds[:5] == [
            *("message", "message", "reasoning", "function_call", "function_call_output")
        ]
        assert kinds[5:] == ["message", "message"] and not everything["has_more"]
        assert everything["data"][-1]["content"] == [{"type": "input_text", "text": "Go on"}]
        assert everything["data"][1]["content"][0]["type"] == "output_text"
        ids = [item["id"] for item in everything["data"]]
        assert len(set(ids)) == len(ids)
        seen, after = [], {}
        while True:
            page = (await client.get(path, params={"limit": 3, **after})).json()
            seen += [item["id"] for item in page["data"]]
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert seen == ids[::-1]
        for params in ({"after": "x"}, {"limit": 0}, {"limit": 101}, {"order": "up"}):
            refused = await client.get(path, params=params)
            assert refused.status_code == 400, params
            assert refused.json()["error"]["param"] == next(iter(params))

    run(chatty, scenario)


def test_responses_are_deleted_and_not_cancelled(chatty):
    async def scenario(client, service, engine):
        first = await ask(client, "Hi")
        path = f"{PATH}/{first['id']}"
        second = await ask(client, "And?", previous_response_id=first["id"])
        refused = await client.post(f"{path}/cancel")
        assert refused.status_code == 400 and "synchronous" in refused.text
        assert (await client.get(path, params={"stream": True})).status_code == 400
        deleted = (await client.delete(path)).json()
        assert deleted == {"id": first["id"], "object": "response", "deleted": True}
        for method, ending in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            assert (await client.request(method, path + ending)).status_code == 404
        gone = await client.post(PATH, json=MORE | {"input": "a", "previous_response_id": "x"})
        assert gone.status_code == 400
        assert gone.json()["error"]["param"] == "previous_response_id"
        await ask(client, "Go on", previous_response_id=second["id"])

    run(chatty, scenario)


def test_a_key_has_its_own(chatty):
    async def scenario(client, service, engine):
        body = MORE | {"input": "Hi"}
        mine = (await client.post(PATH, json=body, headers=of_key("one"))).json()
        more = body | {"previous_response_id": mine["id"]}
        path = f"{PATH}/{mine['id']}"
        for key, found in (("two", False), ("one", True)):
            status = 200 if found else 404
            for ending in ("", "/input_items"):
                answer = await client.get(path + ending, headers=of_key(key))
                assert answer.status_code == status
            posted = await client.post(PATH, json=more, headers=of_key(key))
            assert posted.status_code == (200 if found else 400)
            assert (await client.delete(path, headers=of_key(key))).status_code == status
        assert (await client.get(path)).status_code == 401

    run(chatty, scenario, keys=("one", "two"))


def test_requests_of_one_id_have_responses_of_their_own(chatty):
    """As when a proxy gives one id to all requests of a trace."""

    async def scenario(client, service, engine):
        one = {"x-request-id": "trace"}
        body = MORE | {"input": "Hi"}
        first = (await client.post(PATH, json=body, headers=one)).json()
        body |= {"input": "And?", "previous_response_id": first["id"]}
        second = (await client.post(PATH, json=body, headers=one)).json()
        assert first["id"] != second["id"]
        for response in (first, second):
            assert (await client.get(f"{PATH}/{response['id']}")).json() == response
        body |= {"previous_response_id": second["id"]}
        third = (await client.post(PATH, json=body, headers=one)).json()
        listed = (await client.get(f"{PATH}/{third['id']}/input_items")).json()["data"]
        assert len({item["id"] for item in listed}) == len(listed) == 5
        unstored = (await client.post(PATH, json=body | {"store": False}, headers=one)).json()
        assert unstored["id"] == "resp_trace"

    run(chatty, scenario)


def test_a_batch_job_stores_nothing(llama):
    request = ResponsesRequest(input="Hi", previous_response_id="resp_1")
    with pytest.raises(RequestError, match="only a server has"):
        request.parse(None)


def stored(name, said):
    read = Conversation.of([{"text": said}])
    response = {"id": name, "output": [{"text": "b"}], "status": "completed", "background": False}
    return StoredResponse.of(response, read)


def test_a_response_has_what_was_read_and_the_conversation():
    first = stored("r", "ä\ud800")
    assert [item["text"] for item in first.conversation.items] == ["ä\ud800", "b"]
    assert first.num_bytes == len(first.response) + len(first.conversation.text)
    nothing = Conversation.of([])
    assert nothing + nothing == nothing
    for both in (first.conversation + nothing, nothing + first.conversation):
        assert both == first.conversation
    twice = first.conversation + first.conversation
    assert twice == Conversation.of(first.conversation.items * 2)


@settings(max_examples=60, deadline=None)
@given(
    added=st.lists(
        st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 8), st.integers(0, 120)),
        max_size=40,
    )
)
def test_the_store_is_bounded(added):
    store, known = ResponseStore(max_responses=6, max_bytes=1000, max_response_bytes=500), {}
    for tenant, number, size in added:
        response = stored(f"r{number}", "ä" * size)
        known.pop((tenant, response.id), None)
        fits = response.num_bytes <= 500
        assert store.add(tenant, response) is fits
        if fits:
            known[tenant, response.id] = response
        else:  # Nor is an older one with its id left.
            with pytest.raises(ResponseNotFoundError):
                store.get(tenant, response.id)
        for key in list(known):
            try:
                assert store.get(*key) is known[key]
            except ResponseNotFoundError:
                del known[key]
        assert len(known) <= 6 and sum(each.num_bytes for each in known.values()) <= 1000


def test_one_that_is_too_large_costs_no_other():
    store = ResponseStore(max_response_bytes=500)
    store.add("a", stored("small", ""))
    store.add("a", stored("large", "x" * 500))
    assert store.get("a", "small")
    with pytest.raises(ResponseNotFoundError):
        store.get("a", "large")


def test_the_largest_tenant_loses_its_least_recently_used():
    store = ResponseStore(max_responses=4)
    store.add("a", stored("small", ""))
    for number in range(6):
        store.add("b", stored(f"large{number}", "x" * 100))
        store.get("b", "large0")
    assert store.get("a", "small")
    kept = [number for number in range(6) if f"large{number}" in store._stored["b"]]
    assert kept == [0, 4, 5]


def test_many_small_ones_cost_no_other_its_large_one():
    store = ResponseStore(max_responses=4)
    store.add("a", stored("large", "x" * 5000))
    for number in range(6):
        store.add("b", stored(f"small{number}", ""))
    assert store.get("a", "large") and store.get("b", "small5")
