"""A tiny model that chats."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import write_chat_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `write_chat_model`."""
    return write_chat_model(tmp_path_factory.mktemp("protocol"))
