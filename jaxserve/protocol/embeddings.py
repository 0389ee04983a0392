"""`/v1/embeddings` as in OpenAI's API, and `/v1/score` as in vLLM."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, StrictBool

from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.requests.pooling import Pooling, PoolingParams, pairs, similarity
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.protocol.errors import UnavailableError
from jaxserve.protocol.field_types import Integer, ListOf
from jaxserve.protocol.fields import PromptFields
from jaxserve.protocol.model import Model
from jaxserve.protocol.prompts import Prompts, tokenized

Encoding = Literal["float", "base64"]


class _PoolingFields(PromptFields):
    """Fields of both endpoints."""

    pooling: Pooling | None = Field(
        None, description="The last token's hidden state, by default, or the mean over all tokens."
    )
    add_special_tokens: StrictBool | None = None
    truncate_prompt_tokens: Integer | None = Field(
        None, description="Longest text in tokens, cut off on the left; -1: the longest that fits."
    )

    def _params(self, **fields: Any) -> PoolingParams:
        given = {"pooling": self.pooling, "priority": self.priority} | fields
        return PoolingParams(**{name: value for name, value in given.items() if value is not None})

    def _tokenized(
        self, model: Model, field: str, given: str | Sequence[Any]
    ) -> list[TokenizedPrompt]:
        """Raises FieldError for no texts, too many, or one that is empty or cannot be read,
        PromptTooLongError."""
        self.check_truncation()
        keep = self.truncate_prompt_tokens
        keep = model.max_model_len - 1 if keep == -1 else keep
        prompts = tokenized(model, field, given, self.add_special_tokens, keep is not None)
        if keep is None:
            return prompts
        return [TokenizedPrompt(None, prompt.token_ids[-keep:]) for prompt in prompts]


class EmbeddingRequest(_PoolingFields):
    """The request body: OpenAI's fields, and some of vLLM's."""

    input: Prompts = Field(
        description="Text or token ids, or a list of either.", examples=["The sky is blue"]
    )
    encoding_format: Encoding | None = Field(
        None, description="Numbers, by default, or the base64 of little-endian float32."
    )
    dimensions: Integer | None = Field(
        None, description="Numbers to keep of each embedding, from the first on."
    )
    normalize: StrictBool | None = Field(
        None, description="Whether to scale embeddings to length 1, which is the default."
    )

    def parse(self, model: Model) -> ParsedEmbedding:
        """Convert the body to a request for the engine. Raises RequestError."""
        model = model.named(self.model)
        params = self._params(dimensions=self.dimensions, normalize=self.normalize)
        return ParsedEmbedding(
            model=model,
            prompts=tuple(self._tokenized(model, "input", self.input)),
            params=params,
            cache_salt=self.cache_salt or None,
            encoding=self.encoding_format or "float",
        )


class ScoreRequest(_PoolingFields):
    """The request body: texts to compare, one with all of `text_2`, or pair by pair."""

    text_1: str | ListOf[str] = Field(examples=["The sky"])
    text_2: str | ListOf[str] = Field(examples=[["The sea", "A train"]])

    def parse(self, model: Model) -> ParsedScore:
        """Convert the body to a request for the engine. Raises RequestError."""
        model = model.named(self.model)
        first, second = ([t] if isinstance(t, str) else t for t in (self.text_1, self.text_2))
        compared = pairs(first, second)
        prompts = [*self._tokenized(model, "text_1", first)]
        prompts += self._tokenized(model, "text_2", second)
        return ParsedScore(
            model=model,
            prompts=tuple(prompts),
            params=self._params(),
            cache_salt=self.cache_salt or None,
            compared=tuple((a, len(first) + b) for a, b in compared),
        )


@dataclasses.dataclass(frozen=True)
class _Parsed:
    """A request of one or more texts, whose embeddings the response is made of."""

    model: Model
    prompts: tuple[TokenizedPrompt, ...]
    params: PoolingParams
    cache_salt: str | None

    beam: ClassVar[None] = None
    stream: ClassVar[bool] = False
    ignored_tools: ClassVar[str | None] = None

    @property
    def lora_request(self) -> LoRARequest | None:
        return self.model.lora_request

    def _body(self, outputs: Sequence[RequestOutput], data: list[dict[str, Any]]) -> dict[str, Any]:
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return {
            "object": "list",
            "model": self.model.name,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


@dataclasses.dataclass(frozen=True)
class ParsedEmbedding(_Parsed):
    """A request for embeddings."""

    names: ClassVar[Mapping[str, str]] = MappingProxyType({"prompt": "input"})
    encoding: Encoding

    def response(
        self, outputs: Sequence[RequestOutput], request_id: str, created: int
    ) -> dict[str, Any]:
        """The response body, from each prompt's output."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(output)}
            for index, output in enumerate(outputs)
        ]
        head = {"id": f"embd-{request_id}", "created": created}
        return head | self._body(outputs, data)

    def _encoded(self, output: RequestOutput) -> list[float] | str:
        if output.embedding is None:
            raise _aborted()
        if self.encoding == "float":
            return output.embedding
        return base64.b64encode(np.asarray(output.embedding, "<f4").tobytes()).decode()


@dataclasses.dataclass(frozen=True)
class ParsedScore(_Parsed):
    """A request for scores of pairs of `prompts`, by index."""

    names: ClassVar[Mapping[str, str]] = MappingProxyType({"prompt": "text_2"})
    compared: tuple[tuple[int, int], ...]

    def response(
        self, outputs: Sequence[RequestOutput], request_id: str, created: int
    ) -> dict[str, Any]:
        """The response body, from each prompt's output."""
        if any(output.embedding is None for output in outputs):
            raise _aborted()
        vectors = [output.embedding for output in outputs]
        data = [
            {"object": "score", "index": index, "score": similarity(vectors[a], vectors[b])}
            for index, (a, b) in enumerate(self.compared)
        ]
        head = {"id": f"score-{request_id}", "created": created}
        return head | self._body(outputs, data)


def _aborted() -> UnavailableError:
    return UnavailableError("the request was aborted; retry on another server.")
