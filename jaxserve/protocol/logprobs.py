"""Log probabilities in OpenAI's two shapes, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.outputs import Logprob
from jaxserve.text import Tokenizer
from jaxserve.text.detokenizer import Detokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

Entry = dict[int, Logprob]


class TextOffsets:
    """Where in a text its tokens begin, in characters. Tokens that are parts of one character
    begin where it does."""

    def __init__(self, detokenizer: Detokenizer, begin: int = 0) -> None:
        """`detokenizer` makes the text, which begins at `begin`."""
        self._detokenizer = detokenizer
        self._end = begin

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Those of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.push([token_id]))
        return offsets


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    tokenizer: Tokenizer,
    offsets: Sequence[int],
) -> dict[str, Any]:
    """The legacy shape, of `/v1/completions`: parallel lists, one entry a token.

    An entry is None for a prompt's first token, which nothing precedes. `offsets` are those of
    `TextOffsets`. `top_logprobs` has one more token than was
    asked for where the one taken is not among the likeliest.
    """
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id in token_ids],
        "token_logprobs": [
            None if entry is None else _number(entry[token_id])
            for token_id, entry in zip(token_ids, entries, strict=True)
        ],
        "top_logprobs": [
            None if entry is None else _by_text(entry, tokenizer) for entry in entries
        ],
        "text_offset": list(offsets),
    }


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], top: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The shape of `/v1/chat/completions`: a list of tokens, each with its `top` likeliest."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        likeliest = sorted(entry.items(), key=_rank)[:top]
        content.append(
            _token(token_id, entry[token_id], tokenizer)
            | {"top_logprobs": [_token(i, logprob, tokenizer) for i, logprob in likeliest]}
        )
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[Entry | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape: by token id, with ranks."""
    return [
        entry
        and {
            str(token_id): {
                "logprob": _number(logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in entry.items()
        }
        for entry in entries
    ]


def _token(token_id: int, logprob: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _number(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _by_text(entry: Entry, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest first; of tokens that read alike, as parts of characters do, the likelier."""
    texts: dict[str, float] = {}
    for token_id, logprob in sorted(entry.items(), key=_rank):
        texts.setdefault(tokenizer.token_text(token_id), _number(logprob))
    return texts


def _rank(item: tuple[int, Logprob]) -> tuple[int, int]:
    return item[1].rank, item[0]


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST_LOGPROB)
