"""What one rendering of a chat template may take: time, characters, and sizes of values.

The size of a value is that of its text, in which what it holds twice counts twice: sixty lists,
each of the one before it twice, would take years to write or to compare.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

MAX_SECONDS = 5.0
"""Of the rendering thread's own time, with the garbage collection that falls into it."""

MAX_CHARS = 1 << 24
"""Of a prompt, and of everything else that one rendering writes into macros and blocks."""

MAX_INTEGER_BITS = 1 << 12
_MAX_MADE = 32 * MAX_CHARS
_SIZE = 8  # Of a number, of a list without entries, and beside the characters of a string.
_MAX_KNOWN = 1 << 21  # Entries of the containers that are kept with their sizes.
_MAX_DEPTH = 10_000


class TemplateLimitError(Exception):
    """A template takes more time or memory than any chat template needs."""


class Budget:
    """What is left to one rendering: seconds of its thread, characters, and sizes of values."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + MAX_SECONDS
        self._chars = MAX_CHARS
        self._to_make = _MAX_MADE
        self._known: dict[int, tuple[Any, int]] = {}
        """The last containers and their sizes, by id."""
        self._num_known = 0

    def check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} s")

    def write(self, chars: int) -> None:
        self._chars -= chars
        if self._chars < 0:
            raise TemplateLimitError(f"it writes more than {MAX_CHARS:,} characters")

    def made(self, value: Any, size: int | None = None) -> Any:
        """A new string or container; `size`: what it is known to be."""
        if isinstance(value, str):
            self._to_make -= len(value)
        elif isinstance(value, list | tuple | dict):
            if size is not None:
                self._remember(value, size)
            elif not value:
                return value
            else:
                check_chars(self._size(value))
            self._to_make -= _SIZE * len(value)  # What it holds was counted before.
        elif isinstance(value, int):
            check_bits(value.bit_length())
        if self._to_make < 0:
            raise TemplateLimitError(f"it makes values of more than {_MAX_MADE:,} characters")
        return value

    def size(self, *values: Any) -> int:
        """The size of all these values. Raises TemplateLimitError above MAX_CHARS."""
        return sum(map(self._size, values))

    def _size(self, value: Any) -> int:
        if not isinstance(value, list | tuple | dict):
            return _size_of_leaf(value)
        if (known := self._known.get(id(value))) is not None:
            return known[1]
        self.check_time()
        begun = [_Sized(None, iter((value,)))]
        while True:
            inner = begun[-1]
            for part in inner.rest:
                if not isinstance(part, list | tuple | dict):
                    inner.size += _size_of_leaf(part)
                elif (known := self._known.get(id(part))) is not None:
                    inner.size += known[1]
                else:
                    check_chars(_SIZE * len(part))
                    of_dict = part.values() if isinstance(part, dict) else ()
                    begun.append(_Sized(part, itertools.chain(part, of_dict)))
                    break
                check_chars(inner.size)
            else:
                begun.pop()
                if not begun:
                    return inner.size - _SIZE
                self._remember(inner.value, inner.size)
                begun[-1].size += inner.size
                check_chars(begun[-1].size)
            if len(begun) > _MAX_DEPTH:
                raise TemplateLimitError("a value in it is nested too deeply")

    def _remember(self, value: Any, size: int) -> None:
        """Keeps the value, so that its id remains its own, and forgets the oldest ones."""
        self._known[id(value)] = value, size
        self._num_known += len(value)
        while self._num_known > _MAX_KNOWN and len(self._known) > 1:
            oldest, _ = self._known.pop(next(iter(self._known)))
            self._num_known -= len(oldest)


class _Sized:
    """A container whose size is being added up, and those of its parts that are still to come."""

    def __init__(self, value: Any, rest: Iterator[Any]) -> None:
        self.value, self.rest, self.size = value, rest, _SIZE


def _size_of_leaf(value: Any) -> int:
    if isinstance(value, str):
        return _SIZE + len(value)
    if isinstance(value, int):
        return _SIZE + value.bit_length() // 3
    if isinstance(value, Namespace):
        raise TemplateLimitError("it makes a namespace a part of another value, or text")
    return _SIZE


def check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise TemplateLimitError(f"it makes a value of more than {MAX_CHARS:,} characters")


def check_bits(count: int) -> None:
    if count > MAX_INTEGER_BITS:
        raise TemplateLimitError("it computes an integer of too many digits")


current: ContextVar[Budget] = ContextVar("template_budget")
"""Of the rendering that this thread is in."""
