"""What operators, methods and filters of a chat template may not do: make a large value of small
ones, or take long in one call, where no budget stops them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.text.template_budget import (
    TemplateLimitError,
    check_bits,
    check_chars,
    current,
)

DROPPED_FILTERS = ("center", "batch", "slice", "striptags", "wordwrap", "urlize", "pprint")
"""Those that no chat template needs and that make large values of small ones, or take long."""

# Filters that take seconds for a long text, and that no template needs for one.
_SLOW_FILTERS = ("e", "escape", "forceescape", "title", "urlencode", "wordcount", "xmlattr")
_MAX_SLOW_CHARS = 1 << 18
_MAX_TRIMMED = 256
_MAX_INDENT = 16
_MAX_PRECISION = 100
_MAX_WIDTH = 1 << 12
# A field of %-formatting or of str.format whose width has four digits or is an argument.
_WIDTH = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*?(?:\d{4}|\*)|\{[^{}]*?(?:\d{4}|\{)")
_MAX_LAYOUT_CHARS = 1 << 14
_NAMED_FIELD = re.compile(r"%\(|\{[^}:!]")  # Several may be of one value.


def check_filter(name: str, values: Sequence[Any]) -> None:
    """Raises TemplateLimitError for a filter of what it filters and its options."""
    if current.get().size(*values) > _MAX_SLOW_CHARS and name in _SLOW_FILTERS:
        raise TemplateLimitError(f"the filter {name} is for shorter texts")
    check = _FILTERS.get(name)
    if check is not None:
        check(*values)


def check_binop(operator: str, left: Any, right: Any) -> int | None:
    """The size of `left operator right`, where it is known before. Raises TemplateLimitError when
    it would be too large."""
    if operator == "%" and isinstance(left, str):
        _check_layout(left, right)
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() * right if operator == "**" else left.bit_length())
        check_bits(right.bit_length())
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, str):
                check_chars(len(value) * times)
            elif isinstance(times, int) and hasattr(value, "__len__"):
                size = current.get().size(value) * max(1, times)
                check_chars(size)
                return size
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        is_text = isinstance(left, str) and isinstance(right, str)
        size = len(left) + len(right) if is_text else current.get().size(left, right)
        check_chars(size)
        return size
    return None


def check_method(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Methods of strings and integers that make a long value, or take long."""
    function = getattr(function, "__wrapped__", function)  # Jinja wraps str.format.
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    check = _METHODS.get(name)
    if check is not None and isinstance(owner, str | int):
        check(owner, *args, *named.values())


def _refuse(*_: Any) -> None:
    raise TemplateLimitError("it has bytes or a table of translations, which no template needs")


def _check_replace(text: Any, *options: Any) -> None:
    """The options of a filter have any order if they are named."""
    words = [option for option in options if isinstance(option, str)]
    if isinstance(text, str) and words:
        longest = max(map(len, words))
        check_chars(len(text) + max(map(text.count, words)) * longest)


def _check_join(values: Any = (), *options: Any) -> None:
    longest = max((len(option) for option in options if isinstance(option, str)), default=0)
    if hasattr(values, "__len__"):
        check_chars(len(values) * longest)


def _check_width(_: Any, *options: Any) -> None:
    if any(isinstance(option, int) and option > _MAX_WIDTH for option in options):
        raise TemplateLimitError(f"it pads a text to more than {_MAX_WIDTH:,} characters")


def _check_tabs(text: Any, width: Any = 8, *_: Any) -> None:
    if isinstance(text, str) and isinstance(width, int):
        check_chars(len(text) + text.count("\t") * width)


def _check_indent(text: Any, *options: Any) -> None:
    widths = [each if isinstance(each, int) else len(str(each)) for each in options]
    check_chars(len(str(text)) + (str(text).count("\n") + 1) * max(widths, default=4))


def _check_trim(_: Any, chars: Any = None, *others: Any) -> None:
    if isinstance(chars, str) and len(chars) > _MAX_TRIMMED:
        raise TemplateLimitError(f"it trims more than {_MAX_TRIMMED} kinds of characters")


def _check_tojson(value: Any, *options: Any) -> None:
    indents = [option for option in options if type(option) is int]
    if indents and (max(indents) > _MAX_INDENT or current.get().size(value) > _MAX_SLOW_CHARS):
        raise TemplateLimitError("it indents too long a JSON document, or too widely")


def _check_round(_: Any, *options: Any) -> None:
    if any(isinstance(option, int) and abs(option) > _MAX_PRECISION for option in options):
        raise TemplateLimitError(f"it rounds to more than {_MAX_PRECISION} digits")


def _check_sum(_: Any, *options: Any) -> None:
    if any(isinstance(option, list | tuple) for option in options):
        raise TemplateLimitError("it adds up lists by the filter sum, which takes long")


def _check_layout(layout: Any, *values: Any) -> None:
    """A %-format or a format string, whose fields may each be any of the values."""
    layout = str(layout)
    if len(layout) > _MAX_LAYOUT_CHARS or _WIDTH.search(layout):
        raise TemplateLimitError(f"it formats by {layout[:80]!r}, with too large a width")
    times = len(_NAMED_FIELD.findall(layout))
    check_chars(len(layout) + current.get().size(*values) * max(1, times))


def check_length(value: Any) -> None:
    if isinstance(value, str | list | tuple | dict):
        check_chars(len(value))


_Check = Callable[..., None]
_METHODS: dict[str, _Check] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_width),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _check_trim),
    **dict.fromkeys(("format", "format_map"), _check_layout),
    **dict.fromkeys(("encode", "to_bytes", "translate"), _refuse),
    "expandtabs": _check_tabs,
    "join": lambda separator, values=(), *_: _check_join(values, separator),
    "replace": _check_replace,
}
_FILTERS: dict[str, _Check] = {
    "format": _check_layout,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "round": _check_round,
    "sum": _check_sum,
    "tojson": _check_tojson,
    "trim": _check_trim,
}
