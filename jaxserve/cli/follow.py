"""The follower loop of hosts other than host 0, which receive no requests themselves."""

from __future__ import annotations

import signal

from jaxserve.core.process.terminal_progress import TerminalProgress
from jaxserve.core.settings.config import EngineConfig


def follow(config: EngineConfig) -> int:
    """Load the engine and repeat host 0's steps until host 0 closes its engine. Returns exit status
    0.

    Ctrl-C and SIGTERM are ignored: a launcher sends them to all hosts, and host 0 drains the
    requests in flight.
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
