"""The tags that most models put around their reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"

_END_TOKENS = 32
"""Tokens at the end of a prompt that surely hold its last tag and the space after it."""


def has_channels(template: str | None) -> bool:
    """Whether a chat template is of the harmony format (gpt-oss), which has channels instead."""
    return "<|channel|>" in (template or "")


def opens_thinking(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bool:
    """Whether a prompt opens the reasoning, as that of many templates does."""
    end = b"".join(tokenizer.token_bytes(token_id) for token_id in prompt_token_ids[-_END_TOKENS:])
    return end.decode("utf-8", "replace").rstrip().endswith(OPEN)
