"""Parse lines of a batch file into requests, or into error results."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Literal

from jaxserve.core.requests.outputs import RequestMetrics, RequestOutput
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.offline.custom_ids import custom_id_of, seed_of
from jaxserve.offline.journal import Result
from jaxserve.offline.lines import LineFields
from jaxserve.protocol.endpoints import ENDPOINTS, ParsedGeneration
from jaxserve.protocol.errors import (
    ErrorCode,
    FieldError,
    GenerationFailedError,
    check_generated,
    reply_to,
)
from jaxserve.protocol.model import Model

_log = logging.getLogger(__name__)

LineErrorCode = ErrorCode | Literal["invalid_line", "duplicate_custom_id", "internal_error"]
"""Every code of a line's `error`; the last three are of batch jobs alone."""
_ENVELOPE = {"custom_id", "method", "url", "body"}


@dataclasses.dataclass(frozen=True)
class BatchRequest:
    """A valid line."""

    number: int
    custom_id: str
    call: ParsedGeneration
    seed: int

    @property
    def prompts(self) -> tuple[TokenizedPrompt, ...]:
        return self.call.prompts

    def params(self, place: int) -> SamplingParams:
        """Sampling parameters of prompt `place`, with a seed that depends on the line alone."""
        params = self.call.params
        if params.seed is not None:
            return params
        return dataclasses.replace(params, seed=seed_of(self.custom_id, place, self.seed))

    def result(self, outputs: list[RequestOutput], created: int) -> Result:
        """The result, which does not depend on timing or on other requests."""
        try:
            check_generated(outputs)
        except GenerationFailedError as error:
            return refused(self.number, self.custom_id, error)
        name = f"batch_req_{self.number}"
        try:
            body = self.call.response(_without_metrics(outputs), name, created)
        except Exception as error:  # A bug fails one line, not the job.
            _log.exception("the result of line %d could not be created.", self.number)
            return refused(self.number, self.custom_id, error, "internal_error")
        body["usage"].pop("prompt_tokens_details", None)
        response = {"status_code": 200, "request_id": name, "body": body}
        return Result.of(self.number, custom_id=self.custom_id, response=response, error=None)


def parse(record: LineFields, number: int, model: Model, seed: int) -> BatchRequest:
    """Parse a line: a body in OpenAI's batch format, or just a body with `prompt` or `messages`. A
    line without a seed is seeded from its custom_id and the job's `seed`.

    Raises RequestError.
    """
    custom_id = custom_id_of(record, number)
    url, body = _url_and_body(record)
    endpoint = ENDPOINTS.get(url) if isinstance(url, str) else None
    if endpoint is None:
        raise FieldError("url", f"is {url!r:.80}; it must be one of {', '.join(ENDPOINTS)}.")
    call = endpoint.parse(body, model)
    if call.stream:
        raise FieldError("stream", "is true, but batch jobs cannot stream; leave it out.")
    if call.beam is not None:
        raise FieldError("use_beam_search", "is true, but batch jobs only sample; leave it out.")
    if call.ignored_tools is not None:  # A result has no header to say so.
        raise FieldError("tools", f"are refused: {call.ignored_tools}")
    return BatchRequest(number, custom_id, call, seed)


def refused(
    number: int, custom_id: str, error: Exception, code: LineErrorCode | None = None
) -> Result:
    """The result of a line that failed with `error`; by default its code is the server's."""
    reply = reply_to(error)
    code = code or reply.code or "internal_error"
    return Result.of(
        number,
        custom_id=custom_id,
        response={
            "status_code": reply.status,
            "request_id": f"batch_req_{number}",
            "body": reply.body,
        },
        error={"code": code, "message": f"line {number}: {reply.message}"},
    )


def _without_metrics(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Outputs without times and cache hits, which depend on other requests."""
    return [
        dataclasses.replace(output, metrics=RequestMetrics(output.metrics.arrival_us))
        for output in outputs
    ]


def _url_and_body(record: LineFields) -> tuple[Any, Any]:
    if "url" in record or "body" in record:
        if unknown := sorted(set(record) - _ENVELOPE):
            raise FieldError(
                unknown[0][:80],
                "is not a field of a batch line; leave it out.",
                "unknown_parameter",
            )
        method = record.get("method", "POST")
        if method != "POST":
            raise FieldError("method", f"is {method!r:.80}; it must be POST.")
        for name in ("url", "body"):
            if name not in record:
                raise FieldError(
                    name,
                    "is missing; a batch line needs custom_id, url and body.",
                    "missing_required_parameter",
                )
        return record["url"], record["body"]
    body = {name: value for name, value in record.items() if name != "custom_id"}
    match "prompt" in body, "messages" in body:
        case True, False:
            return "/v1/completions", body
        case False, True:
            return "/v1/chat/completions", body
        case True, True:
            raise FieldError("prompt", "and messages conflict; give one of them.")
    raise FieldError(
        "prompt",
        "is missing; a line needs url and body, or prompt, or messages.",
        "missing_required_parameter",
    )
