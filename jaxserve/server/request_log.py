"""Request ids, and one log line per request."""

from __future__ import annotations

import logging
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.protocol.field_types import REQUEST_ID
from jaxserve.server.request_state import RequestState, create

HEADER = b"x-request-id"
CLIENT_GONE = 499
"""The logged status of a request without a response, as in nginx."""

_POLLED = ("/health", "/livez", "/ping", "/load", "/metrics")
_log = logging.getLogger("jaxserve.server")


class RequestLog:
    """Gives each request an id, which the response carries: its X-Request-Id if it is a valid id,
    or else a new one, which a route may replace by that of the body. A proxy, and not the client,
    may have written the header, so an invalid one is no error.

    With `log_requests`, logs one line per request, with timing and token counts but no contents.
    Polled endpoints (such as /health) are not logged.
    """

    def __init__(self, app: ASGIApp, log_requests: bool) -> None:
        self._app = app
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(HEADER)
        valid = given is not None and REQUEST_ID.fullmatch(given.decode("latin-1"))
        request_id = given.decode() if valid else uuid.uuid4().hex
        request_state = create(scope, request_id, id_is_new=not valid)
        begin_s, status = time.monotonic(), CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (HEADER, request_state.request_id.encode())
                message["headers"] = [*message["headers"], own]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            _log.exception("id=%s failed", request_state.request_id)
            if status == CLIENT_GONE:  # No response has been started.
                raise
        finally:
            if self._log_requests and scope["path"] not in _POLLED:
                spent_s = time.monotonic() - begin_s
                _log.info("%s", _line(scope, request_state, status, spent_s))


def _line(scope: Scope, request_state: RequestState, status: int, spent_s: float) -> str:
    parts = [f"id={request_state.request_id}", scope["method"], f"{scope['path']!r:.80}"]
    parts += [f"status={status}", f"e2e_s={spent_s:.3f}"]
    if request_state.client_gone:
        parts.append("client=gone")
    if request_state.error is not None:
        parts.append(f"error={type(request_state.error).__name__}")
    if outputs := [output for output in request_state.outputs if output is not None]:
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
