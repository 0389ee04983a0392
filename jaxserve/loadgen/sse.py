"""Decode server-sent events from a byte stream, as in the WHATWG specification."""

from __future__ import annotations


class EventDecoder:
    """Extracts the data of events, however the bytes are chunked."""

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
