"""Sampling parameters of a request: names and meanings as in vLLM, checked on construction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.structured_outputs import StructuredOutputs

GREEDY_TEMPERATURE = 1e-5
MAX_N = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 48
MAX_LOGIT_BIAS = 1024
MAX_LOGIT_BIAS_MAGNITUDE = 100.0
MAX_ALLOWED_TOKEN_IDS = 1 << 18
MAX_BAD_WORDS = 32
MAX_BAD_WORD_CHARS = 256
MAX_EXTRA_ARGS = 16
MIN_REPETITION_PENALTY = 1e-6  # and at most its inverse: a penalized float32 logit stays finite

_INT32_MAX = 2**31 - 1
_GENERATION_CONFIG_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; any field out of range raises RequestError.

    A temperature below 1e-5 is greedy: the most likely token, whatever top_p, top_k and min_p; the
    `n` outputs are then equal.
    `presence_penalty` and `frequency_penalty` apply to output tokens, `repetition_penalty` to
    prompt and output. `max_tokens=None` generates up to the context limit. `logprobs` and
    `prompt_logprobs` are of the raw distribution, before any of these settings. With
    `logprob_token_ids`, at most 20, each position has their logprobs beside the sampled token's,
    in the place of those of the `logprobs` most likely tokens.
    `include_stop_str_in_output` leaves the stop string, or the text of the token that ended the
    output, in its text. Without `detokenize` outputs have no text, and logprobs no decoded tokens.
    Lists are stored as tuples, also `stop` given as one string; `structured_outputs`, the required
    output format, may be given as a mapping. `extra_args` applies those of the engine's logits
    processors that it names, each with its number.

    `thinking_token_budget` bounds reasoning between `<think>`, at the end of the prompt or the
    begin of the output, and `</think>`: after so many tokens, those of `</think>` are forced, and
    the answer follows. Reasoning then comes before the format of `structured_outputs`, which
    otherwise begins at once; -1 asks for that without a limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    extra_args: dict[str, float] | None = None
    thinking_token_budget: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        self._check_together()

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_int("top_k", self.top_k, -1, _INT32_MAX, note="0 or -1 turns it off")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float(
            "repetition_penalty",
            self.repetition_penalty,
            MIN_REPETITION_PENALTY,
            1 / MIN_REPETITION_PENALTY,
        )
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        _check_int("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, _INT32_MAX)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field), 0, MAX_LOGPROBS)
        if self.thinking_token_budget is not None:
            note = "-1 sets no limit"
            _check_int("thinking_token_budget", self.thinking_token_budget, -1, _INT32_MAX, note)
        _check_int("priority", self.priority, -_INT32_MAX, _INT32_MAX)
        for field in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, field), bool):
                raise RequestError(f"{field} must be True or False, got {getattr(self, field)!r}.")

    def _check_lists(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", _strings("stop", stop, MAX_STOP_STRINGS, MAX_STOP_CHARS))
        self._set(
            "bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        )
        self._set(
            "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        )
        if self.logprob_token_ids is not None:
            given = _token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROBS)
            self._set("logprob_token_ids", given or None)
            if given and self.logprobs is None:
                self._set("logprobs", 0)
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not allowed:
                raise RequestError(
                    "allowed_token_ids is empty, so no token could be sampled; "
                    "list at least one id, or leave it None to allow all."
                )
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.extra_args is not None:
            self._set("extra_args", _extra_args(self.extra_args))

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; "
                f"min_tokens must be 0..max_tokens."
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={list(self.stop)!r} needs text to match against, but detokenize is False; "
                f"set detokenize=True or use stop_token_ids."
            )
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputs.of(self.structured_outputs))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_listed_logprobs(self) -> int:
        """Tokens listed at each position, besides the sampled one."""
        given = self.logprob_token_ids
        return len(given) if given is not None else self.logprobs or 0

    @property
    def masked(self) -> bool:
        """Whether the host says which tokens are allowed next."""
        budget = self.thinking_token_budget
        return self.structured_outputs is not None or (budget is not None and budget >= 0)

    @classmethod
    def from_defaults(cls, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """Applies `overrides` to the defaults of the model's `generation_config.json`.

        Of `defaults` only the sampling settings are read (Hugging Face's `max_new_tokens` becomes
        `max_tokens`); null entries count as absent. Raises RequestError for an unknown field and
        for any value out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise RequestError(
                f"{unknown[0]!r} is not a sampling field; use one of {', '.join(sorted(known))}."
            )
        values = {
            field: defaults[key]
            for key, field in _GENERATION_CONFIG_FIELDS.items()
            if defaults.get(key) is not None
        }
        return cls(**(values | overrides))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RequestError if a field names a token id outside 0..vocab_size-1."""
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            worst = max(getattr(self, field) or (), default=0)
            if worst >= vocab_size:
                raise RequestError(
                    f"{field} names token id {worst}, but this model has {vocab_size} tokens, "
                    f"of the ids 0..{vocab_size - 1}."
                )


def _check_int(field: str, value: Any, low: int, high: int, note: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(
            f"{field} must be an integer in {low}..{high}{f' ({note})' if note else ''}, "
            f"got {value!r}."
        )


def _check_float(
    field: str, value: Any, low: float, high: float, *, low_open: bool = False
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise RequestError(
            f"{field} must be a number in {bracket}{low:g}, {high:g}], got {value!r}."
        )


def _bounded_list(field: str, value: Any, most: int) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        raise RequestError(f"{field} must be a list, got {value!r}.")
    if len(value) > most:
        raise RequestError(f"{field} has {len(value)} entries; at most {most} are allowed.")
    return tuple(value)


def _strings(field: str, value: Any, most: int, most_chars: int) -> tuple[str, ...]:
    items = _bounded_list(field, value, most)
    for item in items:
        if not isinstance(item, str) or not 1 <= len(item) <= most_chars:
            shown = repr(item) if len(repr(item)) <= 80 else repr(item)[:77] + "..."
            raise RequestError(
                f"{field} must hold strings of 1..{most_chars} characters, got {shown}."
            )
    return items


def _token_ids(field: str, value: Any, most: int) -> tuple[int, ...]:
    items = _bounded_list(field, value, most)
    for item in items:
        _check_int(f"a token id of {field}", item, 0, _INT32_MAX)
    return items


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to biases, got {value!r}.")
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed."
        )
    bound = MAX_LOGIT_BIAS_MAGNITUDE
    biases = {}
    for token, bias in value.items():
        _check_int("a token id of logit_bias", token, 0, _INT32_MAX)
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or math.isnan(bias):
            raise RequestError(
                f"logit_bias of token {token} must be a number "
                f"(clamped to [{-bound:g}, {bound:g}]), got {bias!r}."
            )
        biases[token] = float(min(max(bias, -bound), bound))
    return biases


def _extra_args(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_EXTRA_ARGS:
        raise RequestError(
            f"extra_args must map at most {MAX_EXTRA_ARGS} names of logits processors to numbers, "
            f"got {value!r:.80}."
        )
    for name, number in value.items():
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not isinstance(name, str) or not is_number or not abs(number) < 1e38:
            raise RequestError(
                f"extra_args must map names of logits processors to finite numbers, "
                f"got {name!r:.80}: {number!r:.80}."
            )
    return {name: float(number) for name, number in value.items()}


_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, as in SplitMix64


def sequence_seed(seed: int, index: int) -> int:
    """Seed of sequence `index` of a request with n > 1, in -2**63..2**63-1 as all seeds are.

    The first has the request's own seed. The others are far from the seeds of other requests: with
    `seed + index`, sample 1 of seed 7 would be sample 0 of seed 8.
    """
    return (seed + index * _SEED_STRIDE + 2**63) % 2**64 - 2**63
