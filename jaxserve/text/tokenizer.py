"""Tokenizers: text to token ids and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import tokenizers

from jaxserve.core.errors import ModelError, RequestError
from jaxserve.core.model_files import check_regular, read_json, read_text, shown
from jaxserve.text import gguf_vocab
from jaxserve.text.chat import RESERVED_VARIABLES, render_chat
from jaxserve.text.token_bytes import Spelling
from jaxserve.text.tokenizer_limits import check_backend, library_errors

_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_VOCABULARY = 1 << 24
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A model's vocabulary, its special tokens and its chat template.

    `encode` gives the ids of the model's own Hugging Face tokenizer. `decode` joins the bytes of
    the tokens and decodes them as UTF-8; invalid bytes become U+FFFD. The clean-up of spaces that
    some old configs request is not applied: it cannot be streamed.

    Attributes:
        eos_token_ids: tokens that end an answer.
        added_token_ids: tokens outside of the vocabulary of subwords: the special ones and others.
        special_token_ids: those of them that are omitted from decoded text unless requested.
        tokenizer_class: the class in transformers that the model names.
        strips_leading_space: whether decoding drops the first space, as SentencePiece models do.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int],
        chat_templates: Mapping[str, str],
        tokenizer_class: str = "PreTrainedTokenizerFast",
    ) -> None:
        """Prefer `from_directory` or `from_gguf`.

        Args:
            backend: the Hugging Face tokenizer.
            special_tokens: names in chat templates (`bos_token`, ...) to token texts.
            eos_token_ids: tokens that end an answer.
            chat_templates: template name to Jinja source; `default` is the usual one, `tool_use`
                is used for conversations with tools.
            tokenizer_class: the class in transformers that the model names.

        Raises `ModelError` for a tokenizer that cannot be used: of an unknown kind, with ids out of
        range, or that takes exponential time or memory for a text.
        """
        backend.no_truncation()
        backend.no_padding()
        check_backend(backend)
        self._backend = backend
        self._spelling = Spelling.of(backend.decoder)
        self._special_tokens = dict(special_tokens)
        self._chat_templates = dict(chat_templates)
        self._token_bytes: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer_class = tokenizer_class
        added = backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.strips_leading_space = self._spelling.strips_leading_space
        if self.vocab_size > _MAX_VOCABULARY:
            raise ModelError(
                f"the tokenizer has the token id {self.vocab_size - 1}; ids must be below "
                f"{_MAX_VOCABULARY}."
            )
        for token_id in self.eos_token_ids:
            if type(token_id) is not int or not 0 <= token_id < _MAX_VOCABULARY:
                raise ModelError(
                    f"the model has the end token {shown(token_id)}; it must be an id below "
                    f"{_MAX_VOCABULARY}."
                )

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest that changes with the vocabulary, and with how text is split and joined."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Reads a Hugging Face model directory. Raises `ModelError` if that fails."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.exists():
            raise ModelError(
                f"{directory} has no tokenizer.json; save one with transformers: "
                f"AutoTokenizer.from_pretrained(...).save_pretrained({str(directory)!r})"
            )
        check_regular(file, _MAX_TOKENIZER_BYTES)
        with library_errors(ModelError, f"{file} is not a valid tokenizer"):
            backend = tokenizers.Tokenizer.from_file(str(file))
        config = _read_json(directory / "special_tokens_map.json")
        config |= _read_json(directory / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=_eos_token_ids(directory, backend, special_tokens),
            chat_templates=_chat_templates(directory, config),
            tokenizer_class=str(config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer of a GGUF file from its metadata (keys to plain values).

        Raises `ModelError` if the file has no tokenizer or one of an unknown kind.
        """
        gguf_vocab.check_vocabulary(metadata)
        with library_errors(ModelError, "the GGUF vocabulary is inconsistent"):
            backend = gguf_vocab.build_backend(metadata)
        return cls(
            backend,
            special_tokens=gguf_vocab.special_tokens(metadata),
            eos_token_ids=gguf_vocab.eos_token_ids(metadata),
            chat_templates=gguf_vocab.chat_templates(metadata),
        )

    def save(self, directory: str | Path) -> None:
        """Writes files from which `from_directory` loads an equal tokenizer.

        Other fields of an existing `generation_config.json` are preserved.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {"clean_up_tokenization_spaces": False, **self._special_tokens}
        if set(self._chat_templates) == {"default"}:
            config["chat_template"] = self._chat_templates["default"]
        elif self._chat_templates:
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in self._chat_templates.items()
            ]
        _write_json(directory / "tokenizer_config.json", config)
        if self.eos_token_ids:
            generation = _read_json(directory / "generation_config.json")
            generation["eos_token_id"] = list(self.eos_token_ids)
            _write_json(directory / "generation_config.json", generation)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's embedding may be padded beyond it."""
        return max(self.get_vocab().values(), default=-1) + 1

    @cached_property
    def longest_token(self) -> int:
        """Characters in the spelling of the longest token: a text has at most so many for each of
        its tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def digest(self) -> str:
        """Hash of everything that texts, token ids and rendered conversations depend on."""
        parts = (
            self._backend.to_str(),
            self._special_tokens,
            self.eos_token_ids,
            self._chat_templates,
        )
        text = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        bos = self._special_tokens.get("bos_token")
        return None if bos is None else self._backend.token_to_id(bos)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token, else the first of `eos_token_ids`."""
        eos = self._backend.token_to_id(self._special_tokens.get("eos_token", ""))
        return next(iter(self.eos_token_ids), None) if eos is None else eos

    def get_vocab(self) -> dict[str, int]:
        """Token ids by the tokens as the vocabulary spells them."""
        return self._backend.get_vocab(with_added_tokens=True)

    @overload
    def convert_ids_to_tokens(self, token_ids: int) -> str | None: ...

    @overload
    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]: ...

    def convert_ids_to_tokens(
        self, token_ids: Sequence[int] | int
    ) -> list[str | None] | str | None:
        """Tokens as the vocabulary spells them, or the one of a single id; None for ids outside the
        vocabulary."""
        if isinstance(token_ids, int):
            return self.convert_ids_to_tokens([token_ids])[0]
        return [None if i < 0 else self._backend.id_to_token(i) for i in token_ids]

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by their names in chat templates, such as `bos_token`."""
        return dict(self._special_tokens)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template, if the model has one."""
        return self._chat_templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """Jinja source of the chat template for conversations with tools."""
        return self._chat_templates.get("tool_use", self.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Special tokens spelled out in the text are recognised. `add_special_tokens` adds those
        around a text (such as the first `<s>`); a chat template writes its own, so pass False
        when encoding its result. Raises `RequestError` for text with lone surrogates, which JSON
        can represent but UTF-8 cannot, and for text that the tokenizer's patterns take too long
        for.
        """
        with library_errors(RequestError, "the tokenizer cannot encode this text"):
            try:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            except TypeError as error:
                raise RequestError(
                    f"text must be a string of valid Unicode, got {text!r:.80}"
                ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary are ignored."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        spelled = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped)
        if self.strips_leading_space:
            spelled = spelled.removeprefix(b" ")
        return spelled.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for: possibly part of a character, empty for unknown ids."""
        spelled = self._token_bytes.get(token_id)
        if spelled is None:
            if not 0 <= token_id < self.vocab_size:
                return b""
            token = self._backend.id_to_token(token_id)
            spelled = b"" if token is None else self._spelling.to_bytes(token)
            self._token_bytes[token_id] = spelled
        return spelled

    def whole_text(self, token_id: int) -> str | None:
        """The characters of one token; None if it has an incomplete one."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            spelled = self.token_bytes(token_id)
        try:
            text = spelled.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        self._whole_texts[token_id] = text
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token, leading space included; U+FFFD for an incomplete character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # Positional only: a template variable may have the same name.
        add_generation_prompt: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; see `jaxserve.text.chat.render_chat`. By default it
        has a generation prompt unless `continue_final_message`, and is rendered by the model's
        `chat_template`.

        Further keyword arguments are variables of the template (such as `enable_thinking`).
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if chat_template is None:
            chat_template = self.tool_template if tools else self.chat_template
        return render_chat(
            chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self._special_tokens, **kwargs},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of `apply_chat_template`, with `chat_template_kwargs` as variables. Raises
        RequestError also for one of these that is a parameter of its own."""
        variables = chat_template_kwargs or {}
        if taken := sorted(RESERVED_VARIABLES & set(variables)):
            raise RequestError(
                f"chat_template_kwargs must not set {taken[0]!r}; it is a parameter of its own."
            )
        text = self.apply_chat_template(
            messages,
            add_generation_prompt,
            tools,
            continue_final_message,
            chat_template,
            **variables,
        )
        return self.encode(text, add_special_tokens=False)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Reads special tokens from a config: text, a dict with `content`, or null."""
    found = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if token is not None:
            if not isinstance(token, str):
                raise ModelError(f"the tokenizer's {name} is {shown(token)}; it must be a string.")
            found[name] = token
    return found


def _eos_token_ids(
    directory: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> tuple[int, ...]:
    """The tokenizer's own end token and the stop tokens of the generation config."""
    listed = _read_json(directory / "generation_config.json").get("eos_token_id")
    if listed is None:
        listed = _read_json(directory / "config.json").get("eos_token_id")
    ids = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(f"{directory} has eos_token_id {shown(listed)}; it must be an id or ids.")
    own = backend.token_to_id(special_tokens.get("eos_token", ""))
    return tuple(dict.fromkeys([*ids, own] if own is not None else ids))


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name to template: a string or a list of named ones in the config, or separate files."""
    configured = config.get("chat_template")
    if isinstance(configured, str):
        configured = [{"name": "default", "template": configured}]
    templates = {}
    for entry in [] if configured is None else configured if isinstance(configured, list) else [0]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise ModelError(
                    f"{directory}/tokenizer_config.json has chat_template {shown(configured)}; it "
                    "must be a string, or a list of objects with name and template."
                )
    file = directory / "chat_template.jinja"
    if file.exists():
        templates["default"] = read_text(file)
    for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = read_text(extra)
    return templates


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, or an empty one if there is no such file."""
    return read_json(file) if file.exists() else {}


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
