"""A tiny model that chats, and one server of it for all tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from patience import PATIENCE_S
from server_process import ServerProcess, write_chat_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `write_chat_model`."""
    return write_chat_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def shared_server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("server") / "log"
    server = ServerProcess(chat_model, log, "--served-model-name=tiny", "--log-requests")
    yield server.wait_ready()
    assert server.stop() == 0, server.text()
    assert "Traceback" not in server.text()


@pytest.fixture
def server(shared_server: ServerProcess):
    """The server of the session; a test leaves it idle, or it fails."""
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture
def client(server: ServerProcess):
    """OpenAI's client, which does not try again."""
    openai = pytest.importorskip("openai")
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client
