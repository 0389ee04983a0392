"""Converts the token strings of a vocabulary to bytes.

A vocabulary stores each token as printable text. Two encodings cover all supported model families:

* *byte level* (GPT-2, Radford et al. 2019): one character of a 256-letter alphabet per byte;
* *byte fallback* (SentencePiece, Kudo and Richardson 2018): text with U+2581 for a space, and
  tokens named `<0xE2>` for the bytes of characters the vocabulary lacks.

The bytes of each single token make streaming exact: text is the UTF-8 decoding of a growing byte
string, whatever the token boundaries.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

from jaxserve.core.errors import ModelError

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK_DECODER = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes map to themselves, the others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True)
class Spelling:
    """The encoding of one vocabulary, read from its Hugging Face decoder."""

    byte_level: bool
    strips_leading_space: bool
    """Whether a text's first space is added by the tokenizer and dropped on decoding."""

    @classmethod
    def of(cls, decoder: tokenizers.decoders.Decoder | None) -> Spelling:
        """Raises `ModelError` when the decoder is neither byte level nor byte fallback."""
        steps = _flatten(json.loads(decoder.__getstate__())) if decoder is not None else []
        kinds = {step["type"] for step in steps}
        if kinds and kinds <= {"ByteLevel", "Fuse"}:
            return cls(byte_level=True, strips_leading_space=False)
        if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and _SPACE_MARK_DECODER in steps:
            strips = any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
            return cls(byte_level=False, strips_leading_space=strips)
        raise ModelError(
            f"tokenizer decoder {sorted(kinds) or None} is not supported; supported are byte-level "
            "BPE (ByteLevel) and SentencePiece BPE (Replace, ByteFallback, Fuse, Strip)"
        )

    def to_bytes(self, token: str) -> bytes:
        """The bytes of `token`, which may be a part of a UTF-8 character."""
        if self.byte_level:
            try:
                return bytes([BYTE_ALPHABET[char] for char in token])
            except KeyError:  # an added token, stored as plain text
                return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]
