"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, StrictBool

from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.protocol.chat.messages import Message
from jaxserve.protocol.chat.reply import ParsedChat, ToolUse
from jaxserve.protocol.errors import FieldError
from jaxserve.protocol.field_types import (
    Ignored,
    Integer,
    JsonObject,
    ListOf,
)
from jaxserve.protocol.fields import GenerationFields
from jaxserve.protocol.model import Model
from jaxserve.protocol.parsing.reasoning import Marks, check_budget, reasoning_marks
from jaxserve.protocol.parsing.tool_calls import format_of
from jaxserve.protocol.tools import ChosenTool, Tool, check_tools, forced_schema
from jaxserve.text.chat import knows_tools
from jaxserve.text.thinking import begun_thinking

ChatToolChoice = Literal["none", "auto", "required"] | ChosenTool


class ChatCompletionRequest(GenerationFields):
    """The request body: OpenAI's fields, and vLLM's extensions."""

    remedies: ClassVar[Mapping[str, str]] = {"max_output_tokens": "use max_tokens"}

    messages: ListOf[Message]
    max_completion_tokens: Integer | None = Field(None, description="Alias of max_tokens.")
    logprobs: StrictBool | None = None
    top_logprobs: Integer | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    add_generation_prompt: StrictBool | None = Field(
        None, description="Whether to end the prompt with the start of the assistant's turn."
    )
    continue_final_message: StrictBool | None = Field(
        None, description="Whether the prompt ends inside the last message, for more of its text."
    )
    echo: StrictBool | None = Field(
        None, description="Whether the answer begins with the last message, if the assistant's."
    )
    reasoning_effort: str | None = Field(
        None, description="For chat templates that have this variable."
    )
    modalities: ListOf[Literal["text"]] | None = None
    verbosity: Ignored = None
    prediction: Ignored = None
    include_reasoning: StrictBool | None = Field(
        None, description="Whether the answer has its reasoning_content; true by default."
    )
    chat_template: str | None = Field(
        None, description="A Jinja template in the place of the model's, if the server allows it."
    )
    chat_template_kwargs: JsonObject | None = Field(
        None, description="Extra variables for the chat template, such as enable_thinking."
    )

    def parse(self, model: Model) -> ParsedChat:
        """Convert the body to a request for the engine. Raises RequestError."""
        model = self.check(model)
        if not self.messages:
            raise FieldError("messages", "is empty; it needs at least one message.")
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError(
                "continue_final_message", "and add_generation_prompt conflict; give one of them."
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs to be true.")
        if self.logprob_token_ids is not None and not self.logprobs:
            raise FieldError("logprob_token_ids", "needs logprobs to be true.")
        more: dict[str, Any] = {}
        if self.logprobs:
            more["logprobs"] = self.top_logprobs or 0
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise FieldError("max_tokens", "and max_completion_tokens differ; give one.")
            more["max_tokens"] = self.max_completion_tokens
        tool_use = self.tool_use(model)
        if tool_use is not None and tool_use.schema is not None:
            if self.constraint() is not None:
                raise FieldError(
                    "tool_choice", "forces a call, so the response format cannot be set too."
                )
            more["structured_outputs"] = {"json": tool_use.schema}
        ignored_tools = None
        if self.tools and tool_use is None and self.tool_choice != "none":
            ignored_tools = (
                f"this model's chat template {self._lack(model)}; leave them out, or set "
                "tool_choice to required or a named function, which forces a call."
            )
        # Without max_tokens, generate up to the context limit, unless the model's config sets one.
        defaults = {} if model.default_sampling.get("max_new_tokens") else {"max_tokens": None}
        params = self.sampling(model, defaults, **more)
        prompt = self.prompt(model, self._shown_tools(model, tool_use))
        prompt = self.truncated(prompt, model, params)
        echoed = self.echo and self.messages[-1].role == "assistant"
        reasons = marks = self.marks(model, tool_use)
        if params.thinking_token_budget is not None:
            check_budget(reasons)
        elif params.structured_outputs is not None:
            reasons = None  # The format begins with the first token.
        if reasons == "channels":
            params = dataclasses.replace(params, skip_special_tokens=False)
        return ParsedChat(
            model=model,
            prompts=(prompt,),
            params=params,
            beam=self.beam_search(params),
            cache_salt=self.cache_salt or None,
            stream=bool(self.stream),
            include_usage=self.include_usage,
            continuous_usage=self.continuous_usage,
            tool_use=tool_use,
            has_reasoning=marks is not None,
            reasons=reasons,
            begun_reasoning=begun_thinking(model.tokenizer, prompt.token_ids),
            include_reasoning=self.include_reasoning is not False,
            prompt_logprobs=self.prompt_logprobs is not None,
            token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
            echoed=self.messages[-1].text if echoed else "",
            ignored_tools=ignored_tools,
            names=self.names,
        )

    @property
    def names(self) -> dict[str, str]:
        names = super().names
        if self.logprobs:
            names["logprobs"] = "top_logprobs"
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.tools and self.tool_choice not in (None, "none", "auto"):
            names["structured_outputs.json"] = "tools"
        return names

    def marks(self, model: Model, tool_use: ToolUse | None) -> Marks | None:
        """How the template that is rendered marks reasoning."""
        template = self._template(model, tool_use is not None)
        return reasoning_marks(model.chat.reasoning_parser, template)

    def prompt(self, model: Model, tools: list[dict[str, Any]] | None) -> TokenizedPrompt:
        """The conversation rendered by the chat template. Raises RequestError."""
        prompt = model.chat_prompt(
            [message.for_template() for message in self.messages],
            tools,
            self._variables(model, tools),
            self.add_generation_prompt,
            chat_template=self._template(model, bool(tools)),
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
        )
        if not prompt.token_ids:
            raise FieldError("messages", "render to an empty prompt.")
        return prompt

    def _variables(self, model: Model, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """The extra variables of the chat template."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            if "reasoning_effort" not in (self._template(model, bool(tools)) or ""):
                raise FieldError(
                    "reasoning_effort",
                    "is not a variable of this model's chat template; leave it out.",
                )
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return variables

    def tool_use(self, model: Model) -> ToolUse | None:
        """How the model calls its tools, if it may. Raises RequestError."""
        tools = self.tools or []
        check_tools(tools, self.tool_choice)
        chosen, parallel = self.tool_choice or "auto", self.parallel_tool_calls is not False
        if not tools or chosen == "none":
            return None
        if chosen == "auto":
            template = self._template(model, has_tools=True)
            how = format_of(template) if knows_tools(template) else None
            return None if how is None else ToolUse(tuple(tools), how, parallel)
        schema = forced_schema(tools, chosen, parallel)
        if chosen == "required":
            return ToolUse(tuple(tools), "required", parallel, schema)
        (tool,) = (t for t in tools if t.function.name == chosen.function.name)
        return ToolUse((tool,), "named", False, schema)

    def _shown_tools(self, model: Model, tool_use: ToolUse | None) -> list[dict[str, Any]] | None:
        """The tools for the chat template, if it supports tools."""
        if tool_use is None or not knows_tools(self._template(model, has_tools=True)):
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def _template(self, model: Model, has_tools: bool) -> str | None:
        return model.chat_template(has_tools, self.chat_template)

    def _lack(self, model: Model) -> str:
        """Why the model cannot be offered tools."""
        knows = knows_tools(self._template(model, has_tools=True))
        return "has an unknown tool format" if knows else "has no tools"
