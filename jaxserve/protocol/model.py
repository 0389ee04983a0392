"""The protocol's view of the served model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from jaxserve.engine.prompts import Prompt, TokenizedPrompt, tokenize_prompt
from jaxserve.protocol.errors import FieldError, ModelNotFoundError
from jaxserve.text import Tokenizer

if TYPE_CHECKING:
    from jaxserve.runtime.startup import EnginePlan

_OURS = frozenset({"messages", "tools", "add_generation_prompt", "documents"})


@dataclasses.dataclass(frozen=True)
class Model:
    """A served model: its names (responses carry the first), its tokenizer and limits.

    `default_sampling` comes from its generation_config.json.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    default_sampling: Mapping[str, Any]

    @classmethod
    def of(cls, plan: EnginePlan, tokenizer: Tokenizer, names: Sequence[str] = ()) -> Self:
        """The model of an engine; without `names` its name is the `model` setting."""
        model = plan.shapes.model
        return cls(
            names=tuple(names) or (str(plan.config.model),),
            tokenizer=tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=plan.config.max_model_len,
            default_sampling=dict(model.default_sampling),
        )

    @property
    def name(self) -> str:
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless `name` is None or one of the model's names."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(
                f"model {name!r:.200} is not served here; use {', '.join(map(repr, self.names))}."
            )

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Raises RequestError for an invalid prompt."""
        return tokenize_prompt(prompt, self.tokenizer, self.vocab_size)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenizedPrompt:
        """A conversation rendered by the chat template, with `variables` as extra variables.

        Raises RequestError for messages that the template rejects.
        """
        variables = variables or {}
        if taken := sorted(_OURS & set(variables)):
            raise FieldError("chat_template_kwargs", f"must not set {taken[0]!r}.")
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt, tools, **variables
        )
        return TokenizedPrompt(text, self.tokenizer.encode(text, add_special_tokens=False))
