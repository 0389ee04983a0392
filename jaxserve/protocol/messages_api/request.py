"""The request body of `/v1/messages`, which becomes a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StrictBool, model_validator

from jaxserve.core.errors import RequestError
from jaxserve.protocol.chat.request import ChatCompletionRequest
from jaxserve.protocol.errors import FieldError, renamed
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
from jaxserve.protocol.messages_api.blocks import Text, Turn, messages_of
from jaxserve.protocol.messages_api.reply import ParsedMessages
from jaxserve.protocol.model import Model
from jaxserve.protocol.tools import ChosenName, ChosenTool, Function, Name, Tool, tool_of_type

_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}


class CustomTool(Fields):
    """A function that the model may call. Other tools, which Anthropic runs, are not supported."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: JsonObject

    _known = model_validator(mode="before")(tool_of_type("custom"))


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class Thinking(Fields):
    """Whether the model thinks, for chat templates with `enable_thinking`. `budget_tokens` is
    `thinking_token_budget` for a model that marks its reasoning by tags, else ignored."""

    model_config = ConfigDict(extra="ignore")

    type: str
    budget_tokens: Integer | None = None


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Fields):
    """The output's JSON schema, and `reasoning_effort` for chat templates that know it."""

    model_config = ConfigDict(extra="ignore")

    format: OutputFormat | None = None
    effort: str | None = None


class MessagesRequest(GenerationFields):
    """The request body: Anthropic's fields, and the extensions of chats."""

    remedies: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "use max_tokens",
        "max_output_tokens": "use max_tokens",
    }

    messages: ListOf[Turn]
    max_tokens: Integer
    system: Text | None = None
    stop_sequences: ListOf[str] | None = None
    tools: ListOf[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="output_config.format, by an older name."
    )
    include_reasoning: StrictBool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    context_management: Ignored = None
    cache_control: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None

    # Fields of chats that have another name here, or whose results have no place in a response.
    n: Annotated[Integer | None, only(1, remedy="send a request for each message")] = None
    stop: Annotated[None, only(remedy="use stop_sequences")] = None
    response_format: Annotated[None, only(remedy="use output_config.format")] = None
    prompt_logprobs: Annotated[None, only(remedy="/v1/chat/completions has it")] = None
    logprob_token_ids: Annotated[None, only(remedy="/v1/chat/completions has it")] = None
    return_token_ids: Annotated[None, only(remedy="/v1/chat/completions has it")] = None

    def parse(self, model: Model) -> ParsedMessages:
        """Convert the body to a request for the engine. Raises RequestError."""
        is_older = self.output_config is None or self.output_config.format is None
        form = "output_format" if is_older else "output_config.format"
        names = _NAMES | {"response_format.json_schema": form, "response_format": form}
        try:
            chat = self._as_chat()
            budget = self._budget(chat, model)
            names |= dict.fromkeys(budget, "thinking.budget_tokens")
            chat = chat.model_copy(update=budget)
            return ParsedMessages(chat.parse(model).with_names(names))
        except RequestError as error:
            raise renamed(error, names) from None

    def _as_chat(self) -> ChatCompletionRequest:
        shared = {name: getattr(self, name) for name in GenerationFields.model_fields}
        choice, parallel = self._chosen()
        # As Anthropic's models, one continues with its own last message.
        goes_on = bool(self.messages) and self.messages[-1].role == "assistant"
        return ChatCompletionRequest.model_construct(
            **shared
            | {
                "messages": self._messages(),
                "stop": self.stop_sequences,
                "tools": None if self.tools is None else [_as_tool(tool) for tool in self.tools],
                "tool_choice": choice,
                "parallel_tool_calls": parallel,
                "response_format": self._format(),
                "reasoning_effort": self.output_config and self.output_config.effort,
                "continue_final_message": goes_on,
                "include_reasoning": self.include_reasoning,
                "chat_template": self.chat_template,
                "chat_template_kwargs": self._variables(),
            }
        )

    def _messages(self) -> list[Any]:
        if not self.messages:
            raise FieldError("messages", "is empty; it needs at least one message.")
        return messages_of(self.messages, self.system)

    def _chosen(self) -> tuple[str | ChosenTool | None, bool]:
        given = self.tool_choice
        if given is None:
            return None, True
        parallel = given.disable_parallel_tool_use is not True
        if given.type != "tool":
            return {"any": "required"}.get(given.type, given.type), parallel
        if given.name is None:
            raise FieldError(
                "tool_choice.name", "is missing; it is required.", "missing_required_parameter"
            )
        return ChosenTool(type="function", function=ChosenName(name=given.name)), parallel

    def _format(self) -> ResponseFormat | None:
        given = self.output_config and self.output_config.format
        given = given or self.output_format
        if given is None:
            return None
        schema = JsonSchema(name="output", schema=given.schema_)
        return ResponseFormat(type="json_schema", json_schema=schema)

    def _budget(self, chat: ChatCompletionRequest, model: Model) -> dict[str, int]:
        """The budget of `thinking`, as a field of chats, if the chat's template marks reasoning."""
        thinking = self.thinking
        if self.thinking_token_budget is not None or thinking is None:
            return {}
        if thinking.type != "enabled" or thinking.budget_tokens is None:
            return {}
        if chat.marks(model, chat.tool_use(model)) != "tags":
            return {}
        return {"thinking_token_budget": thinking.budget_tokens}

    def _variables(self) -> dict[str, Any]:
        """Variables of the chat template; one that does not have them ignores them."""
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        return variables | (self.chat_template_kwargs or {})


class CountTokensRequest(MessagesRequest):
    """The request body of `/v1/messages/count_tokens`."""

    max_tokens: Integer = 1

    def answer(self, model: Model) -> dict[str, int]:
        """Raises RequestError."""
        (prompt,) = self.parse(model).prompts
        return {"input_tokens": len(prompt.token_ids)}


def _as_tool(tool: CustomTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool(type="function", function=function)
