"""Token usage of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.core.outputs import RequestOutput


def usage(outputs: Sequence[RequestOutput], dropped: bool = False) -> dict[str, Any]:
    """OpenAI's `usage`, over the outputs of a response.

    `dropped` means that generated tokens are not part of the response.
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
