"""Builds tokenizers from GGUF metadata.

A GGUF file has the vocabulary and the merges but only the *name* of the pre-tokenizer
(`tokenizer.ggml.pre`). Each name is defined here as in the models' own `tokenizer.json` files, so
that ids equal those of the original tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.core.errors import ModelError
from jaxserve.core.model_files import shown
from jaxserve.text.token_bytes import SPACE_MARK

Metadata = Mapping[str, Any]
# The longest piece, and characters of all, that a SentencePiece vocabulary may have: its merges are
# found by trying every cut.
_MAX_PIECE_CHARS, _MAX_PIECES_CHARS = 512, 1 << 23
# Types of the keys that are read here; lists are of such values.
_TYPES: dict[str, type | list[type]] = {
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.ggml.tokens": [str],
    "tokenizer.ggml.merges": [str],
    "tokenizer.ggml.scores": [float],
    "tokenizer.ggml.token_type": [int],
    "tokenizer.ggml.add_bos_token": bool,
    "tokenizer.ggml.add_eos_token": bool,
    "tokenizer.ggml.add_space_prefix": bool,
    "tokenizer.chat_template": str,
    "tokenizer.chat_templates": [str],
} | {
    f"tokenizer.ggml.{name}_token_id": int
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
}


class _TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


_ENDS_OF_TURN = ("<end_of_turn>", "<|end|>")
# gpt-oss ends a turn, or waits for a tool, by these, and a message by <|end|>.
_ENDS_OF_HARMONY = ("<|return|>", "<|call|>")
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CODES = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_LETTERS = re.sub("[0-9A-F]+", lambda code: chr(int(code[0], 16)), _CODES).replace(" ", "")
"""Ranges of letters with cases that words of DeepSeek V2 are of: not all that Unicode has."""
_DEEPSEEK_SPLITS = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
)
_DEEPSEEK_V3_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class _BytePairs:
    """Differences between byte-level BPE tokenizers other than the vocabulary."""

    split: str | tuple[str, ...] | None = None
    """Words are the matches of this pattern and what is between them; of several, each divides the
    words of those before. None for GPT-2's own pattern."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is a single token is used as is, without merging."""
    adds_bos: bool = False
    """Default if the file has no `add_bos_token`."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None)
        patterns = (self.split,) if isinstance(self.split, str) else self.split or ()
        steps = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns]
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        return pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level


_LLAMA3 = _BytePairs(split=_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)
_BYTE_PAIRS = {
    "dbrx": _BytePairs(split=_LLAMA3_SPLIT),  # of Phi-4; in OLMo 2's files not seen yet
    "deepseek-llm": _BytePairs(split=_DEEPSEEK_SPLITS, single_digits=True),
    "deepseek-v3": _BytePairs(split=_DEEPSEEK_V3_SPLITS),
    "default": _BytePairs(),
    "gpt-2": _BytePairs(),
    "gpt-4o": _BytePairs(split=_O200K_SPLIT, ignore_merges=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _BytePairs(split=_QWEN2_SPLIT, nfc=True),
    "smollm": _BytePairs(single_digits=True),
    "tekken": _BytePairs(split=_TEKKEN_SPLIT, ignore_merges=True, adds_bos=True),
}


def check_vocabulary(metadata: Metadata) -> None:
    """Raises ModelError for a `tokenizer.*` key whose value is not of its type."""
    for key, value in metadata.items():
        kind = str if key.startswith("tokenizer.chat_template.") else _TYPES.get(key)
        if kind is None:
            continue
        inner = kind[0] if isinstance(kind, list) else kind
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) != isinstance(kind, list) or set(map(type, values)) - {inner}:
            of = "a list of " if isinstance(kind, list) else "a "
            raise ModelError(f"GGUF key {key} is {shown(value)}; it must be {of}{inner.__name__}.")


def build_backend(metadata: Metadata) -> tokenizers.Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Args:
        metadata: GGUF keys to plain values; `tokenizer.ggml.*` is read.

    Raises:
        ModelError: a key is missing or contradicts another, or the kind of tokenizer is unknown.
        The tokenizers library raises others for what it finds inconsistent.
    """
    kind = _required(metadata, "tokenizer.ggml.model")
    builders = {"gpt2": _build_byte_level, "llama": _build_sentencepiece}
    if kind not in builders:
        raise ModelError(
            f"GGUF tokenizer {shown(kind)} is not supported; use one of {sorted(builders)}"
        )
    backend = builders[kind](metadata)
    _add_special_tokens(backend, metadata)
    return backend


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Names in chat templates (`bos_token`, ...) to token texts."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {f"{name}_token": _token_at(metadata, key) for name, key in names.items()}
    return {name: token for name, token in found.items() if token is not None}


def eos_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Tokens that end an answer: end of sequence, of turn, and of message.

    Files that name no end of turn have it by its text (Gemma, Phi, gpt-oss).
    """
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [metadata[key] for key in keys if key in metadata]
    if "tokenizer.ggml.eot_token_id" not in metadata:
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        ends = _ENDS_OF_HARMONY if set(_ENDS_OF_HARMONY) <= set(tokens) else _ENDS_OF_TURN
        ids += [index for index, token in enumerate(tokens) if token in ends]
    return tuple(dict.fromkeys(ids))


def chat_templates(metadata: Metadata) -> dict[str, str]:
    """Template name to Jinja source; the unnamed one is `default`."""
    templates = {
        name: metadata[f"tokenizer.chat_template.{name}"]
        for name in metadata.get("tokenizer.chat_templates", ())
        if f"tokenizer.chat_template.{name}" in metadata
    }
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    return templates


def _build_byte_level(metadata: Metadata) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _BYTE_PAIRS:
        raise ModelError(
            f"GGUF pre-tokenizer {shown(name)} is not supported; supported: {sorted(_BYTE_PAIRS)}. "
            "Use the model's Hugging Face directory, which has a tokenizer.json, instead"
        )
    pairs = _BYTE_PAIRS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in _required(metadata, "tokenizer.ggml.merges")]
    model = models.BPE(_vocabulary(metadata), merges, ignore_merges=pairs.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if pairs.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pairs.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    _add_template(backend, metadata, adds_bos=pairs.adds_bos)
    return backend


def _build_sentencepiece(metadata: Metadata) -> tokenizers.Tokenizer:
    """SentencePiece BPE as in `tokenizer.json` of Llama 2 and Mistral."""
    vocabulary = _vocabulary(metadata)
    if "tokenizer.ggml.merges" in metadata:
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        merges = _merges_from_scores(vocabulary, _required(metadata, "tokenizer.ggml.scores"))
    unknown = _token_at(metadata, "unknown")
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_mark = normalizers.Replace(" ", SPACE_MARK)
    to_text = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), to_mark])
        to_text.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = to_mark
    backend.decoder = decoders.Sequence(to_text)
    _add_template(backend, metadata, adds_bos=True)
    return backend


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges implied by SentencePiece: any two pieces that form a third, best score first.

    Equal scores are ordered as in Hugging Face's converter, longer left halves first, since the
    position in this list decides between overlapping merges.
    """
    longest, total = max(map(len, vocabulary), default=0), sum(map(len, vocabulary))
    if longest > _MAX_PIECE_CHARS or total > _MAX_PIECES_CHARS:
        raise ModelError(
            f"the GGUF vocabulary has {total:,} characters and a token of {longest:,}, and no "
            f"merges; at most {_MAX_PIECES_CHARS:,} and {_MAX_PIECE_CHARS:,} are read."
        )
    ranked = []
    for piece, token_id in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append(((-scores[token_id], -len(left), -len(right)), left, right))
    ranked.sort(key=lambda entry: entry[0])
    return [(left, right) for _, left, right in ranked]


def _vocabulary(metadata: Metadata) -> dict[str, int]:
    """Token text to id, without the `[PAD...]` tokens that pad the file to the embedding's size."""
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    return {token: i for i, token in enumerate(tokens) if token != f"[PAD{i}]"}


def _add_special_tokens(backend: tokenizers.Tokenizer, metadata: Metadata) -> None:
    """Adds the tokens that are matched whole in the text, before any splitting."""
    ends = {metadata.get("tokenizer.ggml.bos_token_id"), *eos_token_ids(metadata)}
    special, plain = [], []
    types = metadata.get("tokenizer.ggml.token_type", ())
    vocabulary = _vocabulary(metadata)
    for token, token_id in vocabulary.items():
        token_type = types[token_id] if token_id < len(types) else _TokenType.NORMAL
        if token_type in (_TokenType.UNKNOWN, _TokenType.CONTROL) or token_id in ends:
            special.append(AddedToken(token, special=True, normalized=False))
        elif token_type == _TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_template(backend: tokenizers.Tokenizer, metadata: Metadata, *, adds_bos: bool) -> None:
    """Adds BOS and EOS around a text as set by `add_bos_token` and `add_eos_token`."""
    bos = eos = None
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        bos = _token_at(metadata, "bos")
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        eos = _token_at(metadata, "eos")
    around = [token for token in (bos, eos) if token is not None]
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=[part for part in (bos, "$A", eos) if part is not None],
            special_tokens=[(token, backend.token_to_id(token)) for token in around],
        )


def _token_at(metadata: Metadata, key: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if token_id is None:
        return None
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    if not 0 <= token_id < len(tokens):
        raise ModelError(
            f"tokenizer.ggml.{key}_token_id is {token_id}, outside the vocabulary of {len(tokens)}"
        )
    return tokens[token_id]


def _required(metadata: Metadata, key: str) -> Any:
    if key not in metadata:
        raise ModelError(f"the GGUF metadata has no {key!r}, which the tokenizer requires")
    return metadata[key]
