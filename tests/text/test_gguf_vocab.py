from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import ModelError
from jaxserve.text import Tokenizer
from jaxserve.text.token_bytes import BYTE_ALPHABET

WORDS = ["HelloWorld", "Ġ12345", "World", "12345", "45"]
"""Tokens that exist as a whole, so that only the pre-tokenizer keeps them apart."""


def _word_metadata(pre: str) -> dict[str, Any]:
    """Byte-level metadata whose merges build every word left to right, and `xyz` from nothing."""
    merges = [(word[:i], word[i]) for word in WORDS for i in range(1, len(word))]
    tokens = dict.fromkeys([*sorted(BYTE_ALPHABET), *(a + b for a, b in merges), "xyz", "<|b|>"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.merges": list(dict.fromkeys(" ".join(merge) for merge in merges)),
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
    }


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("default", ["HelloWorld", " 12345"]),
        ("gpt-2", ["HelloWorld", " 12345"]),
        ("smollm", ["HelloWorld", " ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", ["HelloWorld", " ", "123", "45"]),
        ("dbrx", ["HelloWorld", " ", "123", "45"]),
        ("qwen2", ["HelloWorld", " ", "1", "2", "3", "4", "5"]),
        ("tekken", ["Hello", "World", " ", "1", "2", "3", "4", "5"]),
        ("gpt-4o", ["Hello", "World", " ", "123", "45"]),
        ("deepseek-v3", ["HelloWorld", " ", "123", "45"]),
        ("deepseek-llm", ["HelloWorld", " ", "1", "2", "3", "4", "5"]),
    ],
)
def test_pre_tokenizers_split_words_as_their_models_do(pre: str, expected: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(_word_metadata(pre))
    ids = tokenizer.encode("HelloWorld 12345", add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == expected


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "we'll WE'LL\n\n x", ["we", "'ll", " WE", "'", "LL", "\n\n", " x"]),
        ("llama-bpe", "we'll WE'LL\n\n x", ["we", "'ll", " WE", "'LL", "\n\n", " x"]),
        ("dbrx", "we'll WE'LL\n\n x", ["we", "'ll", " WE", "'LL", "\n\n", " x"]),
        ("qwen2", "(a) //\n", ["(a", ")", " //\n"]),
        ("tekken", "a//\n/b", ["a", "//\n/", "b"]),
        ("llama-bpe", "a//\n/b", ["a", "//\n", "/b"]),
        ("gpt-4o", "We'll WE'LL//\n/b", ["We'll", " WE'LL", "//\n/", "b"]),
        (
            "deepseek-v3",
            "we'll (a) //\n1234x",
            ["we", "'ll", " (", "a", ")", " //\n", "123", "4", "x"],
        ),
        (
            "deepseek-llm",
            "we'll (a)\n\nx一丁y  ",
            ["we", "'", "ll", " (", "a", ")", "\n", "\n", "x", "一丁", "y", "  "],
        ),
        ("deepseek-llm", "Žlutý ა1", ["Ž", "lut", "ý", " ", "ა", "1"]),
        ("deepseek-v3", "ab一丁cd ά\u0301!", ["ab", "一丁", "cd", " ά\u0301", "!"]),
    ],
)
def test_word_boundaries(pre: str, text: str, pieces: list[str]) -> None:
    backend = Tokenizer.from_gguf(_word_metadata(pre))._backend
    split = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces


def test_whole_words_skip_merging_where_the_model_says_so() -> None:
    merged = {"dbrx": 3, "qwen2": 3, "smollm": 3}
    for pre, count in {"llama-bpe": 1, "tekken": 1, "gpt-4o": 1, **merged}.items():
        assert len(Tokenizer.from_gguf(_word_metadata(pre)).encode("xyz", False)) == count


def test_qwen2_composes_characters() -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    qwen2, smollm = (Tokenizer.from_gguf(_word_metadata(pre)) for pre in ("qwen2", "smollm"))
    assert qwen2.encode(decomposed) == qwen2.encode(composed)
    assert smollm.encode(decomposed) != smollm.encode(composed)


def test_begin_and_end_tokens_are_added_as_the_file_says() -> None:
    metadata = _word_metadata("llama-bpe")
    bos = metadata["tokenizer.ggml.bos_token_id"]
    assert Tokenizer.from_gguf(metadata).encode("xyz")[0] == bos
    for pre in ("dbrx", "qwen2"):
        assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": pre}).encode("xyz")[0] != bos
    flags = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    flags["tokenizer.ggml.eos_token_id"] = bos
    ids = Tokenizer.from_gguf(metadata | flags).encode("xyz")
    assert ids[0] != bos and ids[-1] == bos


def test_end_of_turn_tokens_end_an_answer(byte_level_metadata: dict[str, Any]) -> None:
    turns = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 1}
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | turns)
    assert tokenizer.eos_token_ids == (1, 5)
    assert {1, 5} <= tokenizer.special_token_ids


@pytest.mark.parametrize("text", ["<end_of_turn>", "<|end|>"])
def test_an_end_of_turn_is_found_by_its_text(
    byte_level_metadata: dict[str, Any], text: str
) -> None:
    """Files of Gemma and Phi do not name theirs."""
    tokens = [*byte_level_metadata["tokenizer.ggml.tokens"], text]
    types = [*byte_level_metadata["tokenizer.ggml.token_type"], 3]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    ends = Tokenizer.from_gguf(byte_level_metadata | keys).eos_token_ids
    assert ends == (1, len(tokens) - 1)
    named = keys | {"tokenizer.ggml.eot_token_id": 5}
    assert Tokenizer.from_gguf(byte_level_metadata | named).eos_token_ids == (1, 5)


def test_a_message_of_gpt_oss_ends_no_turn(byte_level_metadata: dict[str, Any]) -> None:
    """Its reasoning ends with <|end|>, after which the answer follows."""
    ends = ["<|end|>", "<|return|>", "<|call|>"]
    tokens = [*byte_level_metadata["tokenizer.ggml.tokens"], *ends]
    types = [*byte_level_metadata["tokenizer.ggml.token_type"], 3, 3, 3]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    found = Tokenizer.from_gguf(byte_level_metadata | keys).eos_token_ids
    assert found == (1, len(tokens) - 2, len(tokens) - 1)


def test_user_defined_tokens_are_whole_but_not_special(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<tool>b<été 2>")
    assert len(ids) == 4
    assert byte_level.decode(ids[:3]) == "a<tool>b"


def test_fillers_are_no_tokens(byte_level_metadata: dict[str, Any]) -> None:
    tokens = list(byte_level_metadata["tokenizer.ggml.tokens"])
    real = len(tokens)
    types = [*byte_level_metadata["tokenizer.ggml.token_type"], 4, 5]
    tokens += [f"[PAD{real}]", f"[PAD{real + 1}]"]
    padded = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | padded)
    assert tokenizer.vocab_size == real
    assert tokenizer.decode([real]) == ""


def test_named_chat_templates(byte_level_metadata: dict[str, Any]) -> None:
    named = {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "T{# tools #}",
    }
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | named)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages) == "user:Hi;"
    assert tokenizer.apply_chat_template(messages, tools=[{}]) == "T"


FRAGMENTS = [
    "the",
    "other",
    "hen",
    "quick",
    "jumps",
    "lazy",
    "over",
    " ",
    "  ",
    "e",
    "t",
    "é",
    "你z",
    "🙂",
]
"""Of what the vocabulary was trained on, so that merges overlap and compete, and of what not."""


def _sentencepiece_by_definition(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece BPE as its paper states it: merge the best-scored adjacent pair, leftmost."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    pieces = list(("\u2581" + text.replace(" ", "\u2581")) if text else "")
    while True:
        pairs = [(a + b, at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        merged, at = max(pairs, key=lambda pair: (scores[ids[pair[0]]], -pair[1]))
        pieces[at : at + 2] = [merged]
    spelled = [[p] if p in ids else [f"<0x{b:02X}>" for b in p.encode()] for p in pieces]
    return [ids[token] for tokens in spelled for token in tokens]


@settings(deadline=None)
@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join))
def test_sentencepiece_ids_follow_the_definition(
    sentencepiece: Tokenizer, sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    expected = _sentencepiece_by_definition(sentencepiece_metadata, text)
    assert sentencepiece.encode(text, add_special_tokens=False) == expected


def test_space_prefix_can_be_off(sentencepiece_metadata: dict[str, Any]) -> None:
    off = sentencepiece_metadata | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.from_gguf(off)
    ids = tokenizer.encode(" the", add_special_tokens=False)
    assert tokenizer.decode(ids) == " the"
    assert tokenizer.encode("the", add_special_tokens=False) != ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "falcon"}, r"'falcon'.*llama-bpe.*qwen2.*smollm"),
        ({"tokenizer.ggml.model": "bert"}, r"'bert'.*gpt2.*llama"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, r"bos_token_id is 1000000"),
        ({"tokenizer.ggml.merges": ["no such"]}, r"inconsistent"),
        ({"tokenizer.ggml.merges": [1]}, r"merges is \[1\]; it must be a list of str"),
        ({"tokenizer.ggml.tokens": "a"}, r"tokens is 'a'; it must be a list of str"),
        ({"tokenizer.ggml.eos_token_id": "a"}, r"eos_token_id is 'a'; it must be a int"),
        ({"tokenizer.chat_template": [["a"]]}, r"chat_template is .*; it must be a str"),
    ],
)
def test_bad_metadata(
    byte_level_metadata: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(byte_level_metadata | change)


def test_long_pieces_are_not_cut_everywhere(sentencepiece_metadata: dict[str, Any]) -> None:
    """Finding the merges of a piece takes the square of its length."""
    tokens = [*sentencepiece_metadata["tokenizer.ggml.tokens"], "a" * 100_000]
    scores = [*sentencepiece_metadata["tokenizer.ggml.scores"], 0.0]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores}
    with pytest.raises(ModelError, match="a token of 100,000, and no merges"):
        Tokenizer.from_gguf(sentencepiece_metadata | changes)


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_missing_metadata(byte_level_metadata: dict[str, Any], key: str) -> None:
    full_key = f"tokenizer.ggml.{key}"
    rest = {name: value for name, value in byte_level_metadata.items() if name != full_key}
    with pytest.raises(ModelError, match=full_key):
        Tokenizer.from_gguf(rest)
