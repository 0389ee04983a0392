"""Which layers stay in device memory, and which pass through a window of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.choices import WeightsOn

WINDOW = 2
"""Streamed layers in device memory at once: one computes while the next is read."""


@dataclasses.dataclass(frozen=True)
class LayerPlacement:
    """Where the layers are. Bytes are those of one device.

    `streamed` are the layers that pass through the window, ascending; all others stay.
    """

    tier: WeightsOn
    outside_bytes: int
    layer_bytes: tuple[int, ...]
    streamed: tuple[int, ...] = ()

    @property
    def window_bytes(self) -> int:
        return WINDOW * max(self.layer_bytes) if self.streamed else 0

    @property
    def streamed_bytes(self) -> int:
        """Bytes that every step reads."""
        return sum(self.layer_bytes[layer] for layer in self.streamed)

    @property
    def model_bytes(self) -> int:
        return self.outside_bytes + sum(self.layer_bytes)

    @property
    def device_bytes(self) -> int:
        """Device memory for weights: what stays, and the window."""
        return self.model_bytes - self.streamed_bytes + self.window_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory for what this device's steps read."""
        return self.streamed_bytes if self.tier == "host" else 0

    @property
    def disk_bytes(self) -> int:
        """Disk space for layers: all of them, so that one file serves every budget."""
        return sum(self.layer_bytes) if self.tier == "disk" and self.streamed else 0


def place(
    tier: WeightsOn, outside_bytes: int, layer_bytes: Sequence[int], budget: int | None
) -> LayerPlacement:
    """Decide which layers stay on the device.

    With a `budget` of bytes, as many as fit beside the rest and the window, spread evenly over the
    depth, so that reads alternate with layers that need none; without one, as few as possible.
    Raises ConfigError when the budget cannot hold a window.
    """
    placement = LayerPlacement(tier, outside_bytes, tuple(layer_bytes))
    count, largest = len(layer_bytes), max(layer_bytes)
    if tier == "device" or count <= WINDOW:
        return placement
    fitting = WINDOW
    if budget is not None:
        fitting = (budget - outside_bytes) // largest
        if fitting < WINDOW:
            least = outside_bytes + WINDOW * largest
            raise ConfigError(
                f"resident_weight_bytes is {budget}, but embeddings, final norm and head take "
                f"{outside_bytes} bytes and a window of {WINDOW} layers {WINDOW * largest}; set it "
                f"to at least {least}, or leave it out for just that."
            )
    if fitting >= count:
        return placement
    staying = fitting - WINDOW
    before = [layer * staying // count for layer in range(count + 1)]
    streamed = [layer for layer in range(count) if before[layer] == before[layer + 1]]
    return dataclasses.replace(placement, streamed=tuple(streamed))
