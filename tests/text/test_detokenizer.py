from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text import Detokenizer, Tokenizer

PROSE = st.text(alphabet="ab stopSTOP\n.é你🙂🇺🇸", max_size=40)
STOPS = st.lists(st.text(alphabet="ab st🙂\n", min_size=1, max_size=5), max_size=3)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids: real text, broken characters, special tokens and ids outside the vocabulary."""
    anything = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=16)
    text = PROSE.map(lambda text: tokenizer.encode(text))
    return st.one_of(anything, text, st.tuples(text, anything).map(lambda pair: pair[0] + pair[1]))


def chunks_of(ids: list[int], data: st.DataObject) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)])]


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Reads the text a character at a time, and looks for the longest stop string there."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), end, stop
    return None


@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_join_to_the_decoded_text(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(ids_of(tokenizer))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    deltas = [detokenizer.push(chunk) for chunk in chunks_of(ids, data)]
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text == tokenizer.decode(ids, skip)
    assert detokenizer.tokens_consumed == len(ids)


@settings(deadline=None)
@given(data=st.data())
def test_a_prompt_is_continued(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """With the characters that straddle the two counted as output."""
    ids = data.draw(ids_of(tokenizer))
    cut = data.draw(st.integers(0, len(ids)))
    before = Detokenizer(tokenizer)
    prompt_text = before.push(ids[:cut])
    after = Detokenizer(tokenizer, prompt_token_ids=ids[:cut])
    text = after.push(ids[cut:]) + after.finish()
    assert prompt_text + text == tokenizer.decode(ids)


@settings(deadline=None)
@given(text=PROSE)
def test_no_half_character_is_ever_shown(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    for token_id in tokenizer.encode(text):
        assert "\ufffd" not in detokenizer.push([token_id])
        assert text.startswith(detokenizer.text)
    assert detokenizer.finish() == ""


def test_characters_are_shown_as_soon_as_they_are_complete(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("a")
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=prompt)
    *parts, last = tokenizer.encode("a🚀")[len(prompt) :]
    assert parts
    assert {detokenizer.push([part]) for part in parts} == {""}
    assert detokenizer.push([last]) == "🚀"


@settings(deadline=None)
@given(data=st.data(), stops=STOPS, include=st.booleans())
def test_stop_strings(
    tokenizer: Tokenizer, data: st.DataObject, stops: list[str], include: bool
) -> None:
    ids = data.draw(ids_of(tokenizer))
    whole = tokenizer.decode(ids)
    detokenizer = Detokenizer(tokenizer, stop=stops, include_stop_str_in_output=include)
    without = Detokenizer(tokenizer)
    beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
    emitted = ""
    for chunk in chunks_of(ids, data):
        emitted += detokenizer.push(chunk)
        without.push(chunk)
        if detokenizer.stop_reason is None:  # exactly what could become a stop string is held
            held = max((len(b) for b in beginnings if without.text.endswith(b)), default=0)
            assert emitted == without.text[: len(without.text) - held]
    emitted += detokenizer.finish()
    assert emitted == detokenizer.text

    match = first_stop(whole, stops)
    if match is None:
        assert (detokenizer.stop_reason, emitted) == (None, whole)
        assert detokenizer.tokens_consumed == len(ids)
        return
    start, end, stop = match
    assert detokenizer.stop_reason == stop
    assert emitted == whole[: end if include else start]
    consumed = detokenizer.tokens_consumed
    assert first_stop(tokenizer.decode(ids[:consumed]), stops) is not None
    assert first_stop(tokenizer.decode(ids[: consumed - 1]), stops) is None


def test_nothing_comes_after_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["stop"])
    ids = tokenizer.encode("go stop", add_special_tokens=False)
    assert detokenizer.push(ids + tokenizer.encode(" on")) == "go "
    assert detokenizer.tokens_consumed == len(ids)
    assert detokenizer.push(tokenizer.encode("more")) == ""
    assert (detokenizer.finish(), detokenizer.text) == ("", "go ")


def test_the_longest_of_stop_strings_that_end_together_counts(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["b", "ab"])
    detokenizer.push(tokenizer.encode("xxab"))
    assert (detokenizer.text, detokenizer.stop_reason) == ("xx", "ab")


def test_unfinished_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["stop now"])
    assert detokenizer.push(tokenizer.encode("please stop")) == "please "
    assert detokenizer.finish() == "stop"
    assert detokenizer.stop_reason is None


def test_stop_strings_do_not_count_in_the_first_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("zz zz")
    count = len(byte_level.encode("zz"))
    detokenizer = Detokenizer(byte_level, stop=["z"], min_tokens=count)
    detokenizer.push(ids)
    assert (detokenizer.text, detokenizer.stop_reason) == ("zz ", "z")


def test_leading_space_is_dropped_only_at_the_start_of_a_text(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the", add_special_tokens=False)
    alone = Detokenizer(sentencepiece, prompt_token_ids=[sentencepiece.bos_token_id])
    assert alone.push(ids) == "the"
    continued = Detokenizer(sentencepiece, prompt_token_ids=sentencepiece.encode("fox"))
    assert continued.push(ids) == " the"
