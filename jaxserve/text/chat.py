"""Chat templates: messages to the prompt format that a model was trained on.

Templates are Jinja programs from the model's files, so they run in a sandbox, within limits of time
and size (`template_limits.py`). The environment is that of Hugging Face's `apply_chat_template`,
since templates depend on its details.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from jaxserve.core.errors import ChatTemplateError, RequestError
from jaxserve.text.template_budget import TemplateLimitError
from jaxserve.text.template_limits import LimitedEnvironment

_SHOWN_CHARS = 2000
_READS_TOOLS = re.compile(r"\btools\b")

_END_OF_CONTENT = "END-OF-THE-FINAL-MESSAGE"
"""Marks in a rendered conversation where the content of the last message ends."""


RESERVED_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents"),
        *("add_generation_prompt", "continue_final_message", "chat_template"),
    }
)
"""Variables that chat_template_kwargs must not set: they are parameters of their own."""


def knows_tools(template: str | None) -> bool:
    """Whether a chat template supports tools."""
    return template is not None and bool(_READS_TOOLS.search(template))


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any],
) -> str:
    """The prompt text of a conversation.

    Args:
        template: Jinja source, or None for a model that has none.
        messages: dicts with `role` and `content`; content is a string or a list of
            `{"type": "text", "text": ...}` parts, joined by newlines. An assistant message with
            `tool_calls` needs no content.
        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: end with the content of the last message, without what the template
            writes after it.
        tools: JSON schemas of the functions the model may call.
        variables: further variables of the template, such as `bos_token`.

    Raises:
        ChatTemplateError: the template is invalid, rejects the conversation, or exceeds a limit.
        RequestError: a message is malformed, or the template is missing, or has no tools where some
            are given.
    """
    if template is None:
        raise RequestError(
            "this model has no chat template; send a plain prompt, or use an instruct model"
        )
    if tools and not knows_tools(template):
        raise RequestError(
            "tools are given, but this model's chat template has none; leave them out, or describe "
            "them in a message"
        )
    messages = normalize_messages(messages)
    if continue_final_message:
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt conflict; set one of them."
            )
        messages[-1]["content"] += _END_OF_CONTENT
    context = {"documents": None, **variables, "messages": messages, "tools": tools}
    context["add_generation_prompt"] = add_generation_prompt
    try:
        text = LimitedEnvironment.render(_compile(template), context)
    except TemplateLimitError as error:
        raise ChatTemplateError(f"the chat template was stopped: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template is not valid Jinja, line {error.lineno}: {error.message}"
        ) from error
    except Exception as error:  # a template is a program: it may raise anything
        raise ChatTemplateError(
            f"the chat template cannot render these messages: {str(error)[:_SHOWN_CHARS]}"
        ) from error
    if not continue_final_message:
        return text
    begin, found, _ = text.rpartition(_END_OF_CONTENT)
    if not found:
        raise RequestError(
            "continue_final_message is set, but the chat template leaves the last message out."
        )
    return begin


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with plain string contents; raises `RequestError` naming the malformed one."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            f"messages must be a non-empty list of {{'role', 'content'}} dicts, got {messages!r}."
        )
    return [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be a dict with role and content, got {message!r}.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role must be a string such as 'user', got {role!r}.")
    if isinstance(content, list | tuple):
        content = "\n".join(_part_text(p, f"{where}.content[{i}]") for i, p in enumerate(content))
    elif content is None and message.get("tool_calls"):
        content = ""
    elif content is None:
        raise RequestError(
            f"{where}.content is missing; it must be a string or a list of text parts."
        )
    elif not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be a string or a list of text parts, got {content!r}."
        )
    return {**message, "content": content}


def _part_text(part: Any, where: str) -> str:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    if not is_text or not isinstance(part.get("text"), str):
        raise RequestError(
            f"{where} must be {{'type': 'text', 'text': <string>}}, the only kind of content "
            f"supported, got {part!r}."
        )
    return part["text"]


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here only its body is used."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
