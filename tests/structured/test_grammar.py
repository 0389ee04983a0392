"""Grammars against lists of the texts they mean: masks, ends, and limits."""

from __future__ import annotations

import functools
import json

import pytest
from finite_language import FiniteLanguage, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.structured_outputs import StructuredOutputs
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.protocol.tools import ChosenTool, Tool, forced_schema
from jaxserve.structured.grammar import Grammar
from jaxserve.structured.grammars import Grammars
from jaxserve.structured.matcher import Matcher, advance
from jaxserve.structured.vocabulary import Vocabulary
from jaxserve.text import Tokenizer

EOS = (2, 0)
"""Of SmolLM2: the end of a message and that of a text."""


@pytest.fixture(scope="module")
def tokenizer(smollm2_path) -> Tokenizer:
    return open_checkpoint(smollm2_path).tokenizer()


@pytest.fixture(scope="module")
def tokens(tokenizer) -> list[bytes]:
    return [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]


@pytest.fixture(scope="module")
def vocabulary(tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, tokenizer.vocab_size, EOS)


@pytest.fixture
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, EOS)


def matcher_of(vocabulary: Vocabulary, ignore_eos: bool = False, **spec) -> Matcher:
    return Grammar(vocabulary, StructuredOutputs(**spec)).matcher(ignore_eos=ignore_eos)


# What comes next

LETTERS = "ab é"
texts = st.text(LETTERS + '\n"\\{', min_size=1, max_size=8)
languages = st.one_of(
    st.lists(texts, min_size=1, max_size=8, unique=True).map(
        lambda choices: ({"choice": choices}, FiniteLanguage.of(choices))
    ),
    st.tuples(st.integers(0, 2), st.integers(1, 3)).map(
        lambda lengths: (
            {"regex": f"[{LETTERS}]{{{lengths[0]},{sum(lengths)}}}"},
            FiniteLanguage.words(LETTERS, lengths[0], sum(lengths)),
        )
    ),
    # Of letters that JSON spells in one way only.
    st.lists(st.text(LETTERS, max_size=8), min_size=1, max_size=6, unique=True).map(
        lambda values: (
            {"json": {"enum": values}},
            FiniteLanguage.of(json.dumps(value, ensure_ascii=False) for value in values),
        )
    ),
)


@settings(max_examples=60, deadline=None)
@given(language=languages, ignore_eos=st.booleans(), data=st.data())
def test_masks_are_what_a_list_of_the_texts_says(vocabulary, tokens, language, ignore_eos, data):
    spec, listed = language
    matcher, said, taken = matcher_of(vocabulary, ignore_eos, **spec), b"", []
    while True:
        allowed = listed.allowed(said, tokens, EOS, ignore_eos=ignore_eos)
        goes_on = listed.goes_on(said)
        if goes_on:
            found = ids_of(matcher.mask)
            # Where there is but one way on, it is spelled by the model's own tokens.
            forced = listed.forced(said) and len(found) == 1
            assert found == allowed or (forced and found < allowed)
        assert matcher.complete(len(taken)) is not goes_on
        assert matcher.error(len(taken)) is None
        if not goes_on:
            break
        token = data.draw(st.sampled_from(sorted(ids_of(matcher.mask))))
        advance([(matcher, len(taken), token)])
        if token in EOS:  # The text is whole, and nothing of it is taken in.
            assert said in listed.texts
            assert matcher.num_tokens == len(taken)
            break
        taken.append(token)
        said += tokens[token]


@settings(max_examples=15, deadline=None)
@given(
    crowd=st.lists(languages, min_size=2, max_size=6),
    seed=st.randoms(use_true_random=False),
)
def test_matchers_that_advance_together_are_where_they_would_be_alone(
    vocabulary, tokens, crowd, seed
):
    """At different paces, with tokens told twice, and others of the same grammar beside."""
    grammars = [Grammar(vocabulary, StructuredOutputs(**spec)) for spec, _ in crowd]
    make = [functools.partial(g.matcher, ignore_eos=True) for g in grammars for _ in range(2)]
    together, alone = [new() for new in make], [new() for new in make]
    told = [[] for _ in make]
    for _ in range(6):
        news = []
        for index, matcher in enumerate(together):
            place = len(told[index])
            if not matcher.complete(place) and seed.random() < 0.7:
                token = seed.choice(sorted(ids_of(matcher.mask)))
                told[index].append(token)
                news.append((matcher, place, token))
        advance(news)
        advance(news)
        for index, place, token in (
            (together.index(matcher), place, token) for matcher, place, token in news
        ):
            advance([(alone[index], place, token)])
    for one, other, tokens_ in zip(together, alone, told):
        assert one.num_tokens == other.num_tokens == len(tokens_)
        assert ids_of(one.mask) == ids_of(other.mask)
        assert one.complete(len(tokens_)) == other.complete(len(tokens_))


def spell(tokenizer: Tokenizer, matcher: Matcher, text: str) -> bool:
    """Whether a matcher takes a text, token by token, and may end then."""
    for place, token in enumerate(tokenizer.encode(text, add_special_tokens=False)):
        if token not in ids_of(matcher.mask):
            return False
        advance([(matcher, place, token)])
    return matcher.complete(matcher.num_tokens) or bool(ids_of(matcher.mask) & set(EOS))


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize(
    "spec, taken, refused",
    [
        ({"json": PERSON}, ['{"name":"Ä","age":3}', '{ "name" : "",\n\t"age": 3}'], ["{}"]),
        ({"json": PERSON}, [json.dumps({"name": "a", "age": 1}, indent=8)], ['{"age":3}', "3"]),
        ({"json": PERSON}, [], ['{"name":' + " " * 41 + '"a","age":3}']),
        ({"json": PERSON}, [], ['{"name":"a","age":3,"more":1}']),
        (
            {"json": PERSON, "disable_additional_properties": False},
            ['{"name":"a","age":3}', '{"name":"a","age":3,"more":1}'],
            ['{"more":1}'],
        ),
        (
            {"json": PERSON | {"x-guidance": {"whitespace_flexible": False}}},
            ['{"name":"a","age":3}'],
            ['{"name": "a","age":3}'],
        ),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", '"a"', '{"a"}']),
        ({"regex": r"\d+-x?"}, ["1-", "123-x"], ["-", "1", "a1-"]),
        ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["((x)", "()"]),
        ({"grammar": 'root ::= "a" [0-9]+'}, ["a1", "a123"], ["a", "1"]),
        ({"grammar": 'start: "say " %json {"type":"boolean"}'}, ["say true"], ["say", "true"]),
    ],
)
def test_texts_that_a_grammar_takes_and_refuses(vocabulary, tokenizer, spec, taken, refused):
    for text in taken:
        assert spell(tokenizer, matcher_of(vocabulary, **spec), text), text
    for text in refused:
        assert not spell(tokenizer, matcher_of(vocabulary, **spec), text), text


@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object", "properties": {}, "additionalProperties": False}]
)
def test_a_forced_call_of_a_function_without_parameters_spends_nothing(
    vocabulary, tokenizer, parameters
):
    """Its arguments are `{}`, and no whitespace around or within it."""
    function = {"name": "wait", "parameters": parameters}
    tool = Tool.model_validate({"type": "function", "function": function})
    chosen = ChosenTool.model_validate({"type": "function", "function": {"name": "wait"}})
    named = forced_schema([tool], chosen, parallel=True)
    anyone = forced_schema([tool], "required", parallel=True)
    call = '{"name": "wait", "arguments": {}}'
    for schema, taken in ((named, ["{}"]), (anyone, [f"[{call}]", f"[{call}, {call}]"])):
        for text in taken:
            assert spell(tokenizer, matcher_of(vocabulary, json=schema), text)
            for other in (text.replace("{}", "{ }"), text.replace("{}", "{\n}"), f" {text}"):
                assert not spell(tokenizer, matcher_of(vocabulary, json=schema), other), other
    matcher = matcher_of(vocabulary, json=named)
    assert spell(tokenizer, matcher, "{}") and matcher.complete(matcher.num_tokens)


def test_tokens_that_end_a_text_are_no_part_of_it(vocabulary, tokenizer):
    """Though they may be spelled in it, character by character."""
    spelled, said = tokenizer.token_text(EOS[0]), b""
    matcher = matcher_of(vocabulary, choice=[spelled])
    while not matcher.complete(matcher.num_tokens):
        allowed = ids_of(matcher.mask)
        assert not allowed & tokenizer.special_token_ids
        said += tokenizer.token_bytes(min(allowed))
        advance([(matcher, matcher.num_tokens, min(allowed))])
    assert said == spelled.encode()


def test_a_vocabulary_larger_or_smaller_than_its_tokenizer(tokenizer):
    for size in (tokenizer.vocab_size + 100, 1000):
        vocabulary = Vocabulary(tokenizer, size, [*EOS, size + 5])
        mask = matcher_of(vocabulary, regex="(?s:.)+").mask
        assert mask.shape == (-(-size // 32),)
        assert max(ids_of(mask)) < min(size, tokenizer.vocab_size)


def test_a_model_without_an_end_is_refused(tokenizer):
    with pytest.raises(RequestError, match="no end-of-text token"):
        Grammars(tokenizer, 100, []).get(StructuredOutputs(json_object=True))


# What is refused


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"regex": "a("}, "structured_outputs.regex: .*unclosed group"),
        ({"regex": "(?=a)b"}, "structured_outputs.regex: .*look-around"),
        ({"json": {"type": "objekt"}}, "structured_outputs.json: .*objekt"),
        ({"json": {"$ref": "#/nowhere"}}, "structured_outputs.json: .*nowhere"),
        ({"json": {"$ref": "http://example.com/s"}}, "structured_outputs.json: .*example.com"),
        ({"json": {"type": "array", "uniqueItems": True}}, "structured_outputs.json: .*unique"),
        ({"grammar": "start: X\nX: /a+/ & /b+/"}, "structured_outputs.grammar: no text fits"),
        ({"json": {"x-guidance": {"whitespace": 1}}}, "structured_outputs.json: .*whitespace"),
        ({"json": {"minLength": 3, "maxLength": 2, "type": "string"}}, "json: .*minLength"),
        ({"grammar": "start: nowhere"}, "structured_outputs.grammar: .*nowhere"),
        ({"grammar": 'other: "a"'}, "structured_outputs.grammar: .*start"),
        ({"grammar": 'root ::= ("a"'}, "structured_outputs.grammar: "),
        ({"grammar": 'start: ""'}, "structured_outputs.grammar allows no text"),
        (
            {"json": {"allOf": [{"properties": {f"a{i}": {}}} for i in range(2000)]}},
            "structured_outputs.json: .*too large",
        ),
        ({"grammar": "start: " + '"a"? ' * 5000}, "structured_outputs.grammar: .*[Tt]oo many"),
    ],
)
def test_bad_and_large_grammars_are_refused_by_name(grammars, spec, message):
    with pytest.raises(RequestError, match=message):
        grammars.get(StructuredOutputs(**spec))
    # And so they are again, and nothing else is.
    with pytest.raises(RequestError, match=message):
        grammars.get(StructuredOutputs(**spec))
    assert grammars.get(StructuredOutputs(regex="a"))


def chain(name):
    """As many rules as fit, each the next."""
    return "".join(f"{name}{i}:{name}{i + 1}\n" for i in range(4_500))


@pytest.mark.parametrize(
    "spec",
    [
        {"regex": "(" * 30_000 + "a" + ")" * 30_000},
        {"regex": "[" * 60_000},
        {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {
            "grammar": "start: r0\n"
            + "".join(f"r{i}:r{i + 1}\n" for i in range(4_500))
            + 'r4500:"y"'
        },
        {
            "grammar": "start: T0\n"
            + "".join(f"T{i}:T{i + 1}\n" for i in range(4_500))
            + 'T4500:"y"'
        },
        {"json": {"$ref": "#/a0"} | {f"a{i}": {"$ref": f"#/a{i + 1}"} for i in range(1_900)}},
        {"json": '{"anyOf":[' * 5_000 + '{"type":"null"}' + "]}" * 5_000},
    ],
    ids=["regex", "class", "gbnf", "rules", "terminals", "refs", "schema"],
)
def test_no_depth_ends_the_process(grammars, spec):
    """Rules that refer to each other in a chain overflowed an ordinary stack."""
    try:
        matcher = grammars.get(StructuredOutputs(**spec)).matcher(ignore_eos=False)
        advance([(matcher, 0, min(ids_of(matcher.mask)))])
    except RequestError as refusal:
        assert "structured_outputs" in str(refusal)


def test_a_grammar_that_outgrows_its_limits_says_so(vocabulary):
    """Each token doubles what this one may be in the middle of."""
    matcher = matcher_of(vocabulary, regex="((a{1,100}){1,100}){1,100}", ignore_eos=True)
    for place in range(100):
        if matcher.error(place):
            break
        advance([(matcher, place, max(ids_of(matcher.mask)))])
    assert "too many" in matcher.error(place)
    assert not matcher.complete(place)
    assert matcher.error(place - 1) is None
    before = matcher.num_tokens
    advance([(matcher, before, 81)])
    assert matcher.num_tokens == before, "it takes nothing in any more"
