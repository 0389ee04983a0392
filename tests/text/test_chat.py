from __future__ import annotations

from typing import Any

import pytest

from jaxserve.core.errors import RequestError
from jaxserve.text.chat import render_chat

HELLO = [{"role": "user", "content": "Hello"}]


def render(template: str | None, messages: Any = HELLO, **variables: Any) -> str:
    return render_chat(template, messages, add_generation_prompt=True, variables=variables)


def test_blocks_take_their_line_with_them() -> None:
    template = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    )
    assert render(template) == "Hello\n"


def test_loop_controls() -> None:
    template = "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(template) == "012"


def test_generation_block_is_its_body() -> None:
    template = "{% generation %}\n{{ messages[0].content }}{% endgeneration %}!"
    assert render(template) == "Hello!"


def test_json_is_plain() -> None:
    value = {"b": "<é & 'x'>", "a": [1, None]}
    assert render("{{ value | tojson }}", value=value) == '{"b": "<é & \'x\'>", "a": [1, null]}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_current_date() -> None:
    assert len(render("{{ strftime_now('%Y') }}")) == 4


def test_tools_that_the_template_has_not_are_refused() -> None:
    with pytest.raises(RequestError, match="tools are given, but this model's chat template"):
        render_chat(
            "{{ messages[0].content }}",
            [{"role": "user", "content": "hi"}],
            add_generation_prompt=True,
            tools=[{"name": "f"}],
            variables={},
        )


def test_variables_and_tools_reach_the_template() -> None:
    template = "{{ bos_token }}{{ tools[0].name }}{{ add_generation_prompt }}{{ documents }}"
    text = render_chat(
        template,
        HELLO,
        add_generation_prompt=False,
        tools=[{"name": "f"}],
        variables={"bos_token": "<s>"},
    )
    assert text == "<s>fFalseNone"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_tool_calls_need_no_content_and_keep_their_fields() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    template = "{{ messages[0].content }}|{{ messages[0].tool_calls[0].function.name }}"
    assert render(template, messages) == "|f"


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    render("{{ messages }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "one"}]}]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], r"messages must"),
        ("Hello", r"messages must"),
        ({"role": "user", "content": "Hello"}, r"messages must"),
        (["Hello"], r"messages\[0\]"),
        ([*HELLO, {"content": "x"}], r"messages\[1\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[0\].*image_url",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]"),
    ],
)
def test_malformed_messages_are_named(messages: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        render("x", messages)


def test_a_template_that_has_no_system_role_says_so() -> None:
    """As Gemma 2's: the template's own words reach the user."""
    template = (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
    )
    assert render(template, bos_token="<bos>") == "<bos>"
    system = [{"role": "system", "content": "Be brief."}, *HELLO]
    with pytest.raises(RequestError, match="cannot render these messages: System role not supp"):
        render(template, system)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("\n{% if %}", "line 2"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange too big"),
    ],
)
def test_failing_templates_are_request_errors(template: str | None, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        render(template)
