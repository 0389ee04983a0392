"""Routes of a server with several replicas: what they are, and a rolling restart."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter, HTTPException, Request

from jaxserve.core.cluster_status import ClusterStatus
from jaxserve.server.openapi import ERRORS, documented_responses
from jaxserve.server.responses import JsonResponse

router = APIRouter()


@router.get("/cluster/status", responses=documented_responses(ClusterStatus) | ERRORS)
async def status(request: Request) -> JsonResponse:
    """What each replica is, and how far the latest rolling restart."""
    return await _status(request)


@router.post("/cluster/restart", responses=documented_responses(ClusterStatus) | ERRORS)
async def restart(request: Request) -> JsonResponse:
    """Begin to restart one replica after another: its requests go on in others. A server of several
    API keys refuses: one would slow down the others."""
    if len(request.app.state.settings.api_keys) > 1:
        raise HTTPException(403, "this server has several API keys, which share the replicas")
    await request.app.state.service.cluster.restart_replicas()
    return await _status(request)


async def _status(request: Request) -> JsonResponse:
    found = await request.app.state.service.cluster.cluster_status()
    return JsonResponse(dataclasses.asdict(found))
