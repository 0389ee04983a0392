"""How the server is: for load balancers, scrapers and people."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

import jaxserve
from jaxserve.protocol.responses import Health, Version
from jaxserve.server.answers import JsonAnswer
from jaxserve.server.documented import ERRORS, answered

router = APIRouter()


@router.get(
    "/health",
    responses=answered(Health)
    | ERRORS
    | {503: {"model": Health, "description": "It takes no requests: starting, draining, failed."}},
)
async def health(request: Request) -> JsonAnswer:
    """Whether to send requests here."""
    state = request.app.state.service.state
    return JsonAnswer({"status": state}, 200 if state == "ready" else 503)


@router.get("/version", responses=answered(Version) | ERRORS)
async def version() -> JsonAnswer:
    """The version of jaxserve."""
    return JsonAnswer({"version": jaxserve.__version__})


@router.get(
    "/metrics",
    response_class=Response,
    responses=ERRORS
    | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Metrics."}},
)
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms, in Prometheus' format."""
    text = request.app.state.service.exposition.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)
