"""Servers whose device hangs, or only seems to."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import PATIENCE_S
from server_process import ServerProcess

pytestmark = pytest.mark.interfaces

PATH = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
HANGING = str(Path(__file__).with_name("hanging_server.py"))
TIMEOUT_S = 8


@pytest.fixture(scope="module")
def hang(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hang") / "hang"


@pytest.fixture(scope="module")
def watched(chat_model, hang):
    """A server whose device hangs while there is a file `hang`.0."""
    program = (sys.executable, HANGING, str(hang))
    timeout = f"--watchdog-timeout={TIMEOUT_S}"
    server = ServerProcess(chat_model, hang.with_name("log"), timeout, program=program)
    yield server.wait_ready()
    server.process.kill()
    server.process.wait()
    server.client.close()


def test_a_process_that_was_suspended_goes_on(watched):
    with ThreadPoolExecutor(1) as pool:
        post = pool.submit(watched.post, PATH, BODY | {"max_tokens": 1500})
        while not watched.metrics()["vllm:num_requests_running",]:
            time.sleep(0.01)
        watched.process.send_signal(signal.SIGSTOP)
        time.sleep(TIMEOUT_S + 2)
        watched.process.send_signal(signal.SIGCONT)
        assert post.result().status_code == 200
    assert watched.client.get("/health").json() == {"status": "ready"}


def test_a_step_that_takes_long_is_told_by_its_health(watched, hang):
    slow = Path(f"{hang}.0")
    with ThreadPoolExecutor(1) as pool:
        slow.touch()
        post = pool.submit(watched.post, PATH, BODY)
        watched._until(lambda: watched.client.get("/health").status_code == 503, PATIENCE_S)
        assert watched.client.get("/health").json() == {"status": "stalled"}
        assert watched.client.get("/livez").status_code == 200
        assert watched.post(PATH, BODY).status_code == 503
        slow.unlink()
        assert post.result().status_code == 200
    assert watched.client.get("/health").json() == {"status": "ready"}


def test_a_device_that_hangs_ends_the_server(watched, hang):
    Path(f"{hang}.0").touch()
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(watched.post, PATH, BODY)
        streamed = pool.submit(watched.client.post, PATH, json=BODY | {"stream": True})
        assert whole.result().status_code == 503
        assert "a step has not ended within 8 s" in whole.result().json()["error"]["message"]
        assert "a step has not ended within 8 s" in streamed.result().text
    assert watched.process.wait(PATIENCE_S) == 1
    text = watched.text()
    assert "the engine has failed" in text
    assert "_hanging" in text, "the stacks say where it hangs"


def test_a_server_that_hangs_ends_when_it_is_told_to(chat_model, tmp_path):
    """Without a watchdog. No thread that hangs keeps it."""
    hang = tmp_path / "hang"
    program = (sys.executable, HANGING, str(hang))
    args = ("--watchdog-timeout=0", "--shutdown-timeout=0.5")
    server = ServerProcess(chat_model, tmp_path / "log", *args, program=program).wait_ready()
    try:
        Path(f"{hang}.0").touch()
        with ThreadPoolExecutor(1) as pool:
            post = pool.submit(server.post, PATH, BODY)
            while not server.metrics()["vllm:num_requests_running",]:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE_S) == 1
            assert post.exception() is not None or post.result().status_code in (500, 503)
    finally:
        server.stop()


def test_a_host_that_hangs_ends_the_job(chat_model, tmp_path):
    """Host 0's watchdog ends its process, and the launcher the other's."""
    hang = tmp_path / "hang"
    hosts = ServerProcess(
        chat_model,
        tmp_path / "log",
        f"--watchdog-timeout={TIMEOUT_S}",
        "--tensor-parallel-size=2",
        launch=("launch", "--hosts=2", "--devices-per-host=1", "--", HANGING, str(hang)),
    )
    try:
        hosts.wait_ready()
        assert hosts.complete(BODY)["usage"]["completion_tokens"] == 100
        Path(f"{hang}.1").touch()
        assert hosts.post(PATH, BODY | {"max_tokens": 1500}).status_code == 503
        assert hosts.process.wait(PATIENCE_S) == 1
        assert "a step has not ended within 8 s" in hosts.text()
    finally:
        hosts.stop()
