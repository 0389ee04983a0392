"""Servers of their own: who is admitted, and how they end."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from patience import PATIENCE_S
from server_process import ServerProcess, prompt_of

pytestmark = pytest.mark.interfaces

PATH = "/v1/completions"
LONG = {"prompt": prompt_of(20), "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "hi", "max_tokens": 3, "temperature": 0}


@pytest.fixture
def start(chat_model, tmp_path):
    """Starts servers, the logs of which are numbered."""
    servers = []

    def start(*args: str) -> ServerProcess:
        server = ServerProcess(chat_model, tmp_path / f"log-{len(servers)}", *args)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()
        server.client.close()


def test_a_server_is_there_before_its_model_and_keeps_to_its_key(start, tmp_path):
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    server = start(f"--api-key-file={key}", "--max-logprobs=2")
    health = server.client.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "starting"})
    early = server.post(PATH, SHORT, authorization="Bearer s3cret")
    assert early.status_code == 503 and early.headers["retry-after"]
    assert "starting" in early.json()["error"]["message"]
    server.wait_ready()
    for shown in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "s3cret"},
        {"x-api-key": "wrong"},
        {"x-api-key": "Bearer s3cret"},
    ):
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere"):
            refused = server.client.get(path, headers=shown)
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"] == "Bearer"
        assert server.post(PATH, SHORT, **shown).status_code == 401
    assert server.client.get("/v1/models", headers={"x-api-key": "s3cret"}).status_code == 200
    scored = {"x-api-key": "s3cret"}
    assert server.post(PATH, SHORT | {"logprobs": 2}, **scored).status_code == 200
    refused = server.post(PATH, SHORT | {"logprobs": 3}, **scored).json()["error"]
    assert (refused["param"], "2 at most" in refused["message"]) == ("logprobs", True)
    openai = pytest.importorskip("openai")
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="s3cret") as client:
        assert client.models.list().data
    assert "s3cret" not in server.text()
    assert server.stop() == 0


def test_a_fair_share_is_of_an_api_key_whatever_salts_are_sent(start, tmp_path):
    """A client with a backlog gains nothing by a new cache_salt for each request. Scrapers of this
    server need no key."""
    keys = tmp_path / "keys"
    keys.write_text("heavy\nlight\n")
    server = start(
        f"--api-key-file={keys}", "--fair-share", "--metrics-without-api-key", "--log-requests"
    )
    server.wait_ready()
    assert server.client.get("/v1/models").status_code == 401
    heavy, light = ({"authorization": f"Bearer {key}"} for key in ("heavy", "light"))
    body = LONG | {"max_tokens": 300}

    def num_open():
        lines = server.client.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("jaxserve:open_sequences{")]
        return float(line.split()[-1])

    with ThreadPoolExecutor(16) as pool:
        sent = [
            pool.submit(server.post, PATH, body | {"cache_salt": f"salt {i}"}, **heavy)
            for i in range(16)
        ]
        while num_open() < 16:
            time.sleep(0.02)
        post = server.post(PATH, SHORT, **light, **{"x-request-id": "last"})
        assert post.status_code == 200
        assert {post.result().status_code for post in sent} == {200}
    # Four were running, and four more may have begun with it. In the order of arrival it would have
    # been the last.
    ends = []  # A request's line in the log may follow its response.
    while len(ends) < 17:
        text = server.text()
        ends = re.findall(rf"id=(\w+) POST '{PATH}'", text)
    assert ends.index("last") <= 8, ends
    assert server.post(PATH, SHORT, authorization="Bearer heavylight").status_code == 401
    assert server.stop() == 0
    assert "heavy" not in text and "light" not in text


def test_a_full_queue_refuses_and_a_stopped_server_lets_requests_end(start):
    server = start("--max-queued-requests=2", "--shutdown-timeout=600").wait_ready()
    too_many = server.post(PATH, SHORT | {"n": 7, "temperature": 1})
    assert too_many.status_code == 400 and "at most 6" in too_many.json()["error"]["message"]
    with ThreadPoolExecutor(6) as pool:
        running = [
            pool.submit(server.post, PATH, LONG | {"max_tokens": 800, "seed": i}) for i in range(6)
        ]
        while server.metrics()["jaxserve:open_sequences",] < 6:
            time.sleep(0.02)
        refused = server.post(PATH, SHORT)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "of at most 6" in refused.json()["error"]["message"]
        rejected = "vllm:admission_rejections_total", "max_num_queued_reqs"
        assert server.metrics()[rejected] == 1
        server.process.send_signal(signal.SIGTERM)
        while server.client.get("/health").json()["status"] != "draining":
            time.sleep(0.02)
        late = server.post(PATH, SHORT)
        assert late.status_code == 503 and late.headers["retry-after"]
        responses = [post.result().json() for post in running]
    assert {a["choices"][0]["finish_reason"] for a in responses} == {"length"}
    assert len({a["choices"][0]["text"] for a in responses}) == 1
    assert server.stop() == 0, server.text()


def test_what_has_not_ended_in_time_is_told_so(start, tmp_path):
    trace = tmp_path / "trace.json"
    server = start("--shutdown-timeout=0.5", f"--trace-file={trace}").wait_ready()
    with server.client.stream("POST", PATH, json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        stopping = threading.Thread(target=server.process.send_signal, args=(signal.SIGINT,))
        stopping.start()
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    assert json.loads(events[-1])["choices"][0]["finish_reason"] == "abort"
    assert server.process.wait(PATIENCE_S) == 0
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert len(names) > 5


def test_unfinished_requests_are_resumed_by_the_next_server(start, tmp_path):
    directory = tmp_path / "snapshot"
    args = ("--shutdown-timeout=0", f"--snapshot-dir={directory}")
    server = start(*args).wait_ready()
    wanted = server.complete(LONG)["choices"][0]["text"]
    headers, body = {"x-request-id": "mine"}, LONG | {"stream": True}
    with server.client.stream("POST", PATH, json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert server.process.wait(PATIENCE_S) == 75
    server = start(*args).wait_ready()
    other = server.post(PATH, LONG | {"prompt": "another"}, **headers)
    assert other.status_code == 400 and "another prompt" in other.json()["error"]["message"]
    other = server.post(PATH, LONG | {"seed": 5}, **headers)
    assert other.status_code == 400 and "seed" in other.json()["error"]["message"]
    assert server.stop() == 75, "no client has resent the request yet"
    server = start(*args).wait_ready()
    resumed = server.post(PATH, LONG, **headers).json()
    assert resumed["choices"][0]["text"] == wanted
    assert server.post(PATH, SHORT, **headers).status_code == 200
    assert server.stop() == 0
    assert not list(directory.glob("*.json"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--port=99999"], "--port is 99999; it must be in 0..65535"),
        (["--host=nowhere.invalid"], "nowhere.invalid"),
        (["--api-key=a b"], "API key"),
        (["--api-key", "good", "not good"], "API key 2"),
        (["--api-key-file=/nowhere"], "--api-key-file '/nowhere' cannot be read: No such file"),
        (["--api-key-file=/dev/null"], "/dev/null"),
        (["--shutdown-timeout=-1"], "--shutdown-timeout is"),
        (["--max-queued-requests=-1"], "--max-queued-requests is"),
        (["--max-logprobs=21"], "--max-logprobs is 21; it must be 20 or less"),
        (["--trace-file=/nowhere/trace.json"], "--trace-file is"),
        (["--snapshot-dir=/proc/nowhere"], "/proc/nowhere"),
        (["--uds=/dev/null"], "--uds is '/dev/null', but that is not a socket"),
        (["--uds=/nowhere/socket"], "--uds is '/nowhere/socket'"),
        (["--root-path=llm"], "--root-path is 'llm'"),
        (["--allowed-origins=example.com"], "--allowed-origins has 'example.com'; write an origin"),
        (["--ssl-keyfile=/nowhere"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile=/dev/null"], "--ssl-certfile and --ssl-keyfile: '/dev/null' are not"),
    ],
)
def test_settings_that_cannot_be(args, says, capsys):
    from jaxserve.cli import main

    assert main(["serve", "no-such-model", *args]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line


def test_an_option_that_has_taken_the_model(tmp_path, capsys):
    from jaxserve.cli import main

    for option in ("--api-key", "--served-model-name", "--allowed-hosts"):
        for model in (str(tmp_path), "org/name"):
            assert main(["serve", option, "k", model]) == 1
            error = capsys.readouterr().err
            assert error.startswith(f"error: {option} has the value {model!r}, which looks like a")
            assert f"`jaxserve serve {model}`" in error


def test_a_model_there_is_not_ends_the_server(start, tmp_path):
    server = ServerProcess(tmp_path / "nothing", tmp_path / "log")
    assert server.process.wait(PATIENCE_S) == 1
    server.client.close()
    (error,) = [line for line in server.text().splitlines() if line.startswith("error: ")]
    assert "nothing" in error and "Traceback" not in server.text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{server.port}/health")
