"""What is known of one HTTP request beyond the request itself."""

from __future__ import annotations

import dataclasses

from starlette.types import Scope

from jaxserve.outputs import RequestOutput

_KEY = "jaxserve.notes"


@dataclasses.dataclass(eq=False)
class RequestNotes:
    """`outputs` has an entry for each prompt, None until that has ended. `tenant` stands for the
    API key that the request has shown, where one is needed."""

    request_id: str
    tenant: str | None = None
    outputs: list[RequestOutput | None] = dataclasses.field(default_factory=list)
    client_gone: bool = False
    error: BaseException | None = None


def note(scope: Scope, request_id: str) -> RequestNotes:
    """The notes of a request that begins."""
    scope[_KEY] = notes = RequestNotes(request_id)
    return notes


def notes_of(scope: Scope) -> RequestNotes:
    return scope[_KEY]
