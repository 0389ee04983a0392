"""Commands about what one process alone has, beside those that hosts exchange."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxserve.core.requests.lora import LoRARequest
from jaxserve.engine.request import Request

if TYPE_CHECKING:
    from jaxserve.runtime.adapters import StagedAdapter


@dataclasses.dataclass(frozen=True)
class Resume:
    """Queues a request that was built here, with the progress that another engine has made."""

    request: Request


@dataclasses.dataclass(frozen=True)
class Retract:
    """Reads every step in flight, takes pages and slots from all sequences, and clears the prefix
    cache on every tier. What was computed so far is not used again: sequences keep their tokens,
    and recompute the rest when they run."""


@dataclasses.dataclass(frozen=True)
class UseWeights:
    """Other weights make all tokens from now on: the next version."""


@dataclasses.dataclass(frozen=True)
class Sleep:
    """Retracts, and plans no step until `WakeUp`: the devices' memory is given back."""


@dataclasses.dataclass(frozen=True)
class WakeUp:
    """Ends `Sleep`: the memory is there again."""


@dataclasses.dataclass(frozen=True)
class LoadAdapter:
    """Loads an adapter, as `AdapterSlots.load`."""

    adapter: LoRARequest | StagedAdapter
    in_place: bool
    pinned: bool


@dataclasses.dataclass(frozen=True)
class UnloadAdapter:
    """Unloads an adapter. Its slot is free once the requests that use it have finished."""

    name: str


LocalCommand = Resume | Retract | UseWeights | Sleep | WakeUp | LoadAdapter | UnloadAdapter
