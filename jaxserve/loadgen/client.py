"""Stream one request to an OpenAI endpoint, recording the arrival time of each token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.core.process.extras import extra
from jaxserve.loadgen.timed_response import TimedResponse, now_us

with extra("loadgen"):
    import aiohttp

_DETAIL_CHARACTERS = 500


def open_session(api_key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """A session without connection limit, with a total timeout of `timeout_s` per request."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        trust_env=True,
    )


async def stream(http: aiohttp.ClientSession, url: str, body: bytes) -> TimedResponse:
    """Send one request and read the whole response. Failures are reported in it."""
    begin_us = now_us()
    reading = _Reading()
    failure = detail = None
    try:
        async with http.post(url, data=body) as response:
            if response.status != 200:
                detail = await response.text("utf-8", "replace")
                failure = f"HTTP {response.status}"
            else:
                reading.begun = True
                decoder = EventDecoder()
                async for chunk in response.content.iter_any():
                    arrival_us = now_us() - begin_us
                    for event in decoder.feed(chunk):
                        reading.take(event, arrival_us)
    except TimeoutError:
        failure, detail = "timeout", f"no end within {http.timeout.total:g} s"
    except aiohttp.ClientError as error:
        failure = "stream broken off" if reading.begun else "no connection"
        detail = str(error) or type(error).__name__
    except _BadEvent as error:
        failure, detail = error.args
    # After a complete response, connection errors do not matter.
    if reading.done:
        failure = detail = None
    elif failure is None:
        failure, detail = "stream broken off", "it ended without a finish_reason or [DONE]"
    token_us = reading.token_us()
    if failure is None and not token_us:
        failure = "no tokens"
    return TimedResponse(
        token_us=token_us,
        end_us=reading.done_us if failure is None else now_us() - begin_us,
        failure=failure,
        detail=None if detail is None else detail[:_DETAIL_CHARACTERS],
        **reading.usage,
    )


class EventDecoder:
    """Extracts the data of server-sent events (WHATWG), however the bytes are chunked."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes; lines of one event are joined."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class _BadEvent(Exception):
    """An invalid event. Args: the kind of failure, and details."""


@dataclass
class _Reading:
    """State of a response being read."""

    begun: bool = False
    done: bool = False
    done_us: int = 0
    usage: dict[str, int | None] = field(default_factory=dict)
    _by_id: list[tuple[int, int]] = field(default_factory=list)
    """(time, number of token ids) of events with ids."""
    _by_text: list[int] = field(default_factory=list)
    """Times of events with text."""

    def take(self, event: bytes, arrival_us: int) -> None:
        if event == b"[DONE]":
            self.done, self.done_us = True, arrival_us
            return
        try:
            content = json.loads(event)
            if content.get("error"):
                raise _BadEvent("error event", json.dumps(content["error"]))
            for choice in content.get("choices") or ():
                self._take_choice(choice, arrival_us)
            if content.get("usage"):
                self._take_usage(content["usage"])
        except (AttributeError, TypeError, ValueError) as error:
            raise _BadEvent("unreadable event", f"{error}: {event[:200]!r}") from error

    def _take_choice(self, choice: dict[str, Any], arrival_us: int) -> None:
        if token_ids := choice.get("token_ids"):
            self._by_id.append((arrival_us, len(token_ids)))
        said = choice.get("delta") or choice
        # Reasoning models stream their reasoning under either of the last two names.
        texts = (said.get(name) for name in ("text", "content", "reasoning", "reasoning_content"))
        if any(texts):
            self._by_text.append(arrival_us)
        if choice.get("finish_reason"):
            self.done, self.done_us = True, arrival_us

    def _take_usage(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self.usage = {
            "prompt_tokens": usage.get("prompt_tokens"),
            "cached_tokens": details.get("cached_tokens"),
            "output_tokens": usage.get("completion_tokens"),
        }

    def token_us(self) -> tuple[int, ...]:
        """Arrival time of each token: exact if the server sent ids, else from text events."""
        if self._by_id:
            return tuple(us for us, count in self._by_id for _ in range(count))
        return spread(self._by_text, self.usage.get("output_tokens") or len(self._by_text))


def spread(event_us: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Estimate arrival times of `num_tokens` tokens from the times of events with text.

    Servers may put several tokens into one event, and send none while a character is incomplete.
    Tokens are spread evenly over the events; with as many events as tokens, each has its own.
    """
    if not event_us:
        return ()
    return tuple(event_us[token * len(event_us) // num_tokens] for token in range(num_tokens))
