"""What a host does that shares the engine of host 0, and is given no requests itself."""

from __future__ import annotations

import signal

from jaxserve.cli.progress import TerminalProgress
from jaxserve.config import EngineConfig


def follow(config: EngineConfig) -> int:
    """Load the engine and make the steps that host 0 makes, until it closes its own; 0, for a
    process to exit with.

    Ctrl-C and SIGTERM are ignored: a launcher sends them to all hosts, and it is host 0 that lets
    work under way end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from jaxserve.engine.engine import Engine

    with TerminalProgress() as progress:
        engine = Engine.load(config, progress=progress)
    try:
        engine.follow()
    finally:
        engine.close()
    return 0
