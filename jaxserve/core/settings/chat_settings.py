"""Settings of chats."""

from __future__ import annotations

import dataclasses
from typing import Literal

ReasoningParser = Literal["auto", "none", "deepseek_r1", "glm45", "olmo3", "openai_gptoss", "qwen3"]
"""vLLM's names of models that mark reasoning by `<think>` and `</think>`, or by channels (gpt-oss);
"auto" looks for these marks in the chat template."""


@dataclasses.dataclass(frozen=True)
class ChatSettings:
    """How a server chats. `trust_request_chat_template` lets requests bring a chat template."""

    reasoning_parser: ReasoningParser = "auto"
    trust_request_chat_template: bool = False
