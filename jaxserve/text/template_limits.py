"""A Jinja sandbox that also bounds what a template takes: time, output and memory.

Jinja's own sandbox keeps a template from the interpreter, but lets it loop for years and double a
string until memory is full. Here the code generator passes through `LimitedEnvironment` whatever a
loop iterates over, an assignment stores, `~` joins and the template writes. Calls, which Jinja's
sandbox passes there already, filters and operators are checked too, where they could make a large
value of small ones.
"""

from __future__ import annotations

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

MAX_SOURCE_CHARS = 1 << 18
MAX_SECONDS = 1.0
"""Of the rendering thread's own time."""

MAX_CHARS = 1 << 25
"""Of a prompt, and of everything else that one rendering writes into macros and blocks."""

_MAX_STORED_CHARS = 4 * MAX_CHARS
_MAX_WIDTH = 1 << 12
_MAX_INTEGER_BITS = 1 << 12
# A field of %-formatting or of str.format whose width has four digits or is an argument.
_WIDTH = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*?(?:\d{4}|\*)|\{[^{}]*?(?:\d{4}|\{)")
_MAX_LAYOUT_CHARS = 1 << 14
# Filters that no chat template needs and that make large values of small ones.
_DROPPED_FILTERS = ("center", "batch", "slice", "wordwrap", "urlize", "pprint")
_PADDING_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs")


class TemplateLimitError(Exception):
    """A template takes more time or memory than any chat template needs."""


class _Budget:
    """What is left to one rendering: seconds of its thread, and characters."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + MAX_SECONDS
        self._chars = MAX_CHARS
        self._stored_chars = _MAX_STORED_CHARS

    def check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} s")

    def write(self, chars: int) -> None:
        self._chars -= chars
        if self._chars < 0:
            raise TemplateLimitError(f"it writes more than {MAX_CHARS:,} characters")

    def store(self, chars: int) -> None:
        self._stored_chars -= chars
        if self._stored_chars < 0:
            raise TemplateLimitError(f"it stores more than {_MAX_STORED_CHARS:,} characters")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


class _LimitedCode(CodeGenerator):
    """Passes values through methods of the environment."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = _through("timed", node.iter)
        super().visit_For(node, frame)

    def visit_Assign(self, node: nodes.Assign, frame: Frame) -> None:
        node.node = _through("stored", node.node)
        super().visit_Assign(node, frame)

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
            _budget.get().check_time()
            if check is not None:
                check(*args[jinja_object_first:], *named.values())
            return function(*args, **named)

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
        if isinstance(value, str):
            _budget.get().store(len(value))
        return value

    def concatenated(self, *values: Any) -> str:
        """What `~` makes of values."""
        texts = [str(value) for value in values]
        _check_chars(sum(map(len, texts)))
        return "".join(texts)

    def written(self, value: Any) -> str:
        """What is written to the prompt, or into a macro or block."""
        text = str(value)
        _budget.get().write(len(text))
        return text

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        if getattr(function, "__self__", None) is not self:
            _budget.get().check_time()
            for value in (*args, *named.values()):
                _check_length(value)
            _check_method(function, args)
        return super().call(context, function, *args, **named)

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _check_binop(operator: str, left: Any, right: Any) -> None:
    """Raises TemplateLimitError when `left operator right` would be too large."""
    if operator == "%" and isinstance(left, str):
        _check_width(left)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if bits > _MAX_INTEGER_BITS or right.bit_length() > _MAX_INTEGER_BITS:
            raise TemplateLimitError("it computes an integer of too many digits")
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and hasattr(value, "__len__"):
                _check_chars(len(value) * times)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_chars(len(left) + len(right))


def _check_method(function: Any, args: tuple[Any, ...]) -> None:
    """Methods of strings that make a long one."""
    function = getattr(function, "__wrapped__", function)  # Jinja wraps str.format.
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(owner, str):
        return
    if name in _PADDING_METHODS:
        _check_numbers(*args)
    elif name in ("format", "format_map"):
        _check_width(owner)
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


def _check_width(layout: Any, *_: Any) -> None:
    if len(str(layout)) > _MAX_LAYOUT_CHARS or _WIDTH.search(str(layout)):
        raise TemplateLimitError(f"it formats by {str(layout)[:80]!r}, with too large a width")


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
    "format": _check_width,
}
