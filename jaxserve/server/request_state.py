"""State of one HTTP request, kept in its ASGI scope."""

from __future__ import annotations

import dataclasses

from starlette.types import Scope

from jaxserve.core.requests.outputs import RequestOutput

_KEY = "jaxserve.request_state"


@dataclasses.dataclass(eq=False)
class RequestState:
    """`outputs` has an entry for each prompt, None until it has finished. `tenant` identifies the
    request's API key, if keys are required. `id_is_new` unless the client gave the id."""

    request_id: str
    id_is_new: bool
    tenant: str | None = None
    outputs: list[RequestOutput | None] = dataclasses.field(default_factory=list)
    client_gone: bool = False
    error: BaseException | None = None


def create(scope: Scope, request_id: str, id_is_new: bool) -> RequestState:
    """Create the state of a new request."""
    scope[_KEY] = request_state = RequestState(request_id, id_is_new)
    return request_state


def state_of(scope: Scope) -> RequestState:
    return scope[_KEY]
