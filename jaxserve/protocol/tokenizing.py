"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, StrictBool

from jaxserve.protocol.chat.messages import Message
from jaxserve.protocol.errors import FieldError, shown
from jaxserve.protocol.field_types import Integer, JsonObject, ListOf
from jaxserve.protocol.fields import Fields
from jaxserve.protocol.model import Model
from jaxserve.protocol.tools import Tool, check_tools


class TokenizeRequest(Fields):
    """Either a text or a conversation."""

    remedies: ClassVar[Mapping[str, str]] = {"text": "use prompt or messages"}

    model: str | None = None
    prompt: str | None = Field(None, examples=["The sky is"])
    add_special_tokens: StrictBool | None = Field(
        None, description="By default true for texts and false for conversations, as elsewhere."
    )
    return_token_strs: StrictBool | None = Field(
        None, description="Whether to return the tokens as the vocabulary spells them, too."
    )
    messages: ListOf[Message] | None = None
    tools: ListOf[Tool] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None

    def answer(self, model: Model) -> dict[str, Any]:
        """Raises RequestError."""
        model = model.named(self.model)
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "or messages must be given, but not both.")
        token_ids = self._text(model) if self.messages is None else self._conversation(model)
        names = model.tokenizer.convert_ids_to_tokens
        return {
            "count": len(token_ids),
            "max_model_len": model.max_model_len,
            "tokens": token_ids,
            "token_strs": names(token_ids) if self.return_token_strs else None,
        }

    def _text(self, model: Model) -> list[int]:
        for name in (
            "tools",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
            "chat_template_kwargs",
        ):
            if getattr(self, name) is not None:
                raise FieldError(name, "is only for messages.")
        model.check_text(self.prompt)
        return model.tokenizer.encode(self.prompt, self.add_special_tokens is not False)

    def _conversation(self, model: Model) -> list[int]:
        check_tools(self.tools or [], None)
        messages = [message.for_template() for message in self.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or []] or None
        prompt = model.chat_prompt(
            messages,
            tools,
            self.chat_template_kwargs,
            self.add_generation_prompt,
            chat_template=model.chat_template(bool(tools), self.chat_template),
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
        )
        return prompt.token_ids


class DetokenizeRequest(Fields):
    """Token ids to decode."""

    model: str | None = None
    tokens: ListOf[Integer] = Field(examples=[[1, 2, 3]])

    def answer(self, model: Model) -> dict[str, Any]:
        """Includes special tokens. Raises FieldError for an id out of range."""
        model = model.named(self.model)
        for place, token_id in enumerate(self.tokens):
            if not 0 <= token_id < model.vocab_size:
                most = model.vocab_size - 1
                raise FieldError(
                    f"tokens[{place}]", f"is {shown(token_id)}; this model's ids are 0..{most}."
                )
        return {"prompt": model.tokenizer.decode(self.tokens, skip_special_tokens=False)}


def tokenizer_info(model: Model) -> dict[str, Any]:
    """Tokenizer settings for clients, under the names of tokenizer_config.json."""
    tokenizer = model.tokenizer
    return {
        **{f"{name}_token": None for name in ("bos", "eos", "unk", "pad")},
        **tokenizer.special_tokens,
        "tokenizer_class": tokenizer.tokenizer_class,
        "chat_template": tokenizer.chat_template,
        "vocab_size": model.vocab_size,
        "model_max_length": model.max_model_len,
    }
