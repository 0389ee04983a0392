"""The measured response to one request, and the clock for it."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class TimedResponse:
    """A streamed response, complete or partial. Times are microseconds since the request was sent.

    `prompt_tokens`, `cached_tokens` and `output_tokens` are the server's own counts, None if it
    sent none. `failure` is None for a complete response, else a short category of the failure;
    `detail` has the specifics.
    """

    token_us: tuple[int, ...]
    end_us: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    failure: str | None = None
    detail: str | None = None


def now_us() -> int:
    """Monotonic time in whole microseconds."""
    return time.monotonic_ns() // 1000
