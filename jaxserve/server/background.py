"""Responses that are generated in the background: their clients poll for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterable
from typing import Any

from jaxserve.core.errors import JaxserveError, RequestError
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.engine.output_queue import Update
from jaxserve.protocol.errors import ErrorReply, FieldError, check_generated, renamed, reply_to
from jaxserve.protocol.responses_api.reply import ParsedResponses, ResponsesChunks
from jaxserve.server.response_store import ResponseStore
from jaxserve.server.service import Service

_log = logging.getLogger(__name__)

_TOO_LARGE = ErrorReply(
    500, "the response is too large to be stored; ask for less of it.", "server_error"
)


class BackgroundResponses:
    """Generates responses while no client waits for them. For one event loop.

    Stores each at its start and again at its end, if others took its place meanwhile.
    """

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store
        self._running: dict[tuple[str | None, str], asyncio.Task[None]] = {}

    async def begin(
        self, parsed: ParsedResponses, request_id: str, tenant: str | None
    ) -> dict[str, Any]:
        """Submit a request to the engine, and return its response, which is queued.

        Raises as `Service.submit`, and FieldError for a request that is too large to be stored.
        """
        chunks = parsed.chunks(request_id, int(time.time()))
        stack = contextlib.AsyncExitStack()
        try:
            updates = await stack.enter_async_context(
                self._service.submit(parsed, request_id, tenant)
            )
        except RequestError as error:
            raise renamed(error, parsed.names) from None
        if not parsed.store(chunks.without_output("in_progress")):
            await stack.aclose()
            raise FieldError(
                "background",
                "needs to store the response, for which the input is too large; "
                "leave it out, or shorten the input.",
            )
        queued = chunks.without_output("queued")
        task = asyncio.create_task(self._generate(parsed, chunks, stack, updates))
        self._running[tenant, queued["id"]] = task
        task.add_done_callback(lambda _: self._running.pop((tenant, queued["id"])))
        await asyncio.sleep(0)  # A task that is cancelled before it runs would not leave the stack.
        return queued

    async def cancel(self, tenant: str | None, response_id: str) -> None:
        """End a response's generation, if it is running; it is then cancelled."""
        if task := self._running.get((tenant, response_id)):
            task.cancel()
            await asyncio.wait({task})

    async def _generate(
        self,
        parsed: ParsedResponses,
        chunks: ResponsesChunks,
        stack: contextlib.AsyncExitStack,
        updates: AsyncIterable[tuple[int, Update]],
    ) -> None:
        outputs: list[RequestOutput] = []
        try:
            async with stack:
                async for _, update in updates:
                    if isinstance(update, RequestOutput):
                        outputs.append(update)
            check_generated(outputs)
            response = chunks.whole(outputs)
        except asyncio.CancelledError:
            parsed.store(chunks.without_output("cancelled"))
            raise
        except Exception as error:
            if not isinstance(error, JaxserveError):
                _log.exception("a response in the background failed")
            response = chunks.failure(reply_to(error))
        if not parsed.store(response):
            parsed.store(chunks.failure(_TOO_LARGE) | {"output": []})
