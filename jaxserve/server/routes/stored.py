"""Routes of stored responses. Each API key has its own; others are not found."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query, Request, Response

from jaxserve.core.errors import RequestError
from jaxserve.protocol.errors import FieldError
from jaxserve.protocol.response_models import DeletedResponse, InputItems
from jaxserve.protocol.response_models import Response as ResponsesResponse
from jaxserve.protocol.responses_api.stored import StoredResponse
from jaxserve.server.openapi import ERRORS, documented_responses
from jaxserve.server.preparation import prepared
from jaxserve.server.request_state import state_of
from jaxserve.server.responses import JsonResponse, to_json

router = APIRouter()


@router.get("/responses/{response_id}", include_in_schema=False)
@router.get(
    "/v1/responses/{response_id}", responses=documented_responses(ResponsesResponse) | ERRORS
)
async def response(response_id: str, request: Request, stream: bool = False) -> Response:
    """A stored response."""
    stored = _stored(request, response_id)
    if stream:
        raise FieldError("stream", "is only for the request that generates; leave it out.")
    return Response(stored.response, media_type="application/json")


@router.delete("/responses/{response_id}", include_in_schema=False)
@router.delete(
    "/v1/responses/{response_id}", responses=documented_responses(DeletedResponse) | ERRORS
)
async def delete(response_id: str, request: Request) -> JsonResponse:
    """Forget a stored response, and end its generation. Responses that continued from it keep its
    items."""
    tenant = state_of(request.scope).tenant
    await request.app.state.background.cancel(tenant, response_id)
    request.app.state.stored.delete(tenant, response_id)
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/responses/{response_id}/input_items", include_in_schema=False)
@router.get(
    "/v1/responses/{response_id}/input_items", responses=documented_responses(InputItems) | ERRORS
)
async def input_items(
    response_id: str,
    request: Request,
    order: Literal["asc", "desc"] = "desc",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> Response:
    """All items that the model read for a stored response, those of earlier responses included."""
    stored = _stored(request, response_id)
    page = await prepared(
        request,
        lambda _: to_json(stored.input_items(order, limit, after)),
        more_bytes=len(stored.conversation.text),
    )
    return Response(page, media_type="application/json")


@router.post("/responses/{response_id}/cancel", include_in_schema=False)
@router.post(
    "/v1/responses/{response_id}/cancel",
    responses=documented_responses(ResponsesResponse) | ERRORS,
)
async def cancel(response_id: str, request: Request) -> Response:
    """End the generation of a response in the background. One that has ended stays as it is."""
    if not _stored(request, response_id).in_background:
        raise RequestError(
            "Cannot cancel a synchronous response, which is complete; to cancel a request, close "
            "its connection."
        )
    await request.app.state.background.cancel(state_of(request.scope).tenant, response_id)
    return Response(_stored(request, response_id).response, media_type="application/json")


@router.post("/responses/{name}", include_in_schema=False)
@router.post("/v1/responses/{name}", include_in_schema=False)
async def no_such_route(name: str) -> Response:
    """What OpenAI has beside its responses, such as `input_tokens`, which is not there: for the
    routes above, which have other methods, it would be the id of a response."""
    detail = "Not Found"
    if name == "input_tokens":
        detail += "; /tokenize and /v1/messages/count_tokens count tokens"
    raise HTTPException(404, detail)


def _stored(request: Request, response_id: str) -> StoredResponse:
    return request.app.state.stored.get(state_of(request.scope).tenant, response_id)
