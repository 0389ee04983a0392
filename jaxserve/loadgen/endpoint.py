"""Probe an OpenAI endpoint for its model and the extensions it supports."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxserve.core.errors import ConfigError, EndpointError
from jaxserve.core.process.extras import extra
from jaxserve.loadgen.client import stream
from jaxserve.loadgen.prompts import WORDS, TextLength
from jaxserve.loadgen.timed_response import TimedResponse

with extra("loadgen"):
    import aiohttp

EndpointKind = Literal["completions", "chat"]
PromptFormat = Literal["auto", "text", "token_ids"]

_USAGE = {"temperature": 0.0, "stream_options": {"include_usage": True}}
_FULL_LENGTH = {**_USAGE, "ignore_eos": True}
_FIELDS = ({**_FULL_LENGTH, "return_token_ids": True}, _FULL_LENGTH, _USAGE, {})
"""Extra request fields in order of preference; the first set that the server accepts is used."""
_LIMIT_NAMES = {"completions": ("max_tokens",), "chat": ("max_tokens", "max_completion_tokens")}
_FEW, _MANY = 8, len(WORDS)
"""Words in the two probes that measure tokens per word."""


@dataclass(frozen=True)
class LoadEndpoint:
    """How to send requests to one endpoint.

    `token_ids` are ordinary tokens to build prompts from; None for text prompts, whose length in
    tokens is estimated by `text_length`.
    """

    base_url: str
    kind: EndpointKind
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    limit_name: str = "max_tokens"
    token_ids: tuple[int, ...] | None = None
    text_length: TextLength = TextLength()  # noqa: RUF009  frozen

    @property
    def url(self) -> str:
        return self.base_url + (
            "/completions" if self.kind == "completions" else "/chat/completions"
        )

    def body(self, prompt: str | Sequence[int], max_tokens: int) -> bytes:
        """The body of a streaming request."""
        if self.kind == "completions":
            asked: dict[str, Any] = {"prompt": prompt}
        else:
            asked = {"messages": [{"role": "user", "content": prompt}]}
        asked |= {"model": self.model, "stream": True, self.limit_name: max_tokens, **self.fields}
        return json.dumps(asked, separators=(",", ":")).encode()


async def find_out(
    http: aiohttp.ClientSession,
    base_url: str,
    kind: EndpointKind,
    model: str | None,
    prompt_format: PromptFormat,
) -> LoadEndpoint:
    """Probe the server at `base_url`, to which `/completions` is appended.

    `model` None selects the one it serves. Sends a few requests for one token each. Raises
    EndpointError if none succeeds, and ConfigError for token ids with chat.
    """
    if kind == "chat" and prompt_format == "token_ids":
        raise ConfigError("chat does not support token ids; use --endpoint completions.")
    base_url = base_url.rstrip("/")
    if model is None:
        model = await _served_model(http, base_url)
    token_ids = None
    if kind == "completions" and prompt_format != "text":
        token_ids = await _ordinary_tokens(http, base_url, model)
        if token_ids is None and prompt_format == "token_ids":
            raise EndpointError(
                f"{base_url} has no /tokenize, needed for token ids; use --prompt-format text."
            )
    formats = (token_ids,) if prompt_format == "token_ids" else dict.fromkeys((token_ids, None))
    for ids, limit_name, fields in itertools.product(formats, _LIMIT_NAMES[kind], _FIELDS):
        endpoint = LoadEndpoint(base_url, kind, model, fields, limit_name, ids)
        response = await _probe(http, endpoint, _FEW)
        if response.failure in (None, "no tokens"):
            break
        if response.failure == "no connection":
            raise _unreachable(base_url, response.detail)
    else:
        usual = "" if base_url.endswith("/v1") else "; check --base-url, which usually ends in /v1"
        raise EndpointError(
            f"{base_url} rejected a request for one token of {model!r}: {response.failure}, "
            f"{response.detail:.200}{usual}."
        )
    if endpoint.token_ids is not None:
        return endpoint
    longer = await _probe(http, endpoint, _MANY)
    if response.prompt_tokens is None or longer.prompt_tokens is None:
        return endpoint
    counts = ((_FEW, response.prompt_tokens), (_MANY, longer.prompt_tokens))
    return dataclasses.replace(endpoint, text_length=TextLength.measured(counts))


async def _probe(http: aiohttp.ClientSession, endpoint: LoadEndpoint, length: int) -> TimedResponse:
    """Request one token after a prompt of `length` words or tokens."""
    ids = endpoint.token_ids
    prompt = "".join(WORDS[:length]).lstrip() if ids is None else list(ids[:length])
    return await stream(http, endpoint.url, endpoint.body(prompt, 1))


async def _served_model(http: aiohttp.ClientSession, base_url: str) -> str:
    try:
        async with http.get(f"{base_url}/models") as response:
            text = await response.text("utf-8", "replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _unreachable(base_url, str(error) or type(error).__name__) from error
    try:
        return json.loads(text)["data"][0]["id"]
    except (IndexError, KeyError, TypeError, ValueError):
        raise EndpointError(
            f"{base_url}/models does not list a model (HTTP {response.status}: "
            f"{text[:200]}); set --model-name, and check --base-url, which usually "
            "ends in /v1, and --api-key."
        ) from None


async def _ordinary_tokens(
    http: aiohttp.ClientSession, base_url: str, model: str
) -> tuple[int, ...] | None:
    """Token ids of common words; None if the server cannot tokenize."""
    asked = {"model": model, "prompt": "".join(WORDS), "add_special_tokens": False}
    try:
        async with http.post(f"{base_url.removesuffix('/v1')}/tokenize", json=asked) as response:
            token_ids = (await response.json())["tokens"] if response.status == 200 else ()
    except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError):
        return None
    if not token_ids or not all(isinstance(token_id, int) for token_id in token_ids):
        return None
    return tuple(dict.fromkeys(token_ids))


def _unreachable(base_url: str, reason: object) -> EndpointError:
    return EndpointError(f"{base_url} cannot be reached ({reason}); is the server running?")
