"""Routes that `--dev-mode` adds: weights and adapters change, memory is given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse

from jaxserve.core.errors import ConfigError, ModelError, RequestError
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.protocol.administration import (
    LoadAdapterRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
)
from jaxserve.protocol.response_models import Sleeping, UpdatedWeights
from jaxserve.server.openapi import ERRORS, documented_responses
from jaxserve.server.responses import JsonResponse

router = APIRouter()


@router.post("/sleep", response_class=Response, responses=ERRORS)
async def sleep(request: Request, level: int = 1) -> Response:
    """Give the devices' memory back: drop the KV cache, and move the weights to host memory (level
    1) or drop them (2). Requests in flight continue after `/wake_up`; new ones get 503 until
    then."""
    with _errors_of_clients():
        await request.app.state.service.engine.sleep(level)
    return Response()


@router.post("/wake_up", response_class=Response, responses=ERRORS)
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
    """Take the memory again, all of it or what `tags` names: weights, kv_cache."""
    with _errors_of_clients():
        await request.app.state.service.engine.wake_up(tags)
    return Response()


@router.get("/is_sleeping", responses=documented_responses(Sleeping) | ERRORS)
async def is_sleeping(request: Request) -> JsonResponse:
    """Whether memory is missing that `/sleep` gave back."""
    return JsonResponse({"is_sleeping": request.app.state.service.engine.is_sleeping})


@router.post("/update_weights_from_disk", responses=documented_responses(UpdatedWeights) | ERRORS)
async def update_weights_from_disk(body: UpdateWeightsRequest, request: Request) -> JsonResponse:
    """Replace the weights by those of a checkpoint, between two steps. Requests in flight keep
    their tokens, and the new weights make the next ones."""
    with _errors_of_clients():
        version = await request.app.state.service.update_weights(body.model_path)
    message = f"the weights are now those of {body.model_path}"
    return JsonResponse({"success": True, "message": message, "weights_version": version})


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse, responses=ERRORS)
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> PlainTextResponse:
    """Load a LoRA adapter, while requests run: requests then use it by its name as their model.
    With `load_inplace` it takes the place of one with its name, which requests in flight keep."""
    with _errors_of_clients():
        adapter = LoRARequest(body.lora_name, body.lora_path)
        await request.app.state.service.add_lora(adapter, bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, responses=ERRORS)
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
    """Unload a LoRA adapter. Requests that use it continue, and its slot is free when they end."""
    await request.app.state.service.remove_lora(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@contextlib.contextmanager
def _errors_of_clients() -> Iterator[None]:
    """Here a checkpoint, an adapter and a level are a client's, and so are their errors."""
    try:
        yield
    except (ModelError, ConfigError) as error:
        raise RequestError(str(error)) from error
