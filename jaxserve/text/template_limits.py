"""A Jinja sandbox that also bounds what a template takes: time, output and memory.

Jinja's own sandbox keeps a template from the interpreter, but lets it loop for years and double a
string until memory is full. Here the code generator passes through `LimitedEnvironment` whatever a
loop iterates over, an assignment stores, `~` joins and the template writes, and every list, tuple
and dict. Calls, which Jinja's sandbox passes there already, filters and operators are checked too,
where they could make a large value of small ones. The size of a value is that of its text, in which
what it holds twice counts twice: sixty lists, each of the one before it twice, would take years to
write or to compare.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace

MAX_SOURCE_CHARS = 1 << 18
MAX_SECONDS = 1.0
"""Of the rendering thread's own time."""

MAX_CHARS = 1 << 24
"""Of a prompt, and of everything else that one rendering writes into macros and blocks."""

_MAX_MADE = 32 * MAX_CHARS
_SIZE = 8  # Of a number, of a list without entries, and beside the characters of a string.
_MAX_KNOWN = 1 << 21  # Entries of the containers that are kept with their sizes.
_MAX_DEPTH = 10_000
_KEEPERS = (Namespace, Cycler, dict)
# Filters that take seconds for a long text, and that no template needs for one.
_SLOW_FILTERS = ("e", "escape", "forceescape", "title", "urlencode", "wordcount", "xmlattr")
_MAX_SLOW_CHARS = 1 << 18
_MAX_WIDTH = 1 << 12
_MAX_INTEGER_BITS = 1 << 12
# A field of %-formatting or of str.format whose width has four digits or is an argument.
_WIDTH = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*?(?:\d{4}|\*)|\{[^{}]*?(?:\d{4}|\{)")
_MAX_LAYOUT_CHARS = 1 << 14
_NAMED_FIELD = re.compile(r"%\(|\{[^}:!]")  # Several may be of one value.
# Filters that no chat template needs and that make large values of small ones.
_DROPPED_FILTERS = ("center", "batch", "slice", "wordwrap", "urlize", "pprint")
_PADDING_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs")


class TemplateLimitError(Exception):
    """A template takes more time or memory than any chat template needs."""


class _Budget:
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
                _check_chars(self._size(value))
            self._to_make -= _SIZE * len(value)  # What it holds was counted before.
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
                    _check_chars(_SIZE * len(part))
                    of_dict = part.values() if isinstance(part, dict) else ()
                    begun.append(_Sized(part, itertools.chain(part, of_dict)))
                    break
                _check_chars(inner.size)
            else:
                begun.pop()
                if not begun:
                    return inner.size - _SIZE
                self._remember(inner.value, inner.size)
                begun[-1].size += inner.size
                _check_chars(begun[-1].size)
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


_budget: ContextVar[_Budget] = ContextVar("template_budget")


class _LimitedCode(CodeGenerator):
    """Passes values through methods of the environment."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = _through("timed", node.iter)
        super().visit_For(node, frame)

    def visit_Assign(self, node: nodes.Assign, frame: Frame) -> None:
        is_attribute = isinstance(node.target, nodes.NSRef)
        node.node = _through("kept" if is_attribute else "stored", node.node)
        super().visit_Assign(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.made(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        is_value = node.ctx == "load"
        self.write("environment.made(" if is_value else "")
        super().visit_Tuple(node, frame)
        self.write(")" if is_value else "")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.visit(_through("concatenated", *node.nodes), frame)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        node.nodes = [_through("written", _expression(child)) for child in node.nodes]
        super().visit_Output(node, frame)


def _expression(child: nodes.Expr) -> nodes.Expr:
    return nodes.Const(child.data) if isinstance(child, nodes.TemplateData) else child


def _through(method: str, *values: nodes.Expr) -> nodes.Expr:
    function = nodes.EnvironmentAttribute(method)
    return nodes.Call(function, list(values), [], None, None, lineno=values[0].lineno)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Renders templates; raises TemplateLimitError where one exceeds a limit."""

    code_generator_class = _LimitedCode
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        del self.globals["lipsum"]
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Make `function` the filter `name`, within the limits."""
        check = _FILTER_CHECKS.get(name)
        jinja_object_first = hasattr(function, "jinja_pass_arg")

        def limited(*args: Any, **named: Any) -> Any:
            budget = _budget.get()
            budget.check_time()
            values = (*args[jinja_object_first:], *named.values())
            if budget.size(*values) > _MAX_SLOW_CHARS and name in _SLOW_FILTERS:
                raise TemplateLimitError(f"the filter {name} is for shorter texts")
            if check is not None:
                check(*values)
            return budget.made(function(*args, **named))

        if jinja_object_first:
            limited.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        self.filters[name] = limited

    @staticmethod
    def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """The text of `template`, which must be of a LimitedEnvironment."""
        token = _budget.set(_Budget())
        try:
            return template.render(variables)
        finally:
            _budget.reset(token)

    def from_string(self, source: str, *args: Any, **settings: Any) -> jinja2.Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateLimitError(
                f"it has {len(source):,} characters; at most {MAX_SOURCE_CHARS:,} are read"
            )
        return super().from_string(source, *args, **settings)

    def timed(self, values: Iterable[Any]) -> Iterator[Any]:
        """What a loop iterates over."""
        budget = _budget.get()
        for value in values:
            budget.check_time()
            yield value

    def stored(self, value: Any) -> Any:
        """The value of an assignment."""
        _check_length(value)
        return value

    def kept(self, value: Any) -> Any:
        """The value of an assignment to an attribute of a namespace."""
        if isinstance(value, Namespace):
            raise TemplateLimitError("it makes a namespace a part of another value, or text")
        return self.stored(value)

    def made(self, value: Any) -> Any:
        """A list, a tuple or a dict of the template."""
        return _budget.get().made(value)

    def concatenated(self, *values: Any) -> str:
        """What `~` makes of values."""
        budget = _budget.get()
        _check_chars(budget.size(*values))
        return budget.made("".join(map(str, values)))

    def written(self, value: Any) -> str:
        """What is written to the prompt, or into a macro or block."""
        if not isinstance(value, str):
            _budget.get().size(value)
        text = str(value)
        _budget.get().write(len(text))
        return text

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        if getattr(function, "__self__", None) is self:
            return super().call(context, function, *args, **named)
        budget = _budget.get()
        budget.check_time()
        for value in (*args, *named.values()):
            _check_length(value)
        if function in _KEEPERS:
            budget.size(*args, *named.values())
        _check_method(function, args, named)
        return budget.made(super().call(context, function, *args, **named))

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        size = _check_binop(operator, left, right)
        return _budget.get().made(super().call_binop(context, operator, left, right), size)


def _check_binop(operator: str, left: Any, right: Any) -> int | None:
    """The size of `left operator right`, where it is known before. Raises TemplateLimitError when
    it would be too large."""
    if operator == "%" and isinstance(left, str):
        _check_layout(left, right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if bits > _MAX_INTEGER_BITS or right.bit_length() > _MAX_INTEGER_BITS:
            raise TemplateLimitError("it computes an integer of too many digits")
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and hasattr(value, "__len__"):
                size = _budget.get().size(value) * max(1, times)
                _check_chars(size)
                return size
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        is_text = isinstance(left, str) and isinstance(right, str)
        size = len(left) + len(right) if is_text else _budget.get().size(left, right)
        _check_chars(size)
        return size
    return None


def _check_method(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Methods of strings that make a long one."""
    function = getattr(function, "__wrapped__", function)  # Jinja wraps str.format.
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(owner, str):
        return
    if name in _PADDING_METHODS:
        _check_numbers(*args)
    elif name in ("format", "format_map"):
        _check_layout(owner, *args, *named.values())
    elif name == "replace":
        _check_replace(owner, *args)
    elif name == "join":
        _check_join(*args[:1], owner)


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _check_chars(len(text) + text.count(old) * len(new))


def _check_join(values: Any = (), separator: Any = "", *_: Any) -> None:
    if hasattr(values, "__len__") and isinstance(separator, str):
        _check_chars(len(values) * len(separator))


def _check_numbers(*args: Any) -> None:
    if any(isinstance(value, int) and value > _MAX_WIDTH for value in args):
        raise TemplateLimitError(f"it pads a text to more than {_MAX_WIDTH:,} characters")


def _check_layout(layout: Any, *values: Any) -> None:
    """A %-format or a format string, whose fields may each be any of the values."""
    layout = str(layout)
    if len(layout) > _MAX_LAYOUT_CHARS or _WIDTH.search(layout):
        raise TemplateLimitError(f"it formats by {layout[:80]!r}, with too large a width")
    times = len(_NAMED_FIELD.findall(layout))
    _check_chars(len(layout) + _budget.get().size(*values) * max(1, times))


def _check_length(value: Any) -> None:
    if isinstance(value, str | list | tuple | dict):
        _check_chars(len(value))


def _check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise TemplateLimitError(f"it makes a value of more than {MAX_CHARS:,} characters")


_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "replace": _check_replace,
    "join": _check_join,
    "indent": _check_numbers,
    "tojson": _check_numbers,
    "format": _check_layout,
}
