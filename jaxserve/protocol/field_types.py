"""Types of request fields: what pydantic takes for each, and refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, GetPydanticSchema, StrictFloat
from pydantic_core import PydanticCustomError, core_schema

from jaxserve.core.requests.sampling_params import MAX_LOGIT_BIAS
from jaxserve.protocol.errors import REFUSED

T = TypeVar("T")

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
REQUEST_ID_RULE = "1 to 128 of A-Z a-z 0-9 . _ : -"

# A body may contain a million errors, of which one is reported: the types below make pydantic stop
# after a few.
ListOf = Annotated[list[T], Field(fail_fast=True)]


def valid_names(given: Any) -> Any:
    """Raises ValueError for an object with a name that UTF-8 cannot encode."""
    if isinstance(given, Mapping):
        try:
            "".join(given).encode()
        except (TypeError, UnicodeEncodeError):
            raise ValueError("must have names that are valid Unicode") from None
    return given


def _not_too_many(given: Any) -> Any:
    if isinstance(given, Mapping) and len(given) > MAX_LOGIT_BIAS:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries")
    return given


def _request_id(given: str) -> str:
    if not REQUEST_ID.fullmatch(given):
        raise ValueError(f"must be {REQUEST_ID_RULE}")
    return given


def only(*allowed: Any, remedy: str) -> BeforeValidator:
    """A validator that refuses, with a remedy, what is neither null nor one of `allowed`."""
    reason = f"must be {json.dumps(allowed[0])}" if allowed else "is not accepted"

    def check(given: Any) -> Any:
        if given is not None and given not in allowed:
            raise PydanticCustomError(REFUSED, "{said}", {"said": f"{reason}; {remedy}."})
        return given

    return BeforeValidator(check)


Integer = Annotated[
    int,
    GetPydanticSchema(
        lambda _kind, _handler: core_schema.custom_error_schema(
            core_schema.union_schema(
                [
                    core_schema.int_schema(strict=True),
                    core_schema.chain_schema(
                        [core_schema.float_schema(strict=True), core_schema.int_schema()]
                    ),
                ],
                mode="left_to_right",
            ),
            "int_type",
        ),
        lambda _schema, handler: handler(core_schema.int_schema()),
    ),
]
"""An integer of JSON, as 5.0 is too; neither text nor a boolean."""

JsonObject = Annotated[dict[str, Any], BeforeValidator(valid_names)]
Numbers = Annotated[dict[str, StrictFloat], BeforeValidator(_not_too_many)]
RequestId = Annotated[str, AfterValidator(_request_id)]
Ignored = Annotated[Any, Field(description="Accepted and ignored.")]
