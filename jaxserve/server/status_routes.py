"""Health, version and metrics routes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from jaxserve.core.version import __version__
from jaxserve.protocol.responses import Health, Version
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
    text = request.app.state.service.exposition.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)
