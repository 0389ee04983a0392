"""The tags that most models put around their reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
_TAGS = (OPEN.encode(), CLOSE.encode())


def has_channels(template: str | None) -> bool:
    """Whether a chat template is of the harmony format (gpt-oss), which has channels instead."""
    return "<|channel|>" in (template or "")


def begun_thinking(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> str | None:
    """The reasoning that a prompt ends within: "" after a template that opens it, more of it in a
    message to be continued. None if it does not.

    Looks at the text after the last added token, such as that of a turn: a tag before may be part
    of what a user says.
    """
    end: list[bytes] = []
    for token_id in reversed(prompt_token_ids):
        text = tokenizer.token_bytes(token_id)
        if token_id in tokenizer.added_token_ids and text.strip() and text not in _TAGS:
            break
        end.append(text)
    _, tag, after = b"".join(reversed(end)).decode("utf-8", "replace").rpartition(OPEN)
    return after if tag and CLOSE not in after else None
