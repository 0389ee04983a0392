"""`/update_weights_from_disk`, as in SGLang."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxserve.protocol.fields import Fields, only

_NEVER = "leave it out: requests keep their tokens and go on"


class UpdateWeightsRequest(Fields):
    """A checkpoint on the server's machine."""

    model_path: str = Field(
        description="A directory or file, or a Hugging Face id, of the served model.",
        min_length=1,
        max_length=4096,
    )
    abort_all_requests: Annotated[bool | None, only(False, remedy=_NEVER)] = None
    flush_cache: Annotated[
        bool | None, only(True, remedy="pages of the old weights are never used again")
    ] = None
