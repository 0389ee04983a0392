"""LoRA adapters (2106.09685) as requests name them, and as an engine holds them."""

from __future__ import annotations

import dataclasses

from jaxserve.core.errors import RequestError

DEFAULT_MAX_LORAS, DEFAULT_MAX_LORA_RANK = 4, 16
"""Of an engine with `enable_lora`."""


@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request uses: `path` is a directory that PEFT wrote, `name` what the
    engine calls it from then on.

    Raises RequestError unless both are non-empty texts; `path` may also be a Path.
    """

    name: str
    path: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _text("path", self.path))
        object.__setattr__(self, "name", _text("name", self.name))


def check_lora_request(request: object) -> None:
    """Raises RequestError for anything but a LoRARequest."""
    if not isinstance(request, LoRARequest):
        raise RequestError(f"lora_request is {request!r:.80}; it must be a LoRARequest.")


def _text(field: str, value: object) -> str:
    text = value if isinstance(value, str) else getattr(value, "__fspath__", lambda: None)()
    if not isinstance(text, str) or not text:
        raise RequestError(
            f"{field} of a LoRARequest is {value!r:.80}; write LoRARequest(name, path)."
        )
    return text


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter on the devices, in one of the slots 1 .. max_loras; 0 is for none.

    `digest` is of its contents. A `pinned` one stays until it is unloaded; others make room for
    the next when no request uses them.
    """

    request: LoRARequest
    slot: int
    digest: str
    pinned: bool = False
