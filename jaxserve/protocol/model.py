"""The protocol's view of the served model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from jaxserve.core.chat_settings import ChatSettings
from jaxserve.core.errors import PromptTooLongError
from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.core.version import __version__
from jaxserve.engine.prompts import Prompt, TokenizedPrompt, tokenize_prompt
from jaxserve.protocol.errors import FieldError, ModelNotFoundError
from jaxserve.text import Tokenizer

if TYPE_CHECKING:
    from jaxserve.runtime.startup import EnginePlan

_OURS = frozenset(
    {
        *("messages", "tools", "documents"),
        *("add_generation_prompt", "continue_final_message", "chat_template"),
    }
)


@dataclasses.dataclass(frozen=True)
class Model:
    """A served model: its names (responses carry the first), its tokenizer and limits.

    `default_sampling` comes from its generation_config.json. `system_fingerprint` changes with what
    the tokens of a seed depend on: the weights, their dtype and quantization, the kind of device
    and the version of jaxserve.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    default_sampling: Mapping[str, Any]
    system_fingerprint: str | None = None
    chat: ChatSettings = dataclasses.field(default_factory=ChatSettings)
    max_logprobs: int = MAX_LOGPROBS

    @classmethod
    def of(
        cls,
        plan: EnginePlan,
        tokenizer: Tokenizer,
        names: Sequence[str] = (),
        chat: ChatSettings | None = None,
        max_logprobs: int = MAX_LOGPROBS,
    ) -> Self:
        """The model of an engine; without `names` its name is the `model` setting."""
        model, config = plan.shapes.model, plan.config
        parts = (plan.checkpoint.fingerprint, config.dtype, config.quantization)
        basis = json.dumps([*parts, plan.device.device_kind, __version__])
        return cls(
            names=tuple(names) or (str(config.model),),
            tokenizer=tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=config.max_model_len,
            default_sampling=dict(model.default_sampling),
            system_fingerprint=f"fp_{hashlib.sha256(basis.encode()).hexdigest()[:10]}",
            chat=chat or ChatSettings(),
            max_logprobs=max_logprobs,
        )

    @property
    def name(self) -> str:
        return self.names[0]

    def chat_template(self, has_tools: bool, of_request: str | None = None) -> str | None:
        """The chat template of a request. Raises FieldError for one that it brings, unless this
        server trusts them."""
        if of_request is not None:
            if not self.chat.trust_request_chat_template:
                raise FieldError(
                    "chat_template",
                    "is only allowed with the option --trust-request-chat-template; leave it out.",
                )
            return of_request
        return self.tokenizer.tool_template if has_tools else self.tokenizer.chat_template

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless `name` is None or one of the model's names."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(
                f"model {name!r:.200} is not served here; use {', '.join(map(repr, self.names))}."
            )

    def tokenize(
        self, prompt: Prompt, add_special_tokens: bool = True, truncates: bool = False
    ) -> TokenizedPrompt:
        """Raises RequestError for an invalid prompt, PromptTooLongError before it is tokenized for
        one that is certainly too long. `truncates`: token ids are cut to the limit later."""
        if isinstance(prompt, str):
            self.check_text(prompt)
        elif len(prompt) > self.max_model_len and not truncates:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens and the context limit is "
                f"{self.max_model_len}; shorten it to at most {self.max_model_len - 1}"
            )
        return tokenize_prompt(prompt, self.tokenizer, self.vocab_size, add_special_tokens)

    def check_text(self, text: str) -> None:
        """Raises PromptTooLongError for a text with more characters than a context of the longest
        tokens: tokenizing it could take many seconds."""
        most = self.max_model_len * self.tokenizer.longest_token
        if len(text) > most:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters and the context limit of "
                f"{self.max_model_len} tokens is at most {most} characters; shorten it: "
                "truncate_prompt_tokens is for texts within this limit"
            )

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
    ) -> TokenizedPrompt:
        """A conversation rendered by `chat_template`, with `variables` as extra variables; the
        other arguments are those of `Tokenizer.apply_chat_template` and `Tokenizer.encode`.

        Raises RequestError for messages that the template rejects, PromptTooLongError for a text
        that is certainly too long.
        """
        variables = variables or {}
        if taken := sorted(_OURS & set(variables)):
            raise FieldError("chat_template_kwargs", f"must not set {taken[0]!r}.")
        text = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt,
            tools,
            continue_final_message,
            chat_template,
            **variables,
        )
        self.check_text(text)
        return TokenizedPrompt(text, self.tokenizer.encode(text, add_special_tokens))
