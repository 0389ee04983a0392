"""Prompt types and tokenization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from jaxserve.core.errors import RequestError
from jaxserve.text import Tokenizer

Prompt = str | SequenceOf[int] | Mapping[str, str | SequenceOf[int]]
"""Text, token ids, {"prompt": text}, or {"prompt_token_ids": [...]}."""


@dataclasses.dataclass(frozen=True)
class TokenizedPrompt:
    """A validated prompt: its token ids, and its text if it was given as text."""

    text: str | None
    token_ids: list[int]


def tokenize_prompt(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, add_special_tokens: bool = True
) -> TokenizedPrompt:
    """Token ids of a prompt; text gets the model's special tokens if `add_special_tokens`.

    Raises RequestError for a wrong type, and for ids outside the vocabulary.
    """
    if isinstance(prompt, Mapping):
        prompt = _of_mapping(prompt)
    if isinstance(prompt, bytes):
        raise RequestError("the prompt is bytes; decode it to text first.")
    text = prompt if isinstance(prompt, str) else None
    try:
        token_ids = list(prompt) if text is None else tokenizer.encode(text, add_special_tokens)
    except TypeError:
        raise RequestError(
            f"the prompt is {prompt!r:.80}; it must be text or a list of token ids."
        ) from None
    for token_id in token_ids:
        integer = isinstance(token_id, (int, np.integer)) and not isinstance(token_id, bool)
        if not integer or not 0 <= token_id < vocab_size:
            if isinstance(token_id, str):
                raise RequestError(
                    f"the prompt is {prompt!r:.80}, a list with text; give one text, or a list of "
                    "token ids. `generate` takes several prompts."
                )
            raise RequestError(
                f"prompt token id {token_id!r} is out of vocabulary: it is not an integer in "
                f"0..{vocab_size - 1}."
            )
    return TokenizedPrompt(text, [int(token_id) for token_id in token_ids])


def _of_mapping(prompt: Mapping[str, str | SequenceOf[int]]) -> str | SequenceOf[int]:
    """The text or the token ids of a prompt given as a dict."""
    if set(prompt) == {"prompt_token_ids"}:
        return prompt["prompt_token_ids"]
    if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    raise RequestError(
        "a prompt given as a dict has the one key 'prompt', with text, or 'prompt_token_ids', with "
        f"a list of token ids; got {prompt!r:.80}."
    )
