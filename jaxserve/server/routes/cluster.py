"""Routes of a server with several replicas: what they are, a rolling restart, another mesh."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter, HTTPException, Request

from jaxserve.core.cluster_status import ClusterStatus
from jaxserve.core.errors import ConfigError, RequestError
from jaxserve.protocol.administration import ResizeRequest
from jaxserve.server.openapi import ERRORS, documented_responses
from jaxserve.server.responses import JsonResponse

router = APIRouter()


@router.get("/cluster/status", responses=documented_responses(ClusterStatus) | ERRORS)
async def status(request: Request) -> JsonResponse:
    """What each replica is, and how far the latest rolling restart."""
    return await _status(request)


@router.post("/cluster/restart", responses=documented_responses(ClusterStatus) | ERRORS)
async def restart(request: Request) -> JsonResponse:
    """Begin to restart one replica after another: its requests continue in others. A server of
    several API keys refuses: one would slow down the others."""
    _check_alone(request)
    await request.app.state.service.cluster.restart_replicas()
    return await _status(request)


@router.post("/cluster/resize", responses=documented_responses(ClusterStatus) | ERRORS)
async def resize(body: ResizeRequest, request: Request) -> JsonResponse:
    """Begin to load a replica on another mesh; its requests continue with the KV that they have. A
    server of several API keys refuses."""
    _check_alone(request)
    sizes = body.model_dump(exclude={"replica"}, exclude_none=True)
    try:
        await request.app.state.service.cluster.resize_replica(body.replica, sizes)
    except ConfigError as error:  # Here the sizes are a client's.
        raise RequestError(str(error)) from error
    return await _status(request)


def _check_alone(request: Request) -> None:
    if len(request.app.state.settings.api_keys) > 1:
        raise HTTPException(403, "this server has several API keys, which share the replicas")


async def _status(request: Request) -> JsonResponse:
    found = await request.app.state.service.cluster.cluster_status()
    return JsonResponse(dataclasses.asdict(found))
