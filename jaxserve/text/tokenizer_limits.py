"""What an untrusted tokenizer may take of time and memory for a text."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import tokenizers

from jaxserve.core.errors import JaxserveError, ModelError

_PROBE_LENGTH = 48
_MAX_GROWTH = 256
"""Times that normalizers may lengthen a text; the longest of Unicode's own compatibility forms has
18 characters."""
_MAX_ADDED = 1024
"""Characters, or special tokens, that are put around every text."""


def check_backend(backend: tokenizers.Tokenizer) -> None:
    """Raises `ModelError` for a pattern that takes exponential time, and for a tokenizer that makes
    a text many times longer."""
    normalizers = _parts_of(backend.normalizer, "normalizers")
    growth = math.prod(map(_growth, normalizers))
    if growth > _MAX_GROWTH:
        raise ModelError(
            f"the tokenizer's normalizers can make a text {growth:.3g} times longer; do not use it."
        )
    added = sum(len(part.get("prepend", "")) for part in normalizers)
    pieces = [
        piece
        for part in _parts_of(backend.post_processor, "processors")
        for piece in part.get("single", ())
    ]
    texts = sum("Sequence" in piece for piece in pieces)
    added += sum(map(len, _ids(backend.post_processor))) + len(pieces)
    if texts > 1 or added > _MAX_ADDED:
        raise ModelError(
            f"the tokenizer writes every text {max(1, texts)} times, with {added} characters or "
            f"tokens around it; once and {_MAX_ADDED} are read. Do not use it."
        )
    _check_patterns(backend)


def _parts_of(step: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a sequence of steps, which may hold sequences."""
    found, waiting = [], [{} if step is None else json.loads(step.__getstate__())]
    while waiting:
        part = waiting.pop()
        waiting += part.get(name, ())
        found.append(part)
    return found


def _growth(normalizer: dict[str, Any]) -> float:
    """How many times longer it can make a text."""
    match normalizer:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": content} if old:
            return max(1.0, len(content) / len(old))
        case {"type": "Replace", "content": content}:  # It may match where there is nothing.
            return 1.0 + len(content)
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            return max(1.0, _longest_replacement(base64.b64decode(encoded)))
    return 1.0


def _longest_replacement(charsmap: bytes) -> int:
    """Bytes of the longest text that SentencePiece's map has for a character: the map is a trie,
    behind its size, and then these texts, each with a zero at its end."""
    size = int.from_bytes(charsmap[:4], "little")
    return max(map(len, charsmap[4 + size :].split(b"\0")))


def _ids(post_processor: Any) -> list[list[int]]:
    """The ids that each special token of a post-processor stands for."""
    parts = _parts_of(post_processor, "processors")
    tokens = [part.get("special_tokens") for part in parts]
    return [
        token.get("ids", []) for each in tokens if isinstance(each, dict) for token in each.values()
    ]


@contextmanager
def library_errors(kind: type[JaxserveError], what: str) -> Iterator[None]:
    """Raises `kind` for whatever the tokenizers library raises: bare Exception, and where it panics
    (a pattern that exceeds its limit of retries) something that is not even one."""
    try:
        yield
    except JaxserveError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {error}") from error


def _check_patterns(backend: tokenizers.Tokenizer) -> None:
    """Raises `ModelError` for a pattern that takes exponential time on a run of equal characters.

    The library limits the retries of a match, to some tenths of a second. A pattern that gets there
    with a short text would take that long for every few words.
    """
    steps = [step for step in (backend.normalizer, backend.pre_tokenizer) if step is not None]
    parts = "".join(step.__getstate__().decode() for step in steps)
    if '"Regex"' not in parts:
        return
    for run in sorted(set(parts) | set("a0 \n\t.é中"))[:256]:
        with (
            library_errors(
                ModelError, "the tokenizer has a pattern that takes exponential time; do not use it"
            ),
            suppress(Exception),  # A character that the vocabulary lacks.
        ):
            backend.encode(run * _PROBE_LENGTH + "\0", add_special_tokens=False)
