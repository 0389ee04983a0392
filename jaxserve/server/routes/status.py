"""Routes about the server's state, and one to change it: the prefix cache is emptied."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from jaxserve.core.version import __version__
from jaxserve.protocol.response_models import Health, Load, ServerInfo, Version
from jaxserve.server.openapi import ERRORS, documented_responses
from jaxserve.server.responses import JsonResponse

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get(
    "/health",
    responses=documented_responses(Health)
    | ERRORS
    | {503: {"model": Health, "description": "Not ready: starting, stalled, draining or failed."}},
)
async def health(request: Request) -> JsonResponse:
    """Whether the server accepts requests."""
    state = request.app.state.service.state
    return JsonResponse({"status": state}, 200 if state == "ready" else 503)


@router.head("/livez", include_in_schema=False)
@router.get(
    "/livez",
    responses=documented_responses(Health)
    | ERRORS
    | {503: {"model": Health, "description": "The engine has failed."}},
)
async def livez(request: Request) -> JsonResponse:
    """Whether the process should be left alone: false if the engine has failed. For liveness
    probes."""
    state = request.app.state.service.state
    return JsonResponse({"status": state}, 503 if state == "failed" else 200)


@router.head("/ping", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> JsonResponse:
    """As `/health`, by SageMaker's name."""
    return await health(request)


@router.get("/load", responses=documented_responses(Load) | ERRORS)
async def load(request: Request) -> JsonResponse:
    """The number of sequences of requests that are not answered yet."""
    return JsonResponse({"server_load": request.app.state.service.num_sequences})


@router.get("/server_info", responses=documented_responses(ServerInfo) | ERRORS)
async def server_info(request: Request) -> JsonResponse:
    """The version, the model's names and the engine's settings."""
    service = request.app.state.service
    info = service.engine.info
    settings = dataclasses.asdict(info.config)
    shown = {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}
    shown["logits_processors"] = info.logits_processors
    shown["data_parallel_size"] = info.data_parallel_size
    names = list(service.model_names)
    return JsonResponse({"version": __version__, "models": names, "settings": shown})


@router.post("/reset_prefix_cache", response_class=Response, responses=ERRORS)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget the KV of finished requests, for measurements. A server of several API keys refuses:
    one would slow down the others."""
    if len(request.app.state.settings.api_keys) > 1:
        raise HTTPException(403, "this server has several API keys, which share the cache")
    await request.app.state.service.reset_prefix_cache()
    return Response()


@router.get("/version", responses=documented_responses(Version) | ERRORS)
async def version() -> JsonResponse:
    """The version of jaxserve."""
    return JsonResponse({"version": __version__})


@router.get(
    "/metrics",
    response_class=Response,
    responses=ERRORS
    | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Metrics."}},
)
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms, in Prometheus text format."""
    text = await request.app.state.service.metrics()
    return Response(text, media_type=CONTENT_TYPE_LATEST)
