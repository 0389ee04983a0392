"""State of one HTTP request, kept in its ASGI scope."""

from __future__ import annotations

import dataclasses

from starlette.types import Scope

from jaxserve.core.outputs import RequestOutput

_KEY = "jaxserve.notes"


@dataclasses.dataclass(eq=False)
class RequestState:
    """`outputs` has an entry for each prompt, None until it has finished. `tenant` identifies the
    request's API key, if keys are required."""

    request_id: str
    tenant: str | None = None
    outputs: list[RequestOutput | None] = dataclasses.field(default_factory=list)
    client_gone: bool = False
    error: BaseException | None = None


def note(scope: Scope, request_id: str) -> RequestState:
    """Create the state of a new request."""
    scope[_KEY] = request_state = RequestState(request_id)
    return request_state


def state_of(scope: Scope) -> RequestState:
    return scope[_KEY]
