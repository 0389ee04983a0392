"""Response schemas, for the OpenAPI document only. Responses themselves are plain dicts, which are
cheaper to build for every token."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from jaxserve.core.requests.outputs import FinishReason

ChoiceFinishReason = FinishReason | Literal["tool_calls"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="The invalid field.")
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class MessageErrorDetail(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    type: Literal["error"]
    error: MessageErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Parallel lists; null for a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class WeightsRun(BaseModel):
    """Consecutive tokens that one version of the weights made."""

    version: int
    num_tokens: int


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: ChoiceFinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None
    token_ids: list[int] | None
    weights: list[WeightsRun] = []
    prompt_token_ids: list[int] | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage


class MessageFunction(BaseModel):
    name: str
    arguments: str


class MessageToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: MessageFunction


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[None]
    audio: None
    function_call: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] = []


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ScoredToken]
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChoiceFinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None
    weights: list[WeightsRun] = []


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    service_tier: None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(BaseModel):
    """It also repeats fields of the request. Items are messages, function calls and reasoning."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponsesUsage


class InputItems(BaseModel):
    """One page of items, and whether there are more."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(BaseModel):
    input_tokens: int


class MessageUsage(InputTokens):
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(BaseModel):
    """Blocks are text, thinking and uses of tools."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="The model's first name; of an adapter, its path.")
    parent: str | None = Field(description="Of an adapter, the model.")
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    tokenizer_class: str
    chat_template: str | None
    vocab_size: int
    model_max_length: int


State = Literal["ready", "starting", "stalled", "draining", "failed"]


class Health(BaseModel):
    status: State


class Version(BaseModel):
    version: str


class Load(BaseModel):
    """As in vLLM: the number of sequences that are not answered yet."""

    server_load: int


class ServerInfo(BaseModel):
    """The version, the model's names, and the engine's settings."""

    version: str
    models: list[str]
    settings: dict[str, Any]


class About(BaseModel):
    """What answers here, and where to read on."""

    name: Literal["jaxserve"]
    version: str
    status: State
    models: list[str]
    docs: str
    openapi: str


class PoolingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Text is base64 of little-endian float32.")


class Embeddings(BaseModel):
    id: str
    created: int
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Score(BaseModel):
    object: Literal["score"]
    index: int
    score: float


class Scores(BaseModel):
    id: str
    created: int
    object: Literal["list"]
    model: str
    data: list[Score]
    usage: PoolingUsage


class Sleeping(BaseModel):
    is_sleeping: bool


class UpdatedWeights(BaseModel):
    success: Literal[True]
    message: str
    weights_version: int = Field(description="How often the weights have been replaced.")
