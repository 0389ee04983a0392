"""Calls of tools in what models write, however it is cut into pieces."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from jaxserve.protocol.errors import FieldError
from jaxserve.protocol.parsing.answer import Answer, AnswerReader
from jaxserve.protocol.parsing.channels import ChannelReader, before_answer
from jaxserve.protocol.parsing.reasoning import ReasoningReader, reasoning_marks
from jaxserve.protocol.parsing.tool_calls import Piece, ToolCall, ToolReader, format_of
from jaxserve.protocol.tools import ChosenTool, Tool, check_tools, forced_schema
from jaxserve.text.chat import knows_tools

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/Days"}},
    "required": ["city"],
    "$defs": {"Days": {"type": "integer", "minimum": 1}},
}


def tool(name: str, parameters=None) -> Tool:
    return Tool.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
    )


TOOLS = [tool("weather", WEATHER), tool("wait")]
GOOD = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
CHOSEN = ChosenTool.model_validate({"type": "function", "function": {"name": "weather"}})


class InPieces:
    """An AnswerReader that reads a text in pieces."""

    def __init__(self, reader: AnswerReader, cuts=()) -> None:
        self.cuts = cuts
        self.reader = reader
        self.finish = reader.finish

    def push(self, text: str):
        places = [0, *sorted(self.cuts), len(text)]
        return [piece for a, b in pairwise(places) for piece in self.reader.push(text[a:b])]


def read(how: str, text: str, cuts=(), parallel: bool = True, tools=TOOLS):
    """Content and calls (name, arguments) of a text that comes in pieces."""
    reader = AnswerReader(None, ToolReader(tools, how, parallel))
    answer = Answer.of(InPieces(reader, cuts), text)
    return answer.content, [(call.name, json.loads(call.arguments)) for call in answer.calls]


def hermes(*calls) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


FOUND = ("weather", GOOD["arguments"])
WAIT = {"name": "wait", "arguments": {}}


@given(st.data())
def test_hermes_calls_in_pieces(data):
    before = data.draw(st.text(max_size=12).filter(lambda text: "<" not in text))
    text = before + hermes(GOOD, WAIT)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read("hermes", text, cuts) == (before if before.strip() else "", [FOUND, ("wait", {})])


@given(st.data())
def test_tags_inside_arguments_are_text(data):
    city = "".join(data.draw(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "a", "{"]))))
    call = {"name": "weather", "arguments": {"city": city}}
    text = "so " + hermes(call, WAIT)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read("hermes", text, cuts) == ("so ", [("weather", {"city": city}), ("wait", {})])


def test_a_call_that_is_wrong_leaves_the_others():
    wrong = hermes({"name": "no_such_tool", "arguments": {}})
    assert read("hermes", wrong + hermes(WAIT)) == (wrong, [("wait", {})])
    assert read("hermes", "<tool_call>oh " + hermes(WAIT)) == ("<tool_call>oh ", [("wait", {})])


@given(st.text(alphabet="<tol_ca>{}x ", max_size=40), st.data())
def test_text_without_calls_is_never_lost(text, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    for how in ("hermes", "llama"):
        assert read(how, text, cuts) == (text, [])


def test_text_that_cannot_be_a_call_is_not_held_back():
    reader = ToolReader(TOOLS, "hermes", True)
    assert reader.push("a < b, and <tool") == [Piece("content", "a < b, and ")]
    assert reader.push("s> are") == [Piece("content", "<tools> are")]
    assert ToolReader(TOOLS, "llama", True).push("Hello") == [Piece("content", "Hello")]


@pytest.mark.parametrize("how", ["hermes", "llama", "required", "named"])
def test_arguments_are_passed_on_as_they_come(how):
    """Every character as soon as it is written, with the name before."""
    whole = {"hermes": hermes(GOOD), "llama": json.dumps(GOOD), "required": json.dumps([GOOD])}
    text = whole.get(how, json.dumps(GOOD["arguments"]))
    arguments = json.dumps(GOOD["arguments"])
    begin = text.index(arguments)
    reader = ToolReader(TOOLS[:1], how, True)
    assert not reader.push(text[:begin])
    first = reader.push(text[begin])
    assert first == [Piece("call", "weather"), Piece("arguments", "{")]
    place = begin + 1
    for place in range(begin + 1, begin + len(arguments)):
        first, *more = reader.push(text[place])
        assert first == Piece("arguments", text[place])
    more += reader.push(text[place + 1 :]) + reader.finish()
    assert more == [Piece("end")]


@pytest.mark.parametrize("how", ["hermes", "llama"])
def test_calls_written_in_another_order_are_found(how):
    call = {"id": 3, "arguments": GOOD["arguments"], "name": "weather", "x": ["}"]}
    text = hermes(call) if how == "hermes" else json.dumps(call)
    for cut in range(len(text)):
        assert read(how, text, [cut]) == ("", [FOUND])


def test_a_call_without_its_last_brace_ends_at_the_tag():
    text = hermes(GOOD).replace("}}\n", "}\n")
    assert read("hermes", text + " so " + hermes(WAIT)) == (" so ", [FOUND, ("wait", {})])


def test_a_long_answer_is_read_in_linear_time():
    begin = time.process_time()
    for how in ("hermes", "llama"):
        reader = ToolReader(TOOLS, how, True)
        for _ in range(50_000):
            reader.push('<tool_call>{"a": [{"b": "c' if how == "hermes" else '{"a": [')
        reader.finish()
    assert time.process_time() - begin < 60


@pytest.mark.parametrize(
    "call",
    [
        {"name": "no_such_tool", "arguments": {}},
        {"name": "weather", "arguments": ["a"]},
        {"name": "weather"},
        {"arguments": {}},
        "weather",
    ],
)
def test_calls_that_are_wrong_are_text(call):
    text = hermes(call)
    assert read("hermes", text) == (text, [])
    assert read("llama", json.dumps(call)) == (json.dumps(call), [])


def test_a_call_cut_off_is_text_unless_it_was_forced():
    text = hermes(GOOD)[:-25]
    assert read("hermes", text) == (text, [])
    assert read("named", '{"city": "Zü', tools=TOOLS[:1]) == ("", [])
    assert read("required", json.dumps([GOOD])[:-3]) == ("", [])


def test_llama_calls():
    parameters = {"name": "weather", "parameters": GOOD["arguments"]}
    two = f"{json.dumps(parameters)}; {json.dumps(WAIT)}"
    assert read("llama", "<|python_tag|>" + two) == ("", [FOUND, ("wait", {})])
    assert read("llama", two, parallel=False) == ("", [FOUND])


def test_forced_calls():
    assert read("required", json.dumps([GOOD, WAIT])) == ("", [FOUND, ("wait", {})])
    assert read("named", json.dumps(GOOD["arguments"]), tools=TOOLS[:1]) == ("", [FOUND])


def test_what_a_forced_call_is_written_by():
    import jsonschema

    assert forced_schema(TOOLS, CHOSEN, True) == WEATHER
    wait = ChosenTool.model_validate({"type": "function", "function": {"name": "wait"}})
    nothing = forced_schema(TOOLS, wait, True)
    assert nothing["x-guidance"]["whitespace_flexible"] is False
    assert nothing["properties"] == {} and nothing["type"] == "object"
    for parameters in (
        {"additionalProperties": True},
        {"additionalProperties": {}},
        {"anyOf": [{"properties": {"a": {}}}]},
    ):
        written = forced_schema([tool("weather", parameters)], CHOSEN, True)
        assert written == parameters | {"type": "object"}
    schema = forced_schema(TOOLS, "required", parallel=False)
    jsonschema.validate([GOOD], schema)
    for wrong in ([], [GOOD, GOOD], [{"name": "weather", "arguments": {"city": "a", "days": 0}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_definitions_that_clash_are_refused():
    other = {"type": "object", "$defs": {"Days": {"type": "string"}}}
    with pytest.raises(FieldError, match=r"tools\[1\]\.function\.parameters defines 'Days'"):
        forced_schema([TOOLS[0], tool("other", other)], "required", True)


def test_tools_are_checked():
    with pytest.raises(FieldError, match="at most 128"):
        check_tools([tool(f"f{i}") for i in range(129)], None)
    with pytest.raises(FieldError, match="names 'weather', which is not a tool"):
        check_tools(TOOLS[1:], CHOSEN)


def test_tools_too_large_are_refused_at_once():
    begin = time.process_time()
    for parameters in (
        {"properties": {f"p{i}": {"type": "string"} for i in range(500_000)}},
        {"anyOf": [{}] * 5000},
        {"description": "a" * 70_000},
        {"properties": {"a" * 70_000: {}}},
    ):
        with pytest.raises(FieldError, match=r"^tools are too large"):
            check_tools([tool("f", parameters)], None)
    with pytest.raises(FieldError, match=r"^tools are too large"):  # they count together
        check_tools([tool(f"f{i}", {"description": "a" * 2000}) for i in range(40)], None)
    assert time.process_time() - begin < 20


def test_a_schema_is_checked_once(monkeypatch):
    checked = []

    def check_schema(schema):
        checked.append(schema)
        return check(schema)

    check = Draft202012Validator.check_schema
    monkeypatch.setattr(Draft202012Validator, "check_schema", check_schema)
    schema = {"anyOf": [{"const": number} for number in range(1500)]}
    for name in ("first", "again"):
        check_tools([tool(name, schema)], None)
    assert len(checked) == 1


def test_formats_are_read_off_templates():
    assert not knows_tools(None) and not knows_tools("{{ messages }} toolset")
    assert knows_tools("{% if tools %}x{% endif %}")
    assert format_of("{{ tools }} <tool_call>") == "hermes"
    assert format_of('{{ tools }} {"name": f, "parameters": p}') == "llama"
    assert format_of("{{ tools }} [TOOL_CALLS]") is None
    assert format_of("{{ tools }} <|channel|> <tool_call>") == "harmony"


ANALYSIS = "<|channel|>analysis<|message|>a < b <|x|> or\n<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes. <|end"


@given(st.data())
def test_channels_in_pieces(data):
    """Reasoning, a call in either form of its header, and text that only begins like a mark."""
    header = data.draw(
        st.sampled_from(
            [
                "<|start|>assistant<|channel|>commentary to=functions.wait <|constrain|>json",
                "<|start|>assistant to=functions.wait<|channel|>commentary json",
            ]
        )
    )
    text = f"{ANALYSIS}{header}<|message|>{{}}<|call|>{FINAL}"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    reader = AnswerReader(ChannelReader({"wait"}), None)
    answer = Answer.of(InPieces(reader, cuts), text)
    assert answer.reasoning == "a < b <|x|> or\n" and answer.content == "Yes. <|end"
    assert answer.calls == (ToolCall("wait", "{}"),)
    assert before_answer(ANALYSIS + FINAL) == ANALYSIS + "<|start|>assistant"


@pytest.mark.parametrize(
    "text, answer",
    [
        ("plain < text", Answer("", "plain < text", ())),
        ("<|channel|>analysis<|message|>so", Answer("so", "", ())),
        ("<|channel|>analysis", Answer("", "", ())),
        (
            ' to=functions.wait<|channel|>commentary<|message|>{"a": 1',
            Answer("", '{"a": 1', ()),  # cut off
        ),
        (
            "<|channel|>commentary to=functions.other<|message|>{}",
            Answer("", "{}", ()),
        ),
        ("<|channel|>final<|message|>a<|return|>", Answer("", "a", ())),
    ],
)
def test_channels_that_end_early_or_are_none(text, answer):
    assert Answer.of(AnswerReader(ChannelReader({"wait"}), None), text) == answer


def test_marks_are_read_off_templates():
    assert reasoning_marks("auto", "<|channel|>analysis") == "channels"
    assert reasoning_marks("auto", "{{ x }}</think>") == "tags"
    assert reasoning_marks("auto", None) is None
    assert reasoning_marks("openai_gptoss", None) == "channels"
    assert reasoning_marks("qwen3", "<|channel|>") == "tags"
    assert reasoning_marks("none", "<|channel|>") is None


@given(st.data())
def test_reasoning_in_pieces(data):
    """With the opening tag in the output or in the prompt, before text and calls."""
    is_open = data.draw(st.booleans())
    text = (
        ("" if is_open else "\n<think>") + "\nSo <b> or\n\n</b>?\n</think>\n\nYes. " + hermes(WAIT)
    )
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    reader = AnswerReader(
        ReasoningReader("" if is_open else None), ToolReader(TOOLS, "hermes", True)
    )
    answer = Answer.of(InPieces(reader, cuts), text)
    assert answer.reasoning == "So <b> or\n\n</b>?" and answer.content == "Yes. "
    assert [call.name for call in answer.calls] == ["wait"]


@pytest.mark.parametrize("text", ["", " ", "<thin", "<", "a <think>b</think>", "</think>c"])
def test_text_without_reasoning_is_content(text):
    answer = Answer.of(AnswerReader(ReasoningReader(None), None), text)
    assert answer == Answer("", text, ())


def test_reasoning_that_was_cut_off():
    answer = Answer.of(AnswerReader(ReasoningReader(""), None), " because </thi")
    assert answer == Answer("because </thi", "", ())
