"""A Jinja sandbox that also bounds what a template takes: time, output and memory.

Jinja's own sandbox keeps a template from the interpreter, but does not bound loops, and lets it
double a string until memory is full. Here the code generator passes through `LimitedEnvironment`
whatever a loop iterates over, an assignment stores, `~` joins and the template writes, and every
list, tuple and dict. Calls, which Jinja's sandbox passes there already, filters and operators are
checked too, where they could make a large value of small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace

from jaxserve.text.template_budget import Budget, TemplateLimitError, check_chars, current
from jaxserve.text.template_checks import (
    DROPPED_FILTERS,
    check_binop,
    check_filter,
    check_length,
    check_method,
)

MAX_SOURCE_CHARS = 1 << 18
_KEEPERS = (Namespace, Cycler, dict)


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
        for name in DROPPED_FILTERS:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Make `function` the filter `name`, within the limits."""
        jinja_object_first = hasattr(function, "jinja_pass_arg")

        def limited(*args: Any, **named: Any) -> Any:
            budget = current.get()
            budget.check_time()
            check_filter(name, (*args[jinja_object_first:], *named.values()))
            return budget.made(function(*args, **named))

        if jinja_object_first:
            limited.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        self.filters[name] = limited

    @staticmethod
    def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """The text of `template`, which must be of a LimitedEnvironment."""
        token = current.set(Budget())
        try:
            return template.render(variables)
        finally:
            current.reset(token)

    def from_string(self, source: str, *args: Any, **settings: Any) -> jinja2.Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateLimitError(
                f"it has {len(source):,} characters; at most {MAX_SOURCE_CHARS:,} are read"
            )
        return super().from_string(source, *args, **settings)

    def timed(self, values: Iterable[Any]) -> Iterator[Any]:
        """What a loop iterates over."""
        budget = current.get()
        for value in values:
            budget.check_time()
            yield value

    def stored(self, value: Any) -> Any:
        """The value of an assignment."""
        check_length(value)
        return value

    def kept(self, value: Any) -> Any:
        """The value of an assignment to an attribute of a namespace."""
        if isinstance(value, Namespace):
            raise TemplateLimitError("it makes a namespace a part of another value, or text")
        return self.stored(value)

    def made(self, value: Any) -> Any:
        """A list, a tuple or a dict of the template."""
        return current.get().made(value)

    def concatenated(self, *values: Any) -> str:
        """What `~` makes of values."""
        budget = current.get()
        check_chars(budget.size(*values))
        return budget.made("".join(map(str, values)))

    def written(self, value: Any) -> str:
        """What is written to the prompt, or into a macro or block."""
        if not isinstance(value, str):
            current.get().size(value)
        text = str(value)
        current.get().write(len(text))
        return text

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        if getattr(function, "__self__", None) is self:
            return super().call(context, function, *args, **named)
        budget = current.get()
        budget.check_time()
        for value in (*args, *named.values()):
            check_length(value)
        if function in _KEEPERS:
            budget.size(*args, *named.values())
        check_method(function, args, named)
        return budget.made(super().call(context, function, *args, **named))

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        size = check_binop(operator, left, right)
        return current.get().made(super().call_binop(context, operator, left, right), size)
