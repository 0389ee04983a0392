"""Routes of the served model and its tokenizer."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request

from jaxserve.protocol.model import Model
from jaxserve.protocol.response_models import (
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
    TokenizerInfo,
)
from jaxserve.protocol.tokenizing import DetokenizeRequest, TokenizeRequest, tokenizer_info
from jaxserve.server.openapi import ERRORS, documented_responses
from jaxserve.server.preparation import prepared
from jaxserve.server.responses import JsonResponse

router = APIRouter()
_STARTED = int(time.time())


@router.get("/models", include_in_schema=False)  # A base URL without /v1: llama.cpp's clients.
@router.get("/v1/models", responses=documented_responses(ModelList) | ERRORS)
async def models(request: Request) -> JsonResponse:
    """List the served model, under each of its names, and its adapters."""
    model = request.app.state.service.model
    cards = [_card(model, name) for name in (*model.names, *model.adapters)]
    return JsonResponse({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}", responses=documented_responses(ModelCard) | ERRORS)
async def model(name: str, request: Request) -> JsonResponse:
    """The served model, by one of its names, or one of its adapters."""
    model = request.app.state.service.model
    model.named(name)
    return JsonResponse(_card(model, name))


@router.post("/tokenize", responses=documented_responses(Tokenized) | ERRORS)
async def tokenize(body: TokenizeRequest, request: Request) -> JsonResponse:
    """Token ids of a text or a conversation."""
    return JsonResponse(await prepared(request, body.answer, has_tools=bool(body.tools)))


@router.post("/detokenize", responses=documented_responses(Detokenized) | ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> JsonResponse:
    """The text of token ids."""
    return JsonResponse(await prepared(request, body.answer))


@router.get("/tokenizer_info", responses=documented_responses(TokenizerInfo) | ERRORS)
async def info(request: Request) -> JsonResponse:
    """Special tokens and the chat template."""
    return JsonResponse(tokenizer_info(request.app.state.service.model))


def _card(model: Model, name: str) -> dict[str, Any]:
    adapter = model.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "jaxserve",
        "root": model.name if adapter is None else adapter.path,
        "parent": None if adapter is None else model.name,
        "max_model_len": model.max_model_len,
    }
