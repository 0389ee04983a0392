"""Resumable work: a snapshot on SIGTERM, restored at the next start."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from jaxserve.core.process.signals import STOPPED, signals_handled
from jaxserve.engine.delta_stream import DeltaStream
from jaxserve.engine.snapshot.files import discard, exists
from jaxserve.llm import LLM


@contextlib.contextmanager
def resumable(
    llm: LLM, directory: str | Path, deadline_s: float = 20.0
) -> Iterator[list[DeltaStream]]:
    """Within the block, SIGTERM ends the process without losing work: open requests are saved to
    `directory` in about `deadline_s` seconds, and SystemExit(75) is raised.

    Yields streams of the requests in which the previous process was stopped, or an empty list. A
    block that ends without an error discards the snapshot. For the main thread only.

    >>> with LLM() as llm, resumable(llm, "work") as streams:
    ...     outputs = [stream.result() for stream in streams] or llm.generate(prompts)

    On several hosts each runs this block; a host that gets SIGTERM before host 0 runs its steps
    until that one does, too.

    Raises SnapshotError when the directory cannot be written, or when there is a snapshot that
    cannot be restored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if llm.has_work or llm.engine.is_led:  # Host 0 may have work where this host has none.
            llm.snapshot(directory, deadline_s=deadline_s)
        raise SystemExit(STOPPED)

    llm.check_snapshot(directory)
    streams = llm.restore(directory) if exists(directory) else []
    with signals_handled(stop, signal.SIGTERM):
        yield streams
        discard(directory)
