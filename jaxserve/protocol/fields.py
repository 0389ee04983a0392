"""Request fields shared by both endpoints, with OpenAI's names or else vLLM's."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    model_validator,
)

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.beam_search import MAX_BEAM_WIDTH, BeamSearchParams
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.protocol.errors import FieldError, asks, renamed
from jaxserve.protocol.field_types import (
    Ignored,
    Integer,
    JsonObject,
    ListOf,
    Numbers,
    RequestId,
)
from jaxserve.protocol.model import Model

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)} - {"logprobs"}

_NOT_OF_BEAMS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "prompt_logprobs",
    "logprob_token_ids",
    "thinking_token_budget",
)
"""Fields of sampling parameters that a beam search cannot honor."""

_CONSTRAINTS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""Fields that are one of `structured_outputs`: vLLM's older names, and llama.cpp's."""


@functools.cache
def _names_of(body: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


class Fields(BaseModel):
    """A part of a request; null means absent. Unknown fields are rejected, unless a subclass has
    another `extra`, or other servers have them and the value asks for nothing."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, serialize_by_alias=True)
    remedies: ClassVar[Mapping[str, str]] = {}
    """What to do instead of sending a field that other requests have, as `errors.REMEDIES`."""

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, given: Any) -> Any:
        """Keep only the first unknown field that asks for something, which the request is rejected
        for."""
        if not isinstance(given, Mapping) or cls.model_config["extra"] != "forbid":
            return given
        known = _names_of(cls)
        asked = (name for name in given if name not in known and asks(name, given[name]))
        refused = next(asked, None)
        return {name: value for name, value in given.items() if name in known or name is refused}


class StreamOptions(Fields):
    """Options of a streamed response."""

    include_usage: StrictBool | None = Field(
        None, description="Whether a last chunk reports token usage."
    )
    continuous_usage_stats: StrictBool | None = Field(
        None, description="With include_usage, every chunk reports the usage so far."
    )
    include_obfuscation: StrictBool | None = Field(
        None, description="Accepted and ignored: chunks are never padded."
    )


class JsonSchema(Fields):
    """A JSON schema. It is always enforced, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Fields):
    """The output format: any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: JsonObject | None = Field(
        None, alias="schema", description="With the type json_object: the object's schema."
    )

    @property
    def constraint(self) -> dict[str, Any] | None:
        """As fields of `structured_outputs`. Raises FieldError if the schema is missing."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError(
                "response_format",
                "needs a json_schema when its type is json_schema, and takes none otherwise.",
            )
        if self.schema_ is not None and self.type != "json_object":
            raise FieldError("response_format.schema", "is only for the type json_object.")
        if self.type == "json_schema":
            if self.json_schema.schema_ is None:
                raise FieldError(
                    "response_format.json_schema.schema",
                    "is missing; it is required.",
                    "missing_required_parameter",
                )
            return {"json": self.json_schema.schema_}
        if self.schema_ is not None:
            return {"json": self.schema_}
        return {"json_object": True} if self.type == "json_object" else None


class StructuredFields(Fields):
    """One of these constrains the output, as in vLLM."""

    json_: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    json_object: StrictBool | None = None
    disable_additional_properties: StrictBool | None = Field(
        None,
        description="Whether objects have only the properties that their schema declares, unless "
        "it has additionalProperties; true by default. The JSON Schema standard has false.",
    )


class PromptFields(Fields):
    """Fields of all requests that the engine runs."""

    model: str | None = None
    request_id: RequestId | None = Field(
        None, description="The request's id, if the header X-Request-Id gives none."
    )
    cache_salt: str | None = Field(
        None, description="Only requests with the same salt share cached prefixes."
    )
    truncate_prompt_tokens: Integer | None = None
    priority: Integer | None = None
    user: Ignored = None

    def check_truncation(self) -> None:
        """Raises FieldError."""
        keep = self.truncate_prompt_tokens
        if keep is not None and keep != -1 and keep < 1:
            raise FieldError("truncate_prompt_tokens", f"is {keep}; it must be at least 1, or -1.")


class GenerationFields(PromptFields):
    """Sampling, stopping and output fields. SamplingParams defines their ranges."""

    n: Integer | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: Integer | None = None
    min_p: StrictFloat | None = None
    presence_penalty: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    seed: Integer | None = None
    logit_bias: Numbers | None = None
    allowed_token_ids: ListOf[Integer] | None = None
    bad_words: ListOf[str] | None = None

    add_special_tokens: StrictBool | None = Field(
        None,
        description="Whether to add the tokenizer's special tokens to the prompt; by default true "
        "for completions, and false for chats, whose template writes them.",
    )
    truncate_prompt_tokens: Integer | None = Field(
        None, description="Longest prompt in tokens; -1: the longest that leaves max_tokens."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where tokens beyond truncate_prompt_tokens are cut off; left by default."
    )

    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[Integer] | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    thinking_token_budget: Integer | None = Field(
        None,
        description="Most tokens of reasoning, after which its end is forced; -1: no limit. "
        "Structured output then begins after the reasoning.",
    )

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: JsonObject | str | None = Field(
        None, description="structured_outputs.json, by an older name; so are the other guided_*."
    )
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None
    json_schema: JsonObject | None = Field(
        None, description="structured_outputs.json, by llama.cpp's name; so is grammar."
    )
    grammar: str | None = None
    vllm_xargs: Numbers | None = Field(
        None, description="Numbers for the server's logits processors, by name."
    )
    prompt_logprobs: Integer | None = None
    logprob_token_ids: ListOf[Integer] | None = Field(
        None,
        description="Tokens whose log probabilities each position has, instead of those of the "
        "most likely ones.",
    )
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = Field(
        None, description="Whether logprobs name a token token_id:ID, instead of by its text."
    )
    use_beam_search: StrictBool | None = Field(
        None, description="Whether to return the n most likely sequences, instead of sampling n."
    )
    length_penalty: StrictFloat | None = Field(
        None, description="Of a beam search: above 1 favours longer sequences; 1 by default."
    )

    # What other servers' clients send, and what changes no answer here.
    store: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    session_id: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    spaces_between_special_tokens: Ignored = None
    guided_decoding_backend: Ignored = None
    cache_prompt: Ignored = None
    id_slot: Ignored = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options.continuous_usage_stats)

    def check(self, model: Model) -> Model:
        """The model that the request names. Raises RequestError for one that is not served, and for
        conflicting fields."""
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "needs a stream; set stream to true.")
        if self.length_penalty not in (None, 1) and not self.use_beam_search:
            raise FieldError("length_penalty", "needs use_beam_search to be true.")
        if self.stream and self.prompt_logprobs is not None:
            raise FieldError("prompt_logprobs", "cannot be streamed; set stream to false.")
        self.check_truncation()
        return model.named(self.model)

    def beam_search(self, params: SamplingParams) -> BeamSearchParams | None:
        """The search that the request asks for instead of sampling, with the limits of `params`.
        Its n is the beam width; how to sample (temperature, seed and so on) has no meaning.

        Raises FieldError for what a search cannot do.
        """
        if not self.use_beam_search:
            return None
        plain = SamplingParams()
        for name in _NOT_OF_BEAMS:
            # The model's own recommendations are of sampling.
            if getattr(self, name) is not None and getattr(params, name) != getattr(plain, name):
                raise FieldError(name, "is not supported by beam search; leave it out.")
        if params.structured_outputs is not None:
            name = self.names.get("structured_outputs.json", "structured_outputs").split(".")[0]
            raise FieldError(name, "is not supported by beam search; leave it out.")
        if params.extra_args is not None:
            raise FieldError("vllm_xargs", "is not supported by beam search; leave it out.")
        if self.stream:
            raise FieldError("use_beam_search", "cannot be streamed; set stream to false.")
        if params.n > MAX_BEAM_WIDTH:
            raise FieldError("n", f"is {params.n}; a beam search may have {MAX_BEAM_WIDTH}.")
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        limit = params.max_tokens
        return BeamSearchParams(
            params.n,
            sys.maxsize if limit is None else limit,
            ignore_eos=params.ignore_eos,
            length_penalty=penalty,
        )

    def truncated(
        self, prompt: TokenizedPrompt, model: Model, params: SamplingParams
    ) -> TokenizedPrompt:
        """The part of a prompt that `truncate_prompt_tokens` keeps."""
        keep = self.truncate_prompt_tokens
        if keep == -1:
            keep = max(1, model.max_model_len - (params.max_tokens or 1))
        if keep is None or len(prompt.token_ids) <= keep:
            return prompt
        ids = prompt.token_ids
        return TokenizedPrompt(None, ids[:keep] if self.truncation_side == "right" else ids[-keep:])

    @property
    def names(self) -> dict[str, str]:
        """The request's names of fields that the engine calls otherwise, for its errors."""
        names = {"extra_args": "vllm_xargs"}
        if self.response_format is not None:
            inner = "" if self.response_format.json_schema is None else ".json_schema"
            names["structured_outputs.json"] = f"response_format{inner}.schema"
        for name, kind in _CONSTRAINTS.items():
            if getattr(self, name) is not None:
                names[f"structured_outputs.{kind}"] = name
        return names

    def constraint(self) -> dict[str, Any] | None:
        """The output constraint in the form of SamplingParams. Raises FieldError."""
        found: dict[str, dict[str, Any]] = {}
        if self.response_format is not None and self.response_format.constraint is not None:
            found["response_format"] = self.response_format.constraint
        if self.structured_outputs is not None:
            given = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            found["structured_outputs"] = given
        for name, kind in _CONSTRAINTS.items():
            if getattr(self, name) is not None:
                found[name] = {kind: getattr(self, name)}
        if len(found) > 1:
            first, second, *_ = sorted(found, reverse=True)
            raise FieldError(first, f"and {second} conflict; give one of them.")
        return next(iter(found.values()), None)

    def sampling(self, model: Model, defaults: dict[str, Any], **more: Any) -> SamplingParams:
        """Sampling parameters, by precedence: values of `more` that are not None, request fields,
        the endpoint's `defaults`, the model's recommendation. Raises RequestError."""
        given = {name: getattr(self, name, None) for name in _SAMPLING}
        if self.logit_bias is not None:
            given["logit_bias"] = _biases(self.logit_bias)
        given["structured_outputs"] = self.constraint()
        given["extra_args"] = self.vllm_xargs
        given |= more
        given = {name: value for name, value in given.items() if value is not None}
        try:
            params = SamplingParams.from_defaults(model.default_sampling, **(defaults | given))
            for name in ("logprobs", "prompt_logprobs"):
                if (getattr(params, name) or 0) > model.max_logprobs:
                    raise FieldError(name, f"may be {model.max_logprobs} at most on this server.")
            if len(params.logprob_token_ids or ()) > model.max_logprobs:
                most = model.max_logprobs
                raise FieldError("logprob_token_ids", f"may have {most} at most on this server.")
        except RequestError as error:
            raise renamed(error, self.names) from None
        return params


def _biases(logit_bias: dict[str, float]) -> dict[int, float]:
    """Biases by token id. Raises FieldError, which names the keys that are none."""
    wrong = [key for key in logit_bias if not key.isascii() or not key.isdigit() or len(key) > 10]
    if wrong:
        told = f"{', '.join(map(repr, wrong)):.200}"
        raise FieldError("logit_bias", f"must map token ids to biases, got the keys {told}.")
    return {int(key): bias for key, bias in logit_bias.items()}
