"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from jaxserve.protocol.chat import ChatCompletionRequest
from jaxserve.protocol.completions import CompletionRequest
from jaxserve.protocol.responses import ChatCompletion, Completion
from jaxserve.server.openapi import ERRORS, documented_responses
from jaxserve.server.request_state import state_of
from jaxserve.server.responses import GeneratedResponse
from jaxserve.server.workers import prepared

router = APIRouter()


@router.post("/v1/completions", responses=documented_responses(Completion, stream=True) | ERRORS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Complete a prompt, given as text or token ids, or several prompts."""
    return await _generated(body, request)


@router.post(
    "/v1/chat/completions", responses=documented_responses(ChatCompletion, stream=True) | ERRORS
)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    return await _generated(body, request)


async def _generated(body: CompletionRequest | ChatCompletionRequest, request: Request) -> Response:
    service, state = request.app.state.service, state_of(request.scope)
    if body.request_id is not None and state.id_is_new:
        state.request_id = body.request_id
    call = await prepared(request, body.call, has_tools=bool(getattr(body, "tools", None)))
    return GeneratedResponse(service, call)
