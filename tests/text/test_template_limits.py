"""Untrusted chat templates: limited in time, output and memory, and otherwise as in Jinja."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import RequestError
from jaxserve.text import template_budget
from jaxserve.text.chat import render_chat
from jaxserve.text.template_limits import MAX_SOURCE_CHARS

MESSAGES = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "Hi, {name}: 100%"},
]
BILLION = 10**9


def render(template: str, **variables: Any) -> str:
    return render_chat(template, MESSAGES, add_generation_prompt=True, variables=variables)


def grows(step: str) -> str:
    """A template whose value grows by `step` sixty times."""
    return (
        "{% set ns = namespace(x='aa', y=['a']) %}"
        "{% for i in range(60) %}" + step + "{% endfor %}{{ ns.x }}{{ ns.y }}"
    )


def doubles(step: str, end: str, first: str = "[1]") -> str:
    """A template with a value that holds the one before it twice, and so on sixty times."""
    return "{% set x = " + first + " %}" + ("{% set x = " + step + " %}") * 60 + end


LONG = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = [
    LONG,
    LONG.replace("{% endfor %}{% endfor %}", "text{% endfor %}{% endfor %}"),
    "{% set x %}" + LONG + "{% endset %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% endif %}{% endmacro %}{{ f('aa', 90) }}",
    grows("{% set ns.x = ns.x ~ ns.x %}"),
    grows("{% set ns.x = ns.x + ns.x %}"),
    grows("{% set ns.x = ns.x * 3 %}"),
    grows("{% set ns.x = [ns.x, ns.x]|join %}"),
    grows("{% set ns.x = ns.x|replace('a', 'aaaaaaaa') %}"),
    grows("{% set ns.x = ns.x.replace('a', 'aaaaaaaa') %}"),
    grows("{% set ns.x = ns.x.join(ns.x) %}"),
    grows("{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    grows("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    grows("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    grows("{% set ns.y = ns.y + ns.y %}"),
    f"{{{{ 'a' * {BILLION} }}}}",
    f"{{{{ [1] * {BILLION} }}}}",
    "{{ 99 ** 99999999 }}",
    f"{{{{ 'a'.ljust({BILLION}) }}}}",
    f"{{{{ 'a'|center({BILLION}) }}}}",
    f"{{{{ 'a\na'|indent({BILLION}) }}}}",
    f"{{{{ messages|tojson(indent={BILLION}) }}}}",
    f"{{{{ '%{BILLION}d' % 1 }}}}",
    f"{{{{ '%(a){BILLION}d' % {{'a': 1}} }}}}",
    f"{{{{ '%*d' % ({BILLION}, 1) }}}}",
    f"{{{{ '%{BILLION}d'|format(1) }}}}",
    f"{{{{ '{{:{BILLION}}}'.format(1) }}}}",
    f"{{{{ '{{:{{}}}}'.format(1, {BILLION}) }}}}",
    f"{{{{ range({BILLION})|list }}}}",
    doubles("[x, x]", "{{ x }}"),
    doubles("[x, x]", "{% set y = x ~ 'a' %}"),
    doubles("[x, x]", "{{ x|tojson }}"),
    doubles("[x, x]", "{{ '%s' % x }}"),
    doubles("[x] * 2", "{{ x }}"),
    doubles("[x] + [x]", "{{ x }}"),
    doubles("[x, x]|map('list')|list", "{{ x }}"),
    doubles("(x, x)", "{{ {x: 1}[x] }}", "(1,)"),
    doubles("{'a': x, 'b': x}", "{{ x }}"),
    doubles("dict(a=x, b=x)", "{{ x }}", "{}"),
    doubles("namespace(a=x, b=x)", "{{ x }}"),
    doubles("[x, x]", "{{ x == y }}").replace("set x = [x, x]", "set x, y = [x, x], [y, y]"),
    "{% set ns = namespace() %}{% set ns.x = [ns, ns] %}",
    "{% set ns = namespace() %}{% set ns.x = ns %}",
    "{{ namespace(a=1) }}",
    "{{ ('a' * 9999999)|title }}",
    "{{ ([[1]] * 500000)|sum(start=[]) }}",
    "{{ ('a' * 9999999)|trim('b' * 9999999) }}",
    "{{ ('a' * 9999999).strip('b' * 9999999) }}",
    "{{ ('a' * 9999999)|replace(new='a' * 9999999, old='a') }}",
    "{{ ('a\n' * 999999)|indent(first=true, width=4096) }}",
    "{{ ('a\n' * 999999)|indent('b' * 4096) }}",
    "{{ ('\t' * 9999999).expandtabs(4096) }}",
    "{{ ([1] * 99999)|tojson(indent=4096) }}",
    "{{ ('a' * 9999999).encode() * 9999 }}",
    "{{ ('a' * 9999999).translate({97: 'b' * 9999999}) }}",
    f"{{{{ (1).to_bytes({BILLION}, 'big') }}}}",
    f"{{{{ 5|round(-{BILLION}) }}}}",
    f"{{{{ 5|round({BILLION}, 'ceil') }}}}",
    "{{ ('f' * 9999999)|int(base=16) // 3 }}",
    "{{ ['a' * 9999999, 'b' * 9999999]|tojson }}",
    "{{ '{0}{0}'.format('a' * 9999999) }}",
    "{{ '%(a)s%(a)s' % {'a': 'a' * 9999999} }}",
    "{% set s = 'a' * 9999999 %}"
    "{{ range(99999)|map('string')|map('replace', '1', s)|join|length }}",
    f"{{{{ lipsum({BILLION}) }}}}",
    "{{" + "(" * 100_000 + "1",
    "{% if 1 %}" * 5000,
    "a" * (MAX_SOURCE_CHARS + 1),
]


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_template_is_stopped(monkeypatch, template):
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.3)
    with pytest.raises(RequestError, match="the chat template") as caught:
        render(template)
    assert len(str(caught.value)) < 3000


ORDINARY = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role ~ ': ' ~ m['content'] }}"
    "{% if not loop.last %}, {{ loop.nextitem.role }}{% endif %}{% else %}none{% endfor %}",
    "{% for k, v in messages[0].items() if v %}{{ k }}={{ v|upper }}{% endfor %}"
    "{{ missing }}{{ none }}",
    "{% for x in [[1, [2]], 3] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}"
    "{% endif %}{% endfor %}{% for x in missing %}{% else %}empty{% endfor %}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}"
    "{{ m(1) }}{% call m(3, b=4) %}in{% endcall %}",
    "{% set ns = namespace(seen=false, n=1) %}{% for m in messages %}{% set ns.n = ns.n + 2 ** 3 %}"
    "{% endfor %}{{ ns.n }}{% set a, b = 1, 'x' %}{{ a }}{{ b * 3 }}{{ [1] + [2] }}{{ 7 % 4 }}",
    "{% set text %}{{ messages[1].content }}{% endset %}{{ text|trim|length }}{{ text|indent(2) }}",
    "{{ messages|map(attribute='role')|join(', ') }}{{ 'a-b'.split('-')|join('+') }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ 1.5|round }}{{ '5'|int }}",
    "{{ '%s is %5.2f' % ('a', 1) }}{{ 'a%s'|format('b') }}{{ 'In 2024: {} {}'.format(1, 'x') }}",
    "{% filter upper %}abc{% endfilter %}{{ 'aXbX'|replace('X', '--') }}{{ messages|last|length }}",
    "{% set x, y = [1, (2, 'a')], {'a': [3], 'b': {}} %}{{ x }}{{ y }}{{ x + [y] }}{{ (1,) * 2 }}"
    "{{ x ~ y }}{{ [x, x] == [x, x] }}{{ y|tojson }}{{ dict(y, c=x) }}{% for a, b in [(1, 2)] %}"
    "{{ a }}{{ b }}{% endfor %}{{ x|map('string')|list }}{{ messages|groupby('role')|length }}",
    "{% macro m(ns, x=[1]) %}{{ ns.n }}{{ x }}{% endmacro %}{{ m(namespace(n=[2])) }}",
    "{{ 1 ~ 2.5 ~ none ~ true ~ missing ~ ['a'] }}{{ 'abc'[::-1] }}{{ 'a' if 1 else 'b' }}",
]


@pytest.mark.parametrize("template", ORDINARY, ids=range(len(ORDINARY)))
def test_other_templates_are_rendered_as_by_jinja(template):
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    assert render(template) == plain.from_string(template).render(messages=MESSAGES)


PIECES = st.sampled_from(
    re.findall(
        r"\S+",
        "{{ }} {% %} for in endfor if endif set = x messages range( ) * ** % ~ 9 99999 'a' | join "
        "list [ ] . ,",
    )
)


@settings(max_examples=300, deadline=None)
@given(source=st.lists(PIECES, max_size=14).map(" ".join))
def test_any_template(source):
    with contextlib.suppress(RequestError):
        render(source)


def test_a_long_conversation_is_within_the_limits():
    template = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}"
        "{% if loop.index <= 500 %}{% set ns.seen = ns.seen + [m] %}{% endif %}"
        "<{{ m.role }}>{{ m.content|trim }}</{{ m.role }}>"
        "{% if loop.index == messages|length %}{{ ns.seen|length }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 4000
    text = render_chat(template, messages, add_generation_prompt=True, variables={})
    assert len(text) == 4000 * (999 + len("<user></user>")) + len("500")
