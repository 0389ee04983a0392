"""Routes about the server itself, and pages of other origins."""

from __future__ import annotations

import asyncio
import dataclasses
import warnings

import httpx
import pytest

from jaxserve.server.app import AppSettings, create_app
from jaxserve.server.service import Service

ORIGIN = "https://chat.example.com"
PLAIN = AppSettings((), 1 << 20, False)


def get(
    path: str, method: str = "GET", keys=(), origins=(), hosts=None, **headers: str
) -> httpx.Response:
    """The response of a server that is still starting."""
    settings = AppSettings(keys, 1 << 20, False, allowed_hosts=hosts, allowed_origins=origins)
    return ask(settings, path, method, headers=headers)


def ask(settings: AppSettings, path: str, method: str = "POST", **more) -> httpx.Response:
    app = create_app(Service(["tiny"], 8), settings)

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(asked())


def test_the_root_says_what_this_is():
    said = get("/").json()
    assert (said["name"], said["status"], said["models"]) == ("jaxserve", "starting", ["tiny"])
    assert get("/", "HEAD").status_code == 200
    assert get(said["docs"]).status_code == get(said["openapi"]).status_code == 200


def test_a_path_of_a_proxy_is_told_and_taken_away():
    below = dataclasses.replace(PLAIN, root_path="/llm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # FastAPI's own setting of it is deprecated.
        answers = [ask(below, path, "GET").json() for path in ("/", "/llm/")]
    assert answers[0] == answers[1]
    assert (answers[0]["docs"], answers[0]["openapi"]) == ("/llm/docs", "/llm/openapi.json")
    document = ask(below, "/llm/openapi.json", "GET").json()
    assert document["servers"] == [{"url": "/llm"}]
    missing = ask(below, "/llmless/version", "GET").json()["error"]["message"]
    assert missing == "GET '/llmless/version': Not Found."


def test_docs_have_every_route_and_load_nothing():
    page = get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for path in get("/openapi.json").json()["paths"]:
        assert path in page.text, path
    for field in ("max_output_tokens", "stop_sequences", "truncate_prompt_tokens"):
        assert f"<code>{field}</code>" in page.text
    assert "<script" not in page.text and "http" not in page.text.split("</style>")[1]


def test_a_server_that_starts_answers_probes():
    for method in ("GET", "POST"):
        assert get("/ping", method, ("a",)).json() == {"status": "starting"}
    assert get("/ping", "HEAD", ("a",)).status_code == 503
    assert get("/load").json() == {"server_load": 0}
    assert get("/server_info").status_code == 503
    assert get("/reset_prefix_cache", "POST").status_code == 503


def test_one_of_several_keys_does_not_empty_the_cache_of_the_others():
    key = {"authorization": "Bearer a"}
    assert get("/reset_prefix_cache", "POST", ("a",), **key).status_code == 503
    refused = get("/reset_prefix_cache", "POST", ("a", "b"), **key)
    assert refused.status_code == 403 and "several API keys" in refused.text


@pytest.mark.parametrize("given", ["a b", "x" * 129, "8f0c#12"])
def test_an_odd_request_id_is_replaced(given):
    """Proxies choose the header: Kong's has a #."""
    for path in ("/livez", "/version"):
        response = get(path, **{"x-request-id": given})
        assert response.status_code == 200
        assert len(response.headers["x-request-id"]) == 32


def test_a_name_that_is_not_allowed_is_refused_with_the_remedy():
    for keys, has_remedy in (((), True), (("a",), False)):
        refused = get("/version", keys=keys, hosts=("inside.example",), host="evil.example")
        message = refused.json()["error"]["message"]
        assert refused.status_code == 403 and "--allowed-hosts" in message
        assert ("--api-key-file" in message) is has_remedy


PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize("keys", [(), ("a",)])
def test_pages_of_allowed_origins_may_ask(keys):
    """Browsers ask without a key first."""
    asked = get("/v1/chat/completions", "OPTIONS", keys, (ORIGIN,), **PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in asked.headers["access-control-allow-headers"]
    answer = get("/v1/models", keys=keys, origins=(ORIGIN,), origin=ORIGIN)
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.status_code == (401 if keys else 503)


def test_pages_of_other_origins_may_not():
    for origins in ((), (ORIGIN,)):
        other = PREFLIGHT | {"origin": "https://other.example.com"}
        asked = get("/v1/chat/completions", "OPTIONS", (), origins, **other)
        assert "access-control-allow-origin" not in asked.headers
        assert asked.status_code in (400, 405)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", "it has a number of over 4300 digits."),
        (b'{"prompt": "\xff"}', "it is not in UTF-8."),
        (b"[" * 30_000, "its lists and objects are nested too deeply."),
    ],
)
def test_a_body_that_python_cannot_read_is_refused_with_the_reason(body, says):
    headers = {"content-type": "application/json"}
    refused = ask(PLAIN, "/v1/completions", content=body, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == f"the body cannot be read: {says}"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", [1], "body must be an object, got [1]."),
        ("/v1/chat/completions", {"messages": [3]}, "messages[0] must be an object, got 3."),
        ("/v1/load_lora_adapter", {"lora_name": "", "lora_path": "a"}, "at least 1 character"),
    ],
)
def test_pydantics_words_are_not_ours(path, body, says):
    refused = ask(dataclasses.replace(PLAIN, dev_mode=True), path, json=body)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and says in message and "should" not in message


def test_what_openai_has_beside_its_responses_is_not_found():
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens", "/v1/responses/compact"):
        missing = ask(PLAIN, path, json={"input": "Hi"})
        error = missing.json()["error"]
        assert missing.status_code == 404 and set(error) == {"message", "type", "param", "code"}
        assert error["message"].startswith(f"POST {path!r}: Not Found")
        assert ("/tokenize" in error["message"]) is path.endswith("input_tokens")
    assert get("/v1/responses/input_tokens").json()["error"]["code"] == "response_not_found"
