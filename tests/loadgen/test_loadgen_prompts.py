from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.loadgen.prompts import WORDS, TextLength, prompt_maker
from jaxserve.loadgen.trace import TraceRequest

IDS = range(1000, 2000)
BLOCK = 16


def common(first, second):
    """How many units two prompts begin alike with."""
    same = [a == b for a, b in zip(first, second)]
    return same.index(False) if False in same else len(same)


blocks = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(blocks, blocks, st.integers(1, 80), st.integers(1, 80))
def test_prompts_share_exactly_their_common_blocks(first_ids, second_ids, first_len, second_len):
    prompt = prompt_maker(0, IDS, TextLength())
    first = prompt(0, TraceRequest(0, first_len, 1, first_ids, BLOCK))
    second = prompt(1, TraceRequest(0, second_len, 1, second_ids, BLOCK))
    assert (len(first), len(second)) == (first_len, second_len)
    shared = BLOCK * common(first_ids, second_ids)
    length = min(first_len, second_len)
    # What follows is drawn again, of which a few ids may be equal by chance.
    assert min(shared, length) <= common(first, second) <= shared + 2


def test_prompts_are_those_of_their_seed_and_place():
    request = TraceRequest(0, 50, 1)
    prompt = prompt_maker(3, IDS, TextLength())
    assert prompt(0, request) == prompt_maker(3, IDS, TextLength())(0, request)
    assert prompt(0, request) != prompt(1, request)
    assert prompt(0, request) != prompt_maker(4, IDS, TextLength())(0, request)


def test_text_has_as_many_words_as_make_the_tokens():
    # Two tokens a word, and three for the text as such.
    length = TextLength.measured([(8, 19), (24, 51)])
    assert length == TextLength(3.0, 2.0)
    prompt = prompt_maker(0, None, length)
    text = prompt(0, TraceRequest(0, 103, 1, (7,), 20))
    assert text == text.strip()
    assert len(text.split()) == 50
    other = prompt(1, TraceRequest(0, 43, 1, (7,), 20))
    assert common(text.split(), other.split()) in (10, 11)
    assert {f" {word}" for word in text.split()} <= set(WORDS)


def test_counts_that_make_no_sense_make_a_word_a_token():
    assert TextLength.measured([(8, 30), (24, 30)]) == TextLength()
    assert TextLength().words(5) == 5
    assert TextLength(50.0, 1.0).words(5) == 1
