from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import ModelError, RequestError
from jaxserve.models.loading.gguf.header import read_gguf
from jaxserve.text import Tokenizer
from jaxserve.text.thinking import begun_thinking

GOLDEN = json.loads((Path(__file__).parent / "golden/tokenizer_smollm2.json").read_text())


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(smollm2_path).metadata)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: repr(case["text"][:24]))
def test_smollm2_ids_are_those_of_the_original_tokenizer(
    smollm2: Tokenizer, case: dict[str, Any]
) -> None:
    assert smollm2.encode(case["text"]) == case["ids"]
    assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_a_tag_of_reasoning_counts_in_the_last_turn_only(smollm2: Tokenizer) -> None:
    def begun(said: str, answer: str | None = None) -> str | None:
        turns = [{"role": "user", "content": said}]
        turns += [] if answer is None else [{"role": "assistant", "content": answer}]
        prompt = smollm2.apply_chat_template(turns, continue_final_message=answer is not None)
        return begun_thinking(smollm2, smollm2.encode(prompt, add_special_tokens=False))

    assert begun("Hi", "<think>\nSo") == "\nSo"
    assert begun("Hi", "<think>") == ""
    for said, answer in (("<think> is a tag", None), ("Hi", "<think>So</think> Yes")):
        assert begun(said, answer) is None


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.eos_token_id == smollm2.get_vocab()["<|im_end|>"] == 2
    spelled = smollm2.convert_ids_to_tokens([*smollm2.encode(" sky"), 99_999, -1])
    assert spelled == ["\u0120sky", None, None]
    assert smollm2.convert_ids_to_tokens(2) == "<|im_end|>"


@settings(deadline=None)
@given(text=st.text())
def test_no_text_has_more_characters_than_its_tokens_allow(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(text) <= tokenizer.longest_token * len(ids)


def test_smollm2_chat_prompt(smollm2: Tokenizer) -> None:
    prompt = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@settings(deadline=None)
@given(text=st.text())
def test_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    # SentencePiece writes spaces as U+2581, so it cannot tell that character from a space.
    assert decoded == text or decoded == text.replace("\u2581", " ")


@settings(deadline=None)
@given(data=st.data())
def test_decode_equals_hugging_face(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=20))
    skip = data.draw(st.booleans())
    expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    decoded = tokenizer.decode(ids, skip_special_tokens=skip)
    if tokenizer.strips_leading_space and "\ufffd" in expected:
        # One bad byte makes Hugging Face replace its whole run of byte tokens; we replace only it.
        assert "\ufffd" in decoded
    else:
        assert decoded == expected


def test_token_text(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        rocket = tokenizer.encode("a🚀")[len(tokenizer.encode("a")) :]
        assert len(rocket) > 1
        assert {tokenizer.token_text(part) for part in rocket} == {"\ufffd"}
        assert tokenizer.token_text(tokenizer.encode("in the", False)[-1]) == " the"
        assert tokenizer.token_text(tokenizer.vocab_size) == ""
        assert tokenizer.token_text(2**40) == ""


def test_special_tokens(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.bos_token_id == 1
    assert sentencepiece.special_token_ids == {0, 1, 2}
    ids = sentencepiece.encode("the</s>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert sentencepiece.decode(ids) == "the"
    assert sentencepiece.decode(ids, skip_special_tokens=False) == "<s> the</s>"


def test_invalid_unicode_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        tokenizer.encode("half a pair: \ud83d")


@settings(deadline=None)
@given(text=st.text())
def test_saved_tokenizer_is_equal(saved: tuple[Tokenizer, Tokenizer], text: str) -> None:
    before, after = saved
    ids = before.encode(text)
    assert after.encode(text) == ids
    assert after.decode(ids) == before.decode(ids)


def test_saved_facts_are_equal(saved: tuple[Tokenizer, Tokenizer]) -> None:
    before, after = saved
    facts = ("vocab_size", "bos_token_id", "eos_token_ids", "chat_template", "special_token_ids")
    for fact in facts:
        assert getattr(after, fact) == getattr(before, fact)


@pytest.fixture(scope="module")
def saved(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Tokenizer]:
    directory = tmp_path_factory.mktemp("saved")
    tokenizer.save(directory)
    return tokenizer, Tokenizer.from_directory(directory)


def test_save_keeps_other_generation_settings(byte_level: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.7, "eos_token_id": 9}')
    byte_level.save(tmp_path)
    assert json.loads(file.read_text()) == {"temperature": 0.7, "eos_token_id": [1]}


@pytest.fixture
def directory(byte_level: Tokenizer, tmp_path: Path) -> Path:
    """A model directory with a tokenizer.json and nothing else."""
    byte_level.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").unlink()
    return tmp_path


def test_directory_with_tokenizer_json_alone(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_special_tokens_as_text_dict_or_null(directory: Path) -> None:
    config = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>", "unk_token": None}
    _write(directory / "tokenizer_config.json", config)
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [7, 1]}, {"eos_token_id": 5}, (7, 1)),
        ({"eos_token_id": 7}, {}, (7, 1)),
        ({}, {"eos_token_id": 5}, (5, 1)),
        ({}, {}, (1,)),
    ],
)
def test_end_tokens_of_a_directory(
    directory: Path, generation: dict, model: dict, expected: tuple[int, ...]
) -> None:
    _write(directory / "tokenizer_config.json", {"eos_token": "<|end|>"})
    _write(directory / "generation_config.json", generation)
    _write(directory / "config.json", model)
    assert Tokenizer.from_directory(directory).eos_token_ids == expected


def test_named_chat_templates(directory: Path, tmp_path: Path) -> None:
    named = {"default": "plain", "tool_use": "tools: {{ tools | length }}"}
    entries = [{"name": name, "template": text} for name, text in named.items()]
    _write(directory / "tokenizer_config.json", {"chat_template": entries})
    messages = [{"role": "user", "content": "Hi"}]
    tokenizer = Tokenizer.from_directory(directory)
    tokenizer.save(tmp_path / "copy")
    for loaded in (tokenizer, Tokenizer.from_directory(tmp_path / "copy")):
        assert loaded.apply_chat_template(messages) == "plain"
        assert loaded.apply_chat_template(messages, tools=[{"name": "f"}]) == "tools: 1"


def test_template_file_wins_and_reads_special_tokens(directory: Path) -> None:
    config = {"bos_token": "<|begin|>", "chat_template": "old"}
    _write(directory / "tokenizer_config.json", config)
    template = "{{ bos_token }}{{ messages[0].content }}{{ mood }}"
    (directory / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_directory(directory)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, mood="!") == "<|begin|>Hi!"
    assert tokenizer.apply_chat_template(messages, **{"self": 1, "mood": "?"}) == "<|begin|>Hi?"


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("tokenizer_config.json", "{{ bos_token }}", "{{ eos_token }}"),
        ("tokenizer_config.json", '"<|end|>"', '"<|begin|>"'),
        ("tokenizer.json", '"lstrip": false', '"lstrip": true'),
    ],
)
def test_digest_changes_with_a_token_or_a_template(
    directory: Path, file: str, before: str, after: str
) -> None:
    config = {"chat_template": "{{ bos_token }}", "eos_token": "<|end|>"}
    _write(directory / "tokenizer_config.json", config)
    digest = Tokenizer.from_directory(directory).digest
    assert Tokenizer.from_directory(directory).digest == digest
    text = (directory / file).read_text()
    assert before in text
    (directory / file).write_text(text.replace(before, after, 1))
    assert Tokenizer.from_directory(directory).digest != digest


def test_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_corrupt_file_is_named(directory: Path, name: str) -> None:
    (directory / name).write_text('{"cut":')
    with pytest.raises(ModelError, match=name):
        Tokenizer.from_directory(directory)


def test_unknown_decoder_is_refused(directory: Path) -> None:
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    _write(file, content)
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer.from_directory(directory)


def _split_by(directory: Path, pattern: str) -> None:
    """Give the tokenizer of `directory` a pattern that finds its words."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    steps = [split | {"invert": False}, content["pre_tokenizer"]]
    _write(file, content | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}})


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(\w+)*$", r"(\s+)+$", r"(!+)+\?"])
def test_a_pattern_of_exponential_time_is_refused(directory: Path, pattern: str) -> None:
    _split_by(directory, pattern)
    with pytest.raises(ModelError, match="takes exponential time"):
        Tokenizer.from_directory(directory)


def _template(*pieces: str, ids: int = 1) -> dict[str, Any]:
    """A post-processor that writes texts, named A, and special tokens, named S."""
    kinds = {"A": {"Sequence": {"id": "A", "type_id": 0}}}
    kinds["S"] = {"SpecialToken": {"id": "S", "type_id": 0}}
    tokens = {"S": {"id": "S", "ids": [0] * ids, "tokens": ["S"] * ids}}
    single = [kinds[piece] for piece in pieces]
    pair = [kinds["A"], {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def _replacing(*contents: str, pattern: str = "String") -> dict[str, Any]:
    steps = [{"type": "Replace", "pattern": {pattern: "a"}, "content": text} for text in contents]
    return {"type": "Sequence", "normalizers": steps}


def _prepending(text: str) -> dict[str, Any]:
    return {"type": "Prepend", "prepend": text}


def _charsmap(longest: int) -> dict[str, Any]:
    trie = bytes(2048)  # in which nothing is found
    content = len(trie).to_bytes(4, "little") + trie + b"a\0" + b"b" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


@pytest.mark.parametrize(
    ("name", "fine", "hostile"),
    [
        ("normalizer", _replacing("b" * 16, "a" * 16), _replacing(*["a" * 16] * 8)),
        ("normalizer", _replacing("b" * 99, pattern="Regex"), _replacing("b" * 999)),
        ("normalizer", _prepending("_"), _prepending("_" * 9999)),
        ("normalizer", _charsmap(33), _charsmap(999)),
        ("post_processor", _template("S", "A", "S", ids=9), _template("A", "A")),
        ("post_processor", _template("A", "S"), _template("A", *["S"] * 9999)),
        ("post_processor", _template("A", "S"), _template("A", "S", ids=9999)),
    ],
)
def test_a_tokenizer_that_makes_texts_long_is_refused(directory, name, fine, hostile):
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    _write(file, content | {name: fine})
    assert Tokenizer.from_directory(directory).encode("abc")
    _write(file, content | {name: hostile})
    with pytest.raises(ModelError, match="the tokenizer"):
        Tokenizer.from_directory(directory)


def test_a_pattern_that_takes_too_long_for_a_text_fails_that_text(directory: Path) -> None:
    _split_by(directory, r"((ab)+)+$")
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    with pytest.raises(RequestError, match=r"cannot encode this text: .*retry-limit"):
        tokenizer.encode("ab" * 100 + "c")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"bos_token": 1}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config.json", {"chat_template": 1}),
        ("generation_config.json", {"eos_token_id": ["</s>"]}),
        ("generation_config.json", {"eos_token_id": 1 << 40}),
    ],
)
def test_fields_of_another_type_are_named(directory: Path, file: str, content: Any) -> None:
    _write(directory / file, content)
    with pytest.raises(ModelError, match=r"bos_token|chat_template|eos_token_id|end token"):
        Tokenizer.from_directory(directory)


def test_token_ids_are_bounded(directory: Path) -> None:
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["far"] = 1 << 31
    _write(file, content)
    with pytest.raises(ModelError, match="ids must be below 16777216"):
        Tokenizer.from_directory(directory)


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content))
