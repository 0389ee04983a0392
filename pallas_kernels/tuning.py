"""Sizes that kernels take where nothing was asked for: what was quickest on a kind of device.

`tuned.json` is written on real devices by the project's kernel benchmark. It is a tree:
{device kind: {kernel: {size: value}}}.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from pallas_kernels import backends

TUNED = Path(__file__).with_name("tuned.json")


def tuned(kernel: str, size: str, default: int) -> int:
    """The value for the target device, `default` where none was measured."""
    _, device_kind, _ = backends.target()
    return table().get(device_kind, {}).get(kernel, {}).get(size, default)


@functools.cache
def table() -> dict[str, dict[str, dict[str, int]]]:
    """Contents of `tuned.json`."""
    return json.loads(TUNED.read_text())
