"""What comes of one request, and the clock that it is measured by."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """A streamed answer, or as much of it as came. Times are microseconds since it was asked for.

    `prompt_tokens`, `cached_tokens` and `output_tokens` are the server's own counts, None where it
    gave none. `failure` is None for an answer that was streamed to its end, else a few words that
    are the same for all failures of a kind; `detail` is what is known besides.
    """

    token_us: tuple[int, ...]
    end_us: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    failure: str | None = None
    detail: str | None = None


def now_us() -> int:
    """Whole microseconds of a clock that never steps."""
    return time.monotonic_ns() // 1000
