"""Where a KV page is."""

from __future__ import annotations

import enum


class Tier(enum.Enum):
    """Memory tiers that can hold a page, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
