"""Incremental detokenization, which emits only text that no later token can change."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence

from jaxserve.text.tokenizer import Tokenizer

_LONGEST_PARTIAL_CHARACTER = 3
"""Maximum bytes of an incomplete UTF-8 character."""


class Detokenizer:
    """The text of one sequence, token by token, cut at its first stop string.

    Two things are held back: bytes of an incomplete character, and text that may be the beginning
    of a stop string. Without a stop string all deltas joined equal `tokenizer.decode(token_ids)`;
    after a prompt, they equal what the tokens add to the prompt's text. The work per token is
    independent of the length of the output.

    Of several stop strings, the one that completes first is used, and of those that complete at
    the same character the longest.

    Attributes:
        stop_reason: the stop string found, after which every further token is ignored.
        tokens_consumed: tokens decoded so far, up to the one that completes a stop string.
    """

    __slots__ = (
        "_drops_space",
        "_emitted",
        "_first_characters",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_partial",
        "_skipped",
        "_stop",
        "_tokenizer",
        "_utf8",
        "stop_reason",
        "tokens_consumed",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`stop` has no empty strings; it is ignored in the first `min_tokens` tokens."""
        self.stop_reason: str | None = None
        self.tokens_consumed = 0
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._stop = tuple(stop)
        self._first_characters = _first_characters(self._stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._emitted: list[str] = []

        tail = self._tail_bytes(prompt_token_ids)
        self._drops_space = tokenizer.strips_leading_space and not tail
        self._partial = False  # Whether the last character is incomplete.
        self._decode(tail)

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._emitted)

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds the next tokens; returns the new text that is final."""
        delta = ""
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self.tokens_consumed += 1
            delta += self._advance(self._text(token_id))
        self._emitted.append(delta)
        return delta

    def finish(self) -> str:
        """Ends the sequence; returns the text held back."""
        delta = ""
        if self.stop_reason is None:
            delta = self._advance(self._utf8.decode(b"", final=True)) + self._held
            self._held = ""
        self._emitted.append(delta)
        return delta

    def _text(self, token_id: int) -> str:
        """The characters that a token completes."""
        if token_id in self._skipped:
            return ""
        if not self._partial and not self._drops_space:
            text = self._tokenizer.whole_text(token_id)
            if text is not None:
                return text
        spelled = self._tokenizer.token_bytes(token_id)
        if self._drops_space and spelled:
            self._drops_space = False
            spelled = spelled.removeprefix(b" ")
        return self._decode(spelled)

    def _decode(self, spelled: bytes) -> str:
        text = self._utf8.decode(spelled)
        self._partial = bool(self._utf8.getstate()[0])
        return text

    def _tail_bytes(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, enough for the character that may be incomplete."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= _LONGEST_PARTIAL_CHARACTER:
                break
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
        return tail

    def _advance(self, new_text: str) -> str:
        if not self._stop or self.tokens_consumed <= self._min_tokens:
            return new_text
        pending = self._held + new_text
        for character in self._first_characters:
            if character in pending:
                break
        else:
            return pending
        match = self._first_stop(pending)
        if match is None:
            certain = len(pending) - self._unfinished_stop(pending)
            self._held = pending[certain:]
            return pending[:certain]
        self._held = ""
        end, start, self.stop_reason = match
        return pending[: end if self._include_stop else start]

    def _first_stop(self, text: str) -> tuple[int, int, str] | None:
        """(end, start, stop string) of the match that ends first, the longest of those."""
        matches = []
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches, default=None)

    def _unfinished_stop(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = 0
        for stop in self._stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            if start >= 0:
                longest = max(longest, len(text) - start)
        return longest


@functools.lru_cache(maxsize=256)
def _first_characters(stop: tuple[str, ...]) -> tuple[str, ...]:
    """The characters that a stop string may begin with: of sequences that stop alike one tuple,
    since it is read for each of their tokens."""
    return tuple({text[0] for text in stop})
