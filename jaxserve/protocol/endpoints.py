"""The generation endpoints of batch jobs, by path: parse a body into a request for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel, ValidationError

from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.outputs import Delta, RequestOutput
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.beam_search import BeamSearchParams
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.protocol.chat.request import ChatCompletionRequest
from jaxserve.protocol.completions import CompletionRequest
from jaxserve.protocol.errors import ErrorReply, FieldError, field_error, shown
from jaxserve.protocol.model import Model
from jaxserve.protocol.responses_api.request import ResponsesRequest


class Chunks(Protocol):
    """A streamed response: `begin`, then `add` for each update of a prompt, then `end`; or `failed`
    at any time."""

    def begin(self) -> Iterator[dict[str, Any]]: ...

    def add(self, number: int, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]: ...

    def end(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]: ...

    def failed(self, reply: ErrorReply) -> Iterator[dict[str, Any]]: ...


class ParsedRequest(Protocol):
    """A validated request: its prompts, parameters, and response format. With `beam` it is a beam
    search, of which `params` has the limits and the width as `n`. `ignored_tools` says why
    the response is made without its tools, and what to do instead. `names` are the client's names
    of fields that the engine's errors call otherwise (see `errors.name_by`)."""

    @property
    def prompts(self) -> tuple[TokenizedPrompt, ...]: ...
    @property
    def params(self) -> SamplingParams | PoolingParams: ...
    @property
    def beam(self) -> BeamSearchParams | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def lora_request(self) -> LoRARequest | None: ...
    @property
    def stream(self) -> bool: ...
    @property
    def ignored_tools(self) -> str | None: ...
    @property
    def names(self) -> Mapping[str, str]: ...

    def response(
        self, outputs: Sequence[RequestOutput], request_id: str, created: int
    ) -> dict[str, Any]: ...


class ParsedGeneration(ParsedRequest, Protocol):
    """A validated request to generate, whose response can be streamed. With `named_events` the
    events of its stream are named by their `type`, and no `[DONE]` follows them."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def named_events(self) -> bool: ...

    def chunks(self, request_id: str, created: int) -> Chunks: ...


class Endpoint(NamedTuple):
    """The request type of one path."""

    request: type[BaseModel]

    def parse(self, body: Mapping[str, Any], model: Model) -> ParsedGeneration:
        """Raises RequestError, naming the invalid field."""
        if not isinstance(body, Mapping):
            raise FieldError("body", f"must be a JSON object, got {shown(body)}.")
        try:
            request = self.request.model_validate(body)
        except ValidationError as error:
            raise field_error(error, self.request) from None
        return request.parse(model)


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/completions": Endpoint(CompletionRequest),
    "/v1/chat/completions": Endpoint(ChatCompletionRequest),
    "/v1/responses": Endpoint(ResponsesRequest),
}
