"""The request body of `/v1/responses`, which becomes a chat request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StrictBool, model_validator

from jaxserve.core.errors import RequestError
from jaxserve.protocol.chat.messages import Message
from jaxserve.protocol.chat.reply import ParsedChat
from jaxserve.protocol.chat.request import ChatCompletionRequest
from jaxserve.protocol.errors import FieldError, alike, renamed
from jaxserve.protocol.field_types import (
    Ignored,
    Integer,
    JsonObject,
    ListOf,
    only,
)
from jaxserve.protocol.fields import (
    Fields,
    GenerationFields,
    JsonSchema,
    ResponseFormat,
)
from jaxserve.protocol.model import Model
from jaxserve.protocol.responses_api.items import InputItem, messages_of
from jaxserve.protocol.responses_api.reply import ParsedResponses
from jaxserve.protocol.responses_api.stored import (
    EMPTY_CONVERSATION,
    Conversation,
    Item,
    StoredResponse,
    input_of,
)
from jaxserve.protocol.tools import ChosenName, ChosenTool, Function, Tool, tool_of_type

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""OpenAI's entries of `include`. Those after the first are of what this server does not have."""

_NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools[].function": "tools[]",
}


class TextFormat(Fields):
    """As `response_format` of chats, without its inner object."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: StrictBool | None = None


class TextOptions(Fields):
    format: TextFormat | None = None
    verbosity: Ignored = None


class Reasoning(Fields):
    """`effort` is as `reasoning_effort` of chats; reasoning is never summarized."""

    model_config = ConfigDict(extra="ignore")

    effort: str | None = None


class FunctionTool(Function):
    """A function that the model may call. Other tools, which OpenAI runs, are not supported."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]

    _known = model_validator(mode="before")(tool_of_type("function"))


class ChosenFunction(Fields):
    type: Literal["function"]
    name: str


class AllowedTools(Fields):
    """Those of the tools that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ListOf[ChosenFunction]


class ResponsesRequest(GenerationFields):
    """The request body: OpenAI's fields, and the extensions of chats."""

    remedies: ClassVar[Mapping[str, str]] = {"max_completion_tokens": "use max_output_tokens"}

    input: str | ListOf[InputItem] = Field(examples=["Hi!"])
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: Integer | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: ListOf[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedTools | None = None
    parallel_tool_calls: StrictBool | None = None
    include: ListOf[str] | None = Field(
        None,
        description=f"{LOGPROBS} adds log probabilities; OpenAI's other entries have no effect.",
    )
    top_logprobs: Integer | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto is as truncate_prompt_tokens of -1."
    )
    include_reasoning: StrictBool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    max_tool_calls: Ignored = None
    prompt_cache_options: Ignored = None
    access_programs: Ignored = None
    store: StrictBool | None = Field(
        None, description="Whether the server keeps the response in memory; true by default."
    )
    previous_response_id: str | None = Field(
        None, description="A stored response, whose conversation this request continues with."
    )
    conversation: Any = Field(None, description="Not supported.")
    prompt: Any = Field(None, description="Not supported.")
    background: StrictBool | None = Field(
        None, description="Whether to answer at once, and generate while no client waits."
    )

    # Fields of chats that have another name here, or whose results have no place in a response.
    n: Annotated[Integer | None, only(1, remedy="send a request for each response")] = None
    max_tokens: Annotated[None, only(remedy="use max_output_tokens")] = None
    response_format: Annotated[None, only(remedy="use text.format")] = None
    prompt_logprobs: Annotated[None, only(remedy="/v1/chat/completions has it")] = None
    return_token_ids: Annotated[None, only(remedy="/v1/chat/completions has it")] = None

    def parse(
        self,
        model: Model,
        before: Conversation | None = None,
        keep: Callable[[StoredResponse], bool] | None = None,
    ) -> ParsedResponses:
        """Convert the body to a request for the engine. `before`: the conversation of the previous
        response; `keep` stores the response, if that is wanted. Raises RequestError."""
        if self.previous_response_id is not None and before is None:
            raise FieldError(
                "previous_response_id",
                "refers to a stored response, which only a server has; send the whole conversation "
                "as input.",
            )
        for name in ("conversation", "prompt"):
            if getattr(self, name) is not None:
                raise FieldError(
                    name,
                    "refers to what is stored at OpenAI; send the whole conversation as input, or "
                    "a previous_response_id.",
                )
        if self.background:
            self._check_background(has_store=keep is not None)
        self._check_include()
        before = before or EMPTY_CONVERSATION
        try:
            chat = self._as_chat(before.items).parse(model)
        except RequestError as error:
            raise renamed(error, _NAMES) from None
        chat, described = chat.with_names(_NAMES), self._described(chat)
        if keep is None or self.store is False:
            return ParsedResponses(chat, described)
        return ParsedResponses(
            chat, described | {"store": True}, before, input_of(self._items()), keep
        )

    def _check_include(self) -> None:
        include = self.include or ()
        for entry in include:
            if entry not in INCLUDABLE:
                hint = alike(entry[:80], INCLUDABLE) or f"leave it out, or use {LOGPROBS}."
                raise FieldError(
                    "include", f"has {entry!r:.80}, which is not one of OpenAI's entries; {hint}"
                )
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) is not None and LOGPROBS not in include:
                raise FieldError(name, f"needs {LOGPROBS!r} in include.")

    def _check_background(self, has_store: bool) -> None:
        if not has_store:
            raise FieldError("background", "needs a server, which stores responses; leave it out.")
        if self.store is False:
            raise FieldError(
                "background", "can only be used when `store` is true; leave one of them out."
            )
        if self.stream:
            raise FieldError(
                "background", "cannot be streamed; poll GET /v1/responses/{id}, or leave it out."
            )

    def _as_chat(self, before: Sequence[Item]) -> ChatCompletionRequest:
        shared = {name: getattr(self, name) for name in GenerationFields.model_fields}
        tools, choice = self._chosen()
        shared |= {
            "messages": self._messages(before),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": LOGPROBS in (self.include or ()) or None,
            "top_logprobs": self.top_logprobs,
            "include_reasoning": self.include_reasoning,
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.truncation == "auto" and self.truncate_prompt_tokens is None:
            shared["truncate_prompt_tokens"] = -1
        return ChatCompletionRequest.model_construct(**shared)

    def _items(self) -> list[InputItem]:
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input

    def _messages(self, before: Sequence[Item]) -> list[Message]:
        earlier = [InputItem.model_validate(item) for item in before]
        messages = messages_of(self._items(), self.instructions, earlier)
        if not messages:
            raise FieldError("input", "is empty; it needs at least one message.")
        return messages

    def _format(self) -> ResponseFormat | None:
        given = self.text and self.text.format
        if given is None:
            return None
        if given.type != "json_schema":
            return ResponseFormat(type=given.type)
        schema = JsonSchema(name=given.name or "", schema=given.schema_)
        return ResponseFormat(type="json_schema", json_schema=schema)

    def _chosen(self) -> tuple[list[Tool] | None, str | ChosenTool | None]:
        tools, choice = self.tools, self.tool_choice
        if isinstance(choice, AllowedTools):
            allowed = {tool.name for tool in choice.tools}
            tools = [tool for tool in tools or () if tool.name in allowed]
            choice = choice.mode
        elif isinstance(choice, ChosenFunction):
            choice = ChosenTool(type="function", function=ChosenName(name=choice.name))
        if tools is None:
            return None, choice
        functions = [tool.model_dump(exclude={"type"}) for tool in tools]
        return [Tool(type="function", function=Function(**given)) for given in functions], choice

    def _described(self, chat: ParsedChat) -> dict[str, Any]:
        """The fields of a response that repeat the request."""
        choice = self.tool_choice or "auto"
        given = (self.text and self.text.format) or TextFormat()
        return {
            "model": chat.model.name,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata if isinstance(self.metadata, dict) else {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "max_tool_calls": self.max_tool_calls,
            "prompt_cache_key": self.prompt_cache_key,
            "safety_identifier": self.safety_identifier,
            "service_tier": None,
            "store": False,
            "user": self.user,
            "background": bool(self.background),
            "temperature": chat.params.temperature,
            "top_p": chat.params.top_p,
            "text": {"format": given.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs,
            "truncation": self.truncation or "disabled",
        }
