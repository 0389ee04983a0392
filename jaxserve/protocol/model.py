"""The protocol's view of the served model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jaxserve.core.engine_info import EngineInfo
from jaxserve.core.errors import ChatTemplateError, PromptTooLongError
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.sampling_params import MAX_LOGPROBS
from jaxserve.core.settings.chat_settings import ChatSettings
from jaxserve.core.version import __version__
from jaxserve.engine.prompts import Prompt, TokenizedPrompt, tokenize_prompt
from jaxserve.protocol.errors import FieldError, ModelNotFoundError, TextTooLongError
from jaxserve.text import Tokenizer
from jaxserve.text.chat import RESERVED_VARIABLES


@dataclasses.dataclass(frozen=True)
class Model:
    """A served model: its names (responses carry the first), its tokenizer and limits.

    `default_sampling` comes from its generation_config.json. Requests may name one of its
    `adapters` instead; `lora_request` is the one that was named. `system_fingerprint` changes with
    what the tokens of a seed depend on: the weights, their dtype and quantization, that of the KV,
    the adapter, the kind of device and the version of jaxserve.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    default_sampling: Mapping[str, Any]
    system_fingerprint: str | None = None
    chat: ChatSettings = dataclasses.field(default_factory=ChatSettings)
    max_logprobs: int = MAX_LOGPROBS
    adapters: Mapping[str, LoRARequest] = dataclasses.field(default_factory=dict)
    lora_request: LoRARequest | None = None

    @classmethod
    def of(
        cls,
        info: EngineInfo,
        tokenizer: Tokenizer,
        names: Sequence[str] = (),
        chat: ChatSettings | None = None,
        max_logprobs: int = MAX_LOGPROBS,
        adapters: Sequence[LoRARequest] = (),
    ) -> Self:
        """The model of an engine; without `names` its name is the `model` setting."""
        model, config = info.model, info.config
        parts = [info.fingerprint, config.dtype, config.quantization]
        parts += [config.kv_cache_dtype] if config.kv_cache_dtype != "auto" else []
        parts += [info.weights_version] if info.weights_version else []
        basis = json.dumps([*parts, info.device_kind, __version__])
        return cls(
            names=tuple(names) or (str(config.model),),
            tokenizer=tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=config.max_model_len,
            default_sampling=dict(model.default_sampling),
            system_fingerprint=_fingerprint(basis),
            chat=chat or ChatSettings(),
            max_logprobs=max_logprobs,
            adapters={adapter.name: adapter for adapter in adapters},
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

    def named(self, name: str | None) -> Self:
        """The model for a request that names it so; None is the model itself. With an adapter,
        responses carry the adapter's name. Raises ModelNotFoundError for another name."""
        if name is None or name in self.names:
            return self
        adapter = self.adapters.get(name)
        if adapter is None:
            known = ", ".join(map(repr, (*self.names, *self.adapters)))
            raise ModelNotFoundError(f"model {name!r:.200} is not served here; use {known}.")
        basis = f"{self.system_fingerprint} {adapter.name} {adapter.path}"
        return dataclasses.replace(
            self,
            names=(name,),
            lora_request=adapter,
            system_fingerprint=_fingerprint(basis),
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
        """Raises TextTooLongError for a text with more characters than a context of the longest
        tokens: tokenizing it could take many seconds."""
        most = self.max_model_len * self.tokenizer.longest_token
        if len(text) > most:
            raise TextTooLongError(
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

        Raises RequestError for messages that the template rejects, FieldError for a template of the
        request that fails, PromptTooLongError for a text that is certainly too long.
        """
        variables = variables or {}
        if taken := sorted(RESERVED_VARIABLES & set(variables)):
            raise FieldError("chat_template_kwargs", f"must not set {taken[0]!r}.")
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt,
                tools,
                continue_final_message,
                chat_template,
                **variables,
            )
        except ChatTemplateError as error:
            own = (None, self.tokenizer.chat_template, self.tokenizer.tool_template)
            if chat_template in own:
                raise
            reason = str(error).removeprefix("the chat template ")
            raise FieldError("chat_template", reason) from error
        self.check_text(text)
        return TokenizedPrompt(text, self.tokenizer.encode(text, add_special_tokens))


def _fingerprint(basis: str) -> str:
    return f"fp_{hashlib.sha256(basis.encode()).hexdigest()[:10]}"
