"""Log probabilities in OpenAI's two formats, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.core.requests.outputs import Logprob
from jaxserve.text import Tokenizer
from jaxserve.text.detokenizer import Detokenizer

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot represent."""

LogprobsByToken = dict[int, Logprob]


class TextOffsets:
    """Character offsets of tokens in a text. Tokens that are parts of one character share its
    offset."""

    def __init__(self, detokenizer: Detokenizer, begin: int = 0) -> None:
        """`detokenizer` decodes the text, which starts at offset `begin`."""
        self._detokenizer = detokenizer
        self._end = begin

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.push([token_id]))
        return offsets


def token_names(tokenizer: Tokenizer, as_ids: bool) -> Callable[[int], str]:
    """How log probabilities name tokens: by text, or `as_ids` as `token_id:5`, which tells tokens
    of equal text apart."""
    return "token_id:{}".format if as_ids else tokenizer.token_text


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[LogprobsByToken | None],
    name: Callable[[int], str],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """The legacy format of `/v1/completions`: parallel lists, one entry per token.

    An entry is None for a prompt's first token, which nothing precedes. `name` is from
    `token_names`, `offsets` are from `TextOffsets`. `top_logprobs` has one token more than
    requested if the sampled token is not among the top ones.
    """
    return {
        "tokens": [name(token_id) for token_id in token_ids],
        "token_logprobs": [
            None if entry is None else _number(entry[token_id])
            for token_id, entry in zip(token_ids, entries, strict=True)
        ],
        "top_logprobs": [None if entry is None else _by_name(entry, name) for entry in entries],
        "text_offset": list(offsets),
    }


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[LogprobsByToken],
    top: int | None,
    tokenizer: Tokenizer,
    name: Callable[[int], str],
) -> dict[str, Any]:
    """The format of `/v1/chat/completions`: a list of tokens, each with its `top` most likely;
    None: with all of its entry. `name` is from `token_names`."""

    def token(token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": name(token_id),
            "logprob": _number(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        most_likely = sorted(entry.items(), key=_most_likely_first)[:top]
        content.append(
            token(token_id, entry[token_id])
            | {"top_logprobs": [token(i, logprob) for i, logprob in most_likely]}
        )
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[LogprobsByToken | None]) -> list[dict[str, Any] | None]:
    """vLLM's format: by token id, with ranks."""
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


def _by_name(entry: LogprobsByToken, name: Callable[[int], str]) -> dict[str, float]:
    """Most likely first; of tokens with equal text, such as parts of characters, the likelier."""
    texts: dict[str, float] = {}
    for token_id, logprob in sorted(entry.items(), key=_most_likely_first):
        texts.setdefault(name(token_id), _number(logprob))
    return texts


def _most_likely_first(item: tuple[int, Logprob]) -> tuple[float, int]:
    return -item[1].logprob, item[0]


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)
