"""Two tiny tokenizers, one of each kind, trained on a few lines of text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from jaxserve.text import Tokenizer
from jaxserve.text.token_bytes import BYTE_ALPHABET, SPACE_MARK

CORPUS = [
    "The quick brown fox jumps over the lazy dog, then the other fox jumps back.",
    "Le café naïve de la gare: déjà vu, déjà vu!",
    "def square(x):\n    return x * x\n\n\nprint(square(12))",
    "你好，世界！你好，朋友！ 🙂🙂 ok",
] * 3

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@pytest.fixture(scope="session")
def byte_level_metadata() -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE vocabulary with special and user-defined tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(BYTE_ALPHABET), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    learned = sorted(backend.get_vocab(), key=backend.token_to_id)
    merges = _merges(backend)
    tokens = ["<|begin|>", "<|end|>", *learned, "<tool>", "<été 2>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.token_type": [CONTROL] * 2 + [NORMAL] * len(learned) + [USER_DEFINED] * 2,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].role }}:{{ messages[0].content }};",
    }


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    """GGUF metadata of a SentencePiece BPE vocabulary with scores and byte fallback."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=220, limit_alphabet=60, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    merged = ["".join(merge) for merge in _merges(backend)]
    letters = sorted(set(backend.get_vocab()) - set(merged))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = list(dict.fromkeys([*merged, *letters]))
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


@pytest.fixture(scope="session")
def byte_level(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata)


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def _merges(backend: Backend) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
