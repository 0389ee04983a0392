"""The model that is served, and its tokenizer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request

from jaxserve.protocol.model import Model
from jaxserve.protocol.responses import (
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
    TokenizerInfo,
)
from jaxserve.protocol.tokenizing import DetokenizeRequest, TokenizeRequest, tokenizer_info
from jaxserve.server.answers import JsonAnswer
from jaxserve.server.documented import ERRORS, answered

router = APIRouter()
_STARTED = int(time.time())


@router.get("/v1/models", responses=answered(ModelList) | ERRORS)
async def models(request: Request) -> JsonAnswer:
    """The one model there is, under each of its names."""
    model = request.app.state.service.model
    return JsonAnswer({"object": "list", "data": [_card(model, name) for name in model.names]})


@router.get("/v1/models/{name:path}", responses=answered(ModelCard) | ERRORS)
async def model(name: str, request: Request) -> JsonAnswer:
    """One of the names."""
    model = request.app.state.service.model
    model.check_name(name)
    return JsonAnswer(_card(model, name))


@router.post("/tokenize", responses=answered(Tokenized) | ERRORS)
async def tokenize(body: TokenizeRequest, request: Request) -> JsonAnswer:
    """Token ids of a text or a conversation."""
    return JsonAnswer(await asyncio.to_thread(body.answer, request.app.state.service.model))


@router.post("/detokenize", responses=answered(Detokenized) | ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> JsonAnswer:
    """The text of token ids."""
    return JsonAnswer(await asyncio.to_thread(body.answer, request.app.state.service.model))


@router.get("/tokenizer_info", responses=answered(TokenizerInfo) | ERRORS)
async def info(request: Request) -> JsonAnswer:
    """Special tokens and the chat template."""
    return JsonAnswer(tokenizer_info(request.app.state.service.model))


def _card(model: Model, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "jaxserve",
        "root": model.name,
        "max_model_len": model.max_model_len,
    }
