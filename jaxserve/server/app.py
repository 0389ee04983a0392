"""The ASGI application: routes, error handlers and middleware."""

from __future__ import annotations

import dataclasses
import sys
from typing import get_type_hints

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxserve.core.errors import JaxserveError
from jaxserve.core.version import __version__
from jaxserve.protocol.errors import ErrorReply, field_error_of, reply_to
from jaxserve.server.background import BackgroundResponses
from jaxserve.server.disconnect import ClientGoneError
from jaxserve.server.http.connections import ConnectionLimits
from jaxserve.server.http.middleware import (
    OPEN_PATHS,
    ApiKeys,
    BodyLimit,
    HeaderChecks,
    RequestLimits,
    RootPath,
)
from jaxserve.server.request_log import CLIENT_GONE, RequestLog
from jaxserve.server.request_state import state_of
from jaxserve.server.response_store import ResponseStore
from jaxserve.server.responses import JsonResponse, error_response
from jaxserve.server.routes import cluster as cluster_routes
from jaxserve.server.routes import dev as dev_routes
from jaxserve.server.routes import docs as docs_routes
from jaxserve.server.routes import generation as generation_routes
from jaxserve.server.routes import model as model_routes
from jaxserve.server.routes import status as status_routes
from jaxserve.server.routes import stored as stored_routes
from jaxserve.server.service import Service

BODY_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class AppSettings:
    """Settings of the HTTP application.

    Attributes:
        api_keys: a request must send one of them, except to `OPEN_PATHS`; empty disables the check.
        max_body_bytes: maximum size of a request body.
        log_requests: log a line per request.
        allowed_hosts: names accepted in Host headers, in addition to localhost and addresses;
            None accepts any.
        metrics_without_api_key: /metrics needs no key either.
        root_path: path below which a proxy serves this application; "" is none.
        allowed_origins: origins of web pages that may use the server (CORS); "*" is any.
        dev_mode: add the routes that replace the weights, give memory back and load adapters.
        has_replicas: add the routes of several replicas.
    """

    api_keys: tuple[str, ...]
    max_body_bytes: int
    log_requests: bool
    allowed_hosts: tuple[str, ...] | None = None
    metrics_without_api_key: bool = False
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    dev_mode: bool = False
    has_replicas: bool = False


def create_app(
    service: Service, settings: AppSettings, limits: ConnectionLimits | None = None
) -> ASGIApp:
    """The ASGI application for a service, which may still be starting. `limits` are also those of
    requests in progress."""
    app = FastAPI(
        title="jaxserve",
        version=__version__,
        default_response_class=JsonResponse,
        docs_url=None,  # These pages load third-party scripts; /docs is of docs_routes.
        redoc_url=None,
    )
    app.state.service = service
    app.state.settings = settings
    app.state.stored = ResponseStore()
    app.state.background = BackgroundResponses(service, app.state.stored)
    all_routes = [generation_routes, stored_routes, model_routes, status_routes, docs_routes]
    all_routes += [dev_routes] * settings.dev_mode + [cluster_routes] * settings.has_replicas
    for routes in all_routes:
        app.include_router(routes.router)
    app.add_exception_handler(RequestValidationError, _bad_body)
    app.add_exception_handler(HTTPException, _bad_route)
    app.add_exception_handler(JaxserveError, _refused)
    app.add_exception_handler(ClientGoneError, _gone)
    app.add_exception_handler(Exception, _refused)
    guarded: ASGIApp = BodyLimit(app, settings.max_body_bytes, BODY_TIMEOUT_S)
    if settings.api_keys:
        more = ("/metrics",) if settings.metrics_without_api_key else ()
        guarded = ApiKeys(guarded, settings.api_keys, OPEN_PATHS + more)
    if settings.allowed_origins:  # Browsers ask without a key first.
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "Warning"],
        )
    guarded = HeaderChecks(guarded, settings.allowed_hosts, bool(settings.api_keys))
    guarded = RequestLimits(guarded, limits or ConnectionLimits())
    guarded = RequestLog(guarded, settings.log_requests)
    return RootPath(guarded, settings.root_path) if settings.root_path else guarded


async def _bad_body(request: Request, error: RequestValidationError) -> JsonResponse:
    # FastAPI prefixes each location with "body", which clients do not write.
    found = [{**each, "loc": each["loc"][1:]} for each in error.errors()]
    path = request.url.path
    if found[0]["type"] == "json_invalid":
        reason = found[0].get("ctx", {}).get("error", "")
        message = f"the body is not JSON: {reason} at character {found[0]['loc'][0]}."
        return error_response(ErrorReply(400, message, "invalid_request_error"), path)
    if isinstance(found[0]["input"], bytes):
        message = "the body must be JSON, and the header Content-Type application/json."
        return error_response(ErrorReply(400, message, "invalid_request_error"), path)
    body = get_type_hints(request.scope["endpoint"]).get("body")
    return error_response(reply_to(field_error_of(found, body)), path)


_DEV_PATHS = frozenset(route.path for route in dev_routes.router.routes)


async def _bad_route(request: Request, error: HTTPException) -> JsonResponse:
    path = request.scope["path"]
    detail = error.detail
    if error.status_code == 404 and path in _DEV_PATHS:
        detail += "; start the server with --dev-mode to have it"
    message = f"{request.method} {path!r:.80}: {detail}."
    if error.status_code == 400 and error.__cause__ is not None:  # FastAPI cannot read the body.
        message = f"the body cannot be read: {_reason(error.__cause__)}."
    reply = ErrorReply(error.status_code, message, "invalid_request_error")
    answer = error_response(reply, path)
    answer.headers.update(error.headers or {})
    return answer


def _reason(error: BaseException) -> str:
    """Why Python's JSON reader failed at a body that may be JSON."""
    match error:
        case RecursionError():
            return "its lists and objects are nested too deeply"
        case UnicodeDecodeError():
            return "it is not in UTF-8"
        case ValueError():
            return f"it has a number of over {sys.get_int_max_str_digits()} digits"
    return type(error).__name__


async def _gone(request: Request, error: ClientGoneError) -> Response:
    """An empty response, which the client that hung up will not read."""
    state_of(request.scope).client_gone = True
    return Response(status_code=CLIENT_GONE)


async def _refused(request: Request, error: Exception) -> JsonResponse:
    return error_response(reply_to(error), request.url.path)
