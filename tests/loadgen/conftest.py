"""A scripted endpoint in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The root of a scripted endpoint (scripted_server.py); its OpenAI API is under /v1.

    The socket listens before the process is there: a client that connects early waits.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(512)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "uvicorn", "scripted_server:app", "--log-level=critical"),
                *(f"--fd={listener.fileno()}", f"--app-dir={Path(__file__).parent}"),
            ],
            pass_fds=[listener.fileno()],
        )
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        process.kill()  # An answer that hangs would have to be waited for.
        process.wait()
