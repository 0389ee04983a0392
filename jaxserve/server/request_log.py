"""Request ids, and a line for each request in the log."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.outputs import RequestOutput
from jaxserve.protocol.errors import FieldError, reply_to
from jaxserve.server.answers import error_answer
from jaxserve.server.notes import RequestNotes, note

HEADER = b"x-request-id"
CLIENT_GONE = 499
"""The status that the log has where nothing was answered, as nginx's has."""

_POLLED = ("/health", "/metrics")
_VALID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger("jaxserve.server")


class RequestLog:
    """Gives each request an id, its own X-Request-Id or else a new one, which the answer carries.

    With `log_requests` a line tells of each request what it took, and nothing of its contents.
    What machines ask for every few seconds has none.
    """

    def __init__(self, app: ASGIApp, log_requests: bool) -> None:
        self._app = app
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(HEADER)
        valid = given is not None and _VALID.fullmatch(given)
        request_id = given.decode() if valid else uuid.uuid4().hex
        notes = note(scope, request_id)
        begin_s, status = time.monotonic(), CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (HEADER, request_id.encode())]
            await send(message)

        try:
            if given is None or valid:
                await self._app(scope, receive, send_with_id)
            else:
                error = FieldError("X-Request-Id", "must be 1 to 128 of A-Z a-z 0-9 . _ : -")
                await error_answer(reply_to(error))(scope, receive, send_with_id)
        except Exception:
            _log.exception("id=%s failed", request_id)
            if status == CLIENT_GONE:  # Nothing has been answered yet.
                raise
        finally:
            if self._log_requests and scope["path"] not in _POLLED:
                spent_s = time.monotonic() - begin_s
                _log.info("%s", _line(scope, notes, status, spent_s))


def _line(scope: Scope, notes: RequestNotes, status: int, spent_s: float) -> str:
    parts = [f"id={notes.request_id}", scope["method"], f"{scope['path']!r:.80}"]
    parts += [f"status={status}", f"e2e_s={spent_s:.3f}"]
    if notes.client_gone:
        parts.append("client=gone")
    if notes.error is not None:
        parts.append(f"error={type(notes.error).__name__}")
    if outputs := [output for output in notes.outputs if output is not None]:
        parts += _of_outputs(outputs)
    return " ".join(parts)


def _of_outputs(outputs: list[RequestOutput]) -> list[str]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    choices = [choice for output in outputs for choice in output.outputs]
    waits_us = [
        output.metrics.first_token_us - output.metrics.arrival_us
        for output in outputs
        if output.metrics.first_token_us is not None
    ]
    parts = [
        f"prompt_tokens={prompt}",
        f"output_tokens={sum(len(choice.token_ids) for choice in choices)}",
        f"finish={','.join(sorted({str(choice.finish_reason) for choice in choices}))}",
    ]
    return parts + ([f"ttft_s={min(waits_us) / 1e6:.3f}"] if waits_us else [])
