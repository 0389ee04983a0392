"""A server whose model spans two hosts."""

from __future__ import annotations

import concurrent.futures
import signal
import time

import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.interfaces

SHORT = {"prompt": "hello", "temperature": 0, "max_tokens": 16, "ignore_eos": True}


def test_they_serve_as_one_and_stop_together(server, chat_model, tmp_path):
    hosts = ServerProcess(
        chat_model,
        tmp_path / "log",
        "--tensor-parallel-size=2",
        launch=("launch", "--hosts=2", "--devices-per-host=1", "--"),
    ).wait_ready()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            responses = [each.complete(SHORT)["choices"][0]["text"] for each in (hosts, server)]
            long = pool.submit(hosts.complete, SHORT | {"max_tokens": 200})
            while not hosts.metrics()["vllm:num_requests_running",]:
                time.sleep(0.01)
        finally:
            status = hosts.stop()
        assert long.result()["choices"][0]["finish_reason"] == "length"
    assert responses[0] == responses[1]
    assert status == 128 + signal.SIGTERM
    assert "Traceback" not in hosts.text()
