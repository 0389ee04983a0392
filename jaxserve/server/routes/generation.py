"""Routes that generate: completions, chats, responses and messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from jaxserve.protocol.chat.batched import BatchedChatsRequest
from jaxserve.protocol.chat.request import ChatCompletionRequest
from jaxserve.protocol.completions import CompletionRequest
from jaxserve.protocol.embeddings import EmbeddingRequest, ScoreRequest
from jaxserve.protocol.errors import FieldError, ResponseNotFoundError, field_error
from jaxserve.protocol.field_types import JsonObject
from jaxserve.protocol.fields import GenerationFields
from jaxserve.protocol.messages_api.request import CountTokensRequest, MessagesRequest
from jaxserve.protocol.model import Model
from jaxserve.protocol.response_models import (
    ChatCompletion,
    Completion,
    Embeddings,
    InputTokens,
    Scores,
)
from jaxserve.protocol.response_models import Message as MessageResponse
from jaxserve.protocol.response_models import Response as ResponsesResponse
from jaxserve.protocol.responses_api.request import ResponsesRequest
from jaxserve.server.openapi import ERRORS, MESSAGE_ERRORS, documented_responses
from jaxserve.server.preparation import prepared
from jaxserve.server.request_state import state_of
from jaxserve.server.responses import GeneratedResponse, JsonResponse, warning_of

router = APIRouter()

T = TypeVar("T")

_INVOCATIONS: Mapping[str, type[CompletionRequest | ChatCompletionRequest | EmbeddingRequest]] = {
    "messages": ChatCompletionRequest,
    "prompt": CompletionRequest,
    "input": EmbeddingRequest,
}
"""The request of an invocation, by the field that only it has."""


@router.post("/v1/completions", responses=documented_responses(Completion, stream=True) | ERRORS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Complete a prompt, given as text or token ids, or several prompts."""
    return await _generated(body, request)


@router.post("/chat/completions", include_in_schema=False)  # A base URL without /v1: llama.cpp's.
@router.post(
    "/v1/chat/completions", responses=documented_responses(ChatCompletion, stream=True) | ERRORS
)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    return await _generated(body, request)


@router.post("/v1/chat/completions/batch", responses=documented_responses(ChatCompletion) | ERRORS)
async def batched_chats(body: BatchedChatsRequest, request: Request) -> Response:
    """Generate the next message of each of several conversations, as vLLM does."""
    # Each prompt may have most of the body, its tools.
    more = len(await request.body()) * len(body.messages)
    parsed = await _parse(body, body.parse, request, more_bytes=more)
    return GeneratedResponse(request.app.state.service, parsed)


@router.post("/responses", include_in_schema=False)
@router.post(
    "/v1/responses", responses=documented_responses(ResponsesResponse, stream=True) | ERRORS
)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, in OpenAI's newer format. The response is stored in memory, unless
    `store` is false. In the background it is generated while the client polls for it."""
    store, tenant = request.app.state.stored, state_of(request.scope).tenant
    before = None
    if body.previous_response_id is not None:
        try:
            previous = store.get(tenant, body.previous_response_id)
        except ResponseNotFoundError:
            raise FieldError(
                "previous_response_id",
                f"is {body.previous_response_id!r:.200}, which is not stored, or not any more; "
                "send the whole conversation as input.",
            ) from None
        if not previous.is_complete:
            raise FieldError("previous_response_id", "is not complete yet; poll for it first.")
        before = previous.conversation
    parse = functools.partial(body.parse, before=before, keep=functools.partial(store.add, tenant))
    more = 0 if before is None else len(before.text)
    parsed = await _parse(body, parse, request, more_bytes=more)
    if not parsed.in_background:
        return GeneratedResponse(request.app.state.service, parsed)
    request_id = state_of(request.scope).request_id
    queued = await request.app.state.background.begin(parsed, request_id, tenant)
    return JsonResponse(queued, headers=warning_of(parsed))


@router.post(
    "/v1/messages", responses=documented_responses(MessageResponse, stream=True) | MESSAGE_ERRORS
)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Generate the next message of a conversation, in Anthropic's format."""
    return await _generated(body, request)


@router.post(
    "/v1/messages/count_tokens", responses=documented_responses(InputTokens) | MESSAGE_ERRORS
)
async def count_tokens(body: CountTokensRequest, request: Request) -> JsonResponse:
    """The length of a conversation in tokens, in Anthropic's format."""
    return JsonResponse(await prepared(request, body.answer, has_tools=bool(body.tools)))


@router.post("/v1/embeddings", responses=documented_responses(Embeddings) | ERRORS)
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embed a text, given as text or token ids, or several texts."""
    return await _generated(body, request)


@router.post("/score", responses=documented_responses(Scores) | ERRORS, include_in_schema=False)
@router.post("/v1/score", responses=documented_responses(Scores) | ERRORS)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Compare texts: the cosine similarity of their embeddings."""
    return await _generated(body, request)


@router.post("/invocations", include_in_schema=False)
async def invocations(body: JsonObject, request: Request) -> Response:
    """A chat, a completion or embeddings, whichever the body asks for, by SageMaker's name."""
    kind = next((kind for name, kind in _INVOCATIONS.items() if name in body), None)
    if kind is None:
        raise FieldError("body", f"must have one of the fields {', '.join(_INVOCATIONS)}.")
    try:
        parsed = kind.model_validate(body)
    except ValidationError as error:
        raise field_error(error, kind) from None
    return await _generated(parsed, request)


async def _generated(
    body: CompletionRequest
    | ChatCompletionRequest
    | MessagesRequest
    | EmbeddingRequest
    | ScoreRequest,
    request: Request,
) -> Response:
    parsed = await _parse(body, body.parse, request)
    return GeneratedResponse(request.app.state.service, parsed)


async def _parse(
    body: GenerationFields | EmbeddingRequest,
    parse: Callable[[Model], T],
    request: Request,
    more_bytes: int = 0,
) -> T:
    """A body converted by `parse` to a request for the engine, whose id it may give. `more_bytes`
    are converted too."""
    state = state_of(request.scope)
    if body.request_id is not None and state.id_is_new:
        state.request_id = body.request_id
    has_tools = bool(getattr(body, "tools", None))
    return await prepared(request, parse, has_tools, more_bytes)
