"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from jaxserve.protocol.chat import ChatCompletionRequest
from jaxserve.protocol.completions import CompletionRequest
from jaxserve.protocol.responses import ChatCompletion, Completion
from jaxserve.server.answers import GeneratedAnswer
from jaxserve.server.documented import ERRORS, answered

router = APIRouter()


@router.post("/v1/completions", responses=answered(Completion, stream=True) | ERRORS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a text, or token ids, or several."""
    return await _generated(body, request)


@router.post("/v1/chat/completions", responses=answered(ChatCompletion, stream=True) | ERRORS)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await _generated(body, request)


async def _generated(body: CompletionRequest | ChatCompletionRequest, request: Request) -> Response:
    service = request.app.state.service
    # Templates and tokenizers take their time with long texts, in which streams must go on.
    call = await asyncio.to_thread(body.call, service.model)
    return GeneratedAnswer(service, call)
