"""Work that survives being told to stop: a checkpoint on SIGTERM, taken up at the next start."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from jaxserve.delta_stream import DeltaStream
from jaxserve.engine.checkpoint import discard, exists
from jaxserve.llm import LLM

STOPPED = os.EX_TEMPFAIL
"""Exit status of a process that SIGTERM has stopped with work left: start it again."""


@contextlib.contextmanager
def resumable(
    llm: LLM, directory: str | Path, deadline_s: float = 20.0
) -> Iterator[list[DeltaStream]]:
    """Within the block, SIGTERM ends the process and loses nothing: what is under way is written
    to `directory` in about `deadline_s` seconds, and SystemExit(75) is raised.

    The block is given streams of what the process before it was stopped in, or an empty list. A
    block that ends well discards the checkpoint. For the main thread.

    >>> with LLM() as llm, resumable(llm, "work") as streams:
    ...     outputs = [stream.result() for stream in streams] or llm.generate(prompts)

    Raises CheckpointError when the directory cannot be written, when there is a checkpoint that
    cannot be restored, or when the engine is one of several hosts'.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if llm.has_work:
            llm.checkpoint(directory, deadline_s=deadline_s)
        raise SystemExit(STOPPED)

    llm.check_checkpoint(directory)
    streams = llm.restore(directory) if exists(directory) else []
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield streams
        discard(directory)
    finally:
        signal.signal(signal.SIGTERM, before)
