"""`/v1/chat/completions/batch`: the next message of each of several conversations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.beam_search import BeamSearchParams
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.protocol.chat.messages import Message
from jaxserve.protocol.chat.reply import ParsedChat
from jaxserve.protocol.chat.request import ChatCompletionRequest
from jaxserve.protocol.errors import FieldError, renamed
from jaxserve.protocol.field_types import ListOf, only
from jaxserve.protocol.fields import StreamOptions
from jaxserve.protocol.model import Model
from jaxserve.protocol.prompts import MAX_PROMPTS
from jaxserve.protocol.usage import usage

MAX_REPEATED_CHARS = 8 << 20
"""Characters of tools and template variables, counted for each conversation: each prompt has them,
and so a short body could make prompts of any length."""


class BatchedChatsRequest(ChatCompletionRequest):
    """The request body: a chat's, with a list of conversations."""

    messages: ListOf[ListOf[Message]] = Field(description="Conversations, of messages each.")
    stream: Annotated[Literal[False] | None, only(False, remedy="stream chats one by one")] = None
    stream_options: Annotated[StreamOptions | None, only(remedy="stream chats one by one")] = None

    def parse(self, model: Model) -> ParsedChatBatch:
        """Convert the body to a request for the engine. Raises RequestError."""
        conversations = self.messages
        if not 1 <= len(conversations) <= MAX_PROMPTS:
            raise FieldError(
                "messages", f"must hold 1 to {MAX_PROMPTS} conversations, got {len(conversations)}."
            )
        self._check_repeated()
        shared = {name: getattr(self, name) for name in ChatCompletionRequest.model_fields}
        chats = []
        for number, messages in enumerate(conversations):
            chat = ChatCompletionRequest.model_construct(**shared | {"messages": messages})
            try:
                chats.append(chat.parse(model))
            except RequestError as error:
                raise renamed(error, {"messages": f"messages[{number}]"}) from None
        return ParsedChatBatch(tuple(chats))

    def _check_repeated(self) -> None:
        functions = [tool.function for tool in self.tools or ()]
        parts = [[each.description, each.parameters] for each in functions]
        try:
            size = len(json.dumps([parts, self.chat_template, self.chat_template_kwargs]))
        except RecursionError:
            raise FieldError("chat_template_kwargs", "or tools are nested too deeply.") from None
        if size * len(self.messages) > MAX_REPEATED_CHARS:
            raise FieldError(
                "messages",
                f"holds {len(self.messages)} conversations, each of which repeats {size} "
                "characters of tools and template variables; at most "
                f"{MAX_REPEATED_CHARS} are allowed in all, so send fewer conversations.",
            )


@dataclasses.dataclass(frozen=True)
class ParsedChatBatch:
    """Chats that differ in their messages only; choice p * n + i is sequence i of the p-th."""

    chats: tuple[ParsedChat, ...]
    stream: ClassVar[bool] = False

    @property
    def prompts(self) -> tuple[TokenizedPrompt, ...]:
        return tuple(chat.prompts[0] for chat in self.chats)

    @property
    def params(self) -> SamplingParams:
        return self.chats[0].params

    @property
    def beam(self) -> BeamSearchParams | None:
        return self.chats[0].beam

    @property
    def cache_salt(self) -> str | None:
        return self.chats[0].cache_salt

    @property
    def lora_request(self) -> LoRARequest | None:
        return self.chats[0].lora_request

    @property
    def ignored_tools(self) -> str | None:
        return self.chats[0].ignored_tools

    @property
    def names(self) -> Mapping[str, str]:
        return {**self.chats[0].names, "prompt": "messages"}

    def response(
        self, outputs: Sequence[RequestOutput], request_id: str, created: int
    ) -> dict[str, Any]:
        """The response body: that of one chat, with the choices of all. Those have what it has of
        its prompt."""
        bodies = [
            chat.response([_numbered(output, number)], request_id, created)
            for number, (chat, output) in enumerate(zip(self.chats, outputs))
        ]
        counted = usage(outputs)
        details = "completion_tokens_details"
        if details in bodies[0]["usage"]:
            reasoned = sum(body["usage"][details]["reasoning_tokens"] for body in bodies)
            counted[details] = {"reasoning_tokens": reasoned}
        of_prompts = ("prompt_logprobs", "prompt_token_ids")
        choices = [
            choice | {name: body[name] for name in of_prompts}
            for body in bodies
            for choice in body["choices"]
        ]
        absent = dict.fromkeys(of_prompts)
        return bodies[0] | absent | {"choices": choices, "usage": counted}


def _numbered(output: RequestOutput, number: int) -> RequestOutput:
    """An output whose choices have their places in the response."""
    first = number * len(output.outputs)
    choices = [dataclasses.replace(choice, index=first + choice.index) for choice in output.outputs]
    return dataclasses.replace(output, outputs=choices)
