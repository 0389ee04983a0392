"""Token usage of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.core.requests.outputs import Delta, RequestOutput
from jaxserve.engine.prompts import TokenizedPrompt


def usage(outputs: Sequence[RequestOutput], dropped: bool = False) -> dict[str, Any]:
    """OpenAI's `usage`, over the outputs of a response.

    `dropped` means that generated tokens are not part of the response.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    completion = 0 if dropped else generated
    cached = sum(output.metrics.cached_tokens for output in outputs)
    return _counts(prompt, completion) | {"prompt_tokens_details": {"cached_tokens": cached}}


def num_tokens(usage: Mapping[str, Any]) -> tuple[Any, Any]:
    """Tokens of the prompt and of the output in a response's `usage`, by the names that chats or
    responses have for them. Raises KeyError if there are none."""
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["output_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


class StreamUsage:
    """The `usage` of the chunks of one stream, as `stream_options` asks for it."""

    def __init__(
        self,
        prompts: Sequence[TokenizedPrompt],
        include: bool,
        continuous: bool,
        dropped: bool = False,
    ) -> None:
        """`include` adds `usage` to each chunk: null, or the counts so far if `continuous`.
        `dropped` is as in `usage`."""
        self._include = include
        self._continuous = continuous
        self._dropped = dropped
        self._prompt = sum(len(prompt.token_ids) for prompt in prompts)
        self._completion = 0

    def count(self, delta: Delta) -> None:
        """Add the new tokens of a sequence."""
        self._completion += 0 if self._dropped else len(delta.token_ids)

    @property
    def of_chunk(self) -> dict[str, Any]:
        """The fields to add to a chunk."""
        if not self._include:
            return {}
        return {"usage": _counts(self._prompt, self._completion) if self._continuous else None}


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
