"""How many tokens an answer took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.outputs import RequestOutput


def usage(outputs: Sequence[RequestOutput], dropped: bool = False) -> dict[str, Any]:
    """OpenAI's `usage` of the requests that an answer is made of.

    `dropped` says that what was generated is not part of the answer.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    completion = 0 if dropped else generated
    cached = sum(output.metrics.cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
