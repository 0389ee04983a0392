"""Errors in OpenAI's format: a status code and an `{"error": ...}` body."""

from __future__ import annotations

import dataclasses
import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from jaxserve.core.errors import (
    EngineAsleepError,
    EngineClosedError,
    JaxserveError,
    OutOfMemoryError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
    RestartError,
)
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.requests.sampling_params import SamplingParams

_PARAM = re.compile(r"(?:a token id of )?([a-z_]+)")
_PARAMS = {"prompt", "messages", *(field.name for field in dataclasses.fields(SamplingParams))}
_UNION_TAG = re.compile(r"[a-z-]+\[.*\]|str|int|float|bool|dict|none|[A-Z]\w*")
REFUSED = "refused"
"""The type of pydantic's errors whose message is a reason and a remedy."""

REMEDIES: Mapping[str, str] = {
    "functions": "use tools, its newer form",
    "function_call": "use tool_choice, its newer form",
    "audio": "leave it out: only text models are served",
    "web_search_options": "leave it out: only text models are served",
    "mm_processor_kwargs": "leave it out: only text models are served",
    "logits_processors": "start the server with --logits-processors, and use vllm_xargs",
    "kv_transfer_params": "leave it out: transfers are decided when the server starts",
    "guided_whitespace_pattern": "write x-guidance into the schema",
    "documents": "write them into the messages",
    "n_predict": "use max_tokens",
    "typical_p": "leave it out: that sampler is not there",
    "extra_body": "put its fields into the body",
}
"""What to do instead of sending a field that other servers have."""

_NEUTRAL: Mapping[str, object] = {
    "function_call": "none",
    "typical_p": 1,
    "best_of": 1,
    "mirostat": 0,
    "suffix": "",
    "early_stopping": False,
    "watermarking": False,
    "return_prompt_text": False,
    "timings_per_token": False,
    "return_progress": False,
}
"""Values of other servers' fields with which they change nothing."""

MAX_SHOWN_CHARS = 80
MAX_MESSAGE_CHARS = 2000
_SHOULD = re.compile(r"^[A-Z]\w+ should ")
_KIND = "Input should be "
_DICTIONARY = re.compile(r"a valid dictionary(?: or (?:instance|object) .+)?")
_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}
_CONSTANT = re.compile(r"\b(?:None|True|False)\b")
_SHORT = reprlib.Repr()  # It never formats the part that it leaves out.
_SHORT.maxstring = _SHORT.maxother = MAX_SHOWN_CHARS


FieldErrorCode = Literal["missing_required_parameter", "unknown_parameter", "invalid_value"]
ErrorCode = (
    FieldErrorCode
    | Literal[
        "invalid_request",
        "context_length_exceeded",
        "model_not_found",
        "response_not_found",
        "invalid_api_key",
        "host_not_allowed",
        "header_too_large",
        "body_too_large",
        "generation_failed",
        "overloaded",
        "unavailable",
    ]
)
"""Every `code` of an error response: clients may compare with them, so none is made of input."""


class FieldError(RequestError):
    """A field of a request body is missing, unknown, or invalid."""

    def __init__(self, field: str, message: str, code: FieldErrorCode = "invalid_value") -> None:
        """`field` is the path to the field, such as `messages[0].role`."""
        super().__init__(f"{field} {message}")
        self.field = field
        self.code = code


def name_by(names: Mapping[str, str], field: str) -> str:
    """A field's path in the client's request, by `names`: the first beginning of paths that fits is
    replaced by its value, in which `[]` stands for the index that it stands for in the key."""
    for name, other in names.items():
        pattern = re.escape(name).replace(r"\[\]", r"(\[\d+\])") + "(?![a-z_])"
        if found := re.match(pattern, field):
            index = found[1] if found.groups() else ""
            return other.replace("[]", index) + field[found.end() :]
    return field


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error of a field, by its name in the client's request (see `name_by`)."""
    field, _, message = str(error).partition(" ")
    other = name_by(names, field.rstrip(":"))
    if other == field.rstrip(":"):
        return error
    if field.endswith(":"):
        message = f"is refused: {message}"
    return FieldError(other, message, getattr(error, "code", "invalid_value"))


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""


class ResponseNotFoundError(RequestError):
    """A response is not stored, or not any more, or is another API key's."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id {response_id!r:.200} not found.")


class TextTooLongError(PromptTooLongError):
    """A text has too many characters to be tokenized, so that no field can have it truncated."""


class GenerationFailedError(RequestError):
    """Generation failed for a valid request."""


class UnavailableError(JaxserveError):
    """The server is starting, draining or failed, and accepts no requests."""


@dataclasses.dataclass(frozen=True)
class ErrorReply:
    """An error response; `retry_after_s` is the Retry-After header."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: ErrorCode | None = None
    retry_after_s: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        error = {name: getattr(self, name) for name in ("message", "type", "param", "code")}
        return {"error": error}


def reply_to(error: BaseException) -> ErrorReply:
    """The error response for an exception.

    An exception that is not a JaxserveError is a bug: status 500, without details.
    """
    message = _shortened(str(error))
    match error:
        case ModelNotFoundError():
            return ErrorReply(404, message, "invalid_request_error", "model", "model_not_found")
        case ResponseNotFoundError():
            return ErrorReply(404, message, "invalid_request_error", None, "response_not_found")
        case TextTooLongError():
            return _invalid(message, None, "context_length_exceeded")
        case PromptTooLongError():
            message += ", or set truncate_prompt_tokens to keep a part of the prompt"
            return _invalid(message, None, "context_length_exceeded")
        case GenerationFailedError():
            return ErrorReply(422, message, "invalid_request_error", None, "generation_failed")
        case FieldError(field=field, code=code):
            return _invalid(message, field, code)
        case OverloadedError():
            return ErrorReply(429, message, "rate_limit_error", None, "overloaded", 1)
        case RequestError():
            found = _PARAM.match(message)
            if found and found[1] in _PARAMS:
                return _invalid(message, found[1], "invalid_value")
            return _invalid(message, None, "invalid_request")
        case RestartError():
            return ErrorReply(409, message, "invalid_request_error")
        case UnavailableError() | EngineClosedError() | EngineAsleepError() | OutOfMemoryError():
            return ErrorReply(503, message, "service_unavailable_error", None, "unavailable", 5)
    return ErrorReply(500, "internal server error; see the server log.", "server_error")


def _shortened(message: str) -> str:
    """A message that may quote what a client sent, without its middle if it is long."""
    half = MAX_MESSAGE_CHARS // 2
    return message if len(message) <= 2 * half else f"{message[:half]} ... {message[-half:]}"


def check_generated(outputs: Sequence[RequestOutput]) -> None:
    """Raises GenerationFailedError if one of a request's outputs has an error."""
    for output in outputs:
        if output.error is not None:
            raise GenerationFailedError(output.error)


def asks(name: str, value: object) -> bool:
    """Whether a field that is not there would have changed the answer: null asks for nothing, and
    neither does an empty list or object of a field that other servers have."""
    if name in _NEUTRAL and value == _NEUTRAL[name]:
        return False
    return value is not None and not (name in REMEDIES and value in ([], {}))


def _invalid(message: str, param: str | None, code: ErrorCode) -> ErrorReply:
    return ErrorReply(400, message, "invalid_request_error", param, code)


def field_error(error: ValidationError, body: type[BaseModel] | None = None) -> FieldError:
    """The error of the first invalid field of a body, whose type knows the names of others."""
    return field_error_of(error.errors(include_url=False, include_context=False), body)


def field_error_of(errors: Sequence[dict[str, Any]], body: Any = None) -> FieldError:
    """Like `field_error`, from pydantic's list of errors."""
    first = errors[0]
    name = first["loc"][0] if first["loc"] else "body"
    # For a union, report the branch that matched deepest.
    found = max((e for e in errors if (e["loc"] or ("body",))[0] == name), key=_depth)
    path = _path(found["loc"])
    if found["type"] == "extra_forbidden":
        remedy = getattr(body, "remedies", {}).get(path) or REMEDIES.get(path)
        hint = f"{remedy}." if remedy else _meant(path, body) or "leave it out."
        return FieldError(path, f"is not a field of this request; {hint}", "unknown_parameter")
    if found["type"] == REFUSED:
        return FieldError(path, found["msg"])
    if found["type"] == "missing":
        return FieldError(path, "is missing; it is required.", "missing_required_parameter")
    # A union refuses a value once for each of its branches.
    same = [e["msg"] for e in errors if e["msg"].startswith(_KIND) and _path(e["loc"]) == path]
    return FieldError(path, f"{_asked(found['msg'], same)}, got {shown(found['input'])}.")


def _asked(message: str, same: Sequence[str]) -> str:
    """What a field must be, from one of pydantic's messages, and the `same` field's that name a
    kind of values."""
    if not _SHOULD.match(message):
        return message.removeprefix("Value error, ")
    named = same if message.startswith(_KIND) else [message]
    kinds = list(dict.fromkeys(_in_words(_SHOULD.sub("", each)) for each in named))
    either = ", or " if any(" or " in kind for kind in kinds) else " or "
    return "must " + either.join([*kinds[:1], *(kind.removeprefix("be ") for kind in kinds[1:])])


def _in_words(asked: str) -> str:
    """What pydantic asks for, in the words of JSON."""
    asked = _DICTIONARY.sub("an object", asked)
    return _CONSTANT.sub(lambda found: _JSON_WORDS[found[0]], asked)


def shown(value: Any) -> str:
    """A value from the client, truncated for an error message."""
    text = _JSON_WORDS.get(repr(value)) if isinstance(value, bool | None) else _SHORT.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def _meant(path: str, body: Any) -> str | None:
    """A field of the body whose name is almost this, if it is of a type with fields, and this not a
    part of another."""
    if "." in path:
        return None
    fields = getattr(body, "model_fields", {})
    return alike(path, [field.alias or name for name, field in fields.items()])


def alike(given: str, names: Iterable[str]) -> str | None:
    """A question for the one of `names` that is almost what was given, if there is one."""
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.8)
    return f"did you mean {close[0]}?" if close else None


def _depth(error: dict[str, Any]) -> int:
    return len(error["loc"])


def _path(loc: Sequence[int | str]) -> str:
    """`messages[0].role`, without the type names that pydantic inserts for unions."""
    path = ""
    for place, part in enumerate(loc):
        if isinstance(part, int):
            path += f"[{part}]"
        elif place == 0 or not _UNION_TAG.fullmatch(part):
            path += f".{part}" if path else part
    # The client chooses the names of unknown fields: truncate them, and escape invalid Unicode.
    return (path or "body")[:MAX_SHOWN_CHARS].encode("utf-8", "backslashreplace").decode()
