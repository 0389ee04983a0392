"""Integer arithmetic."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """`a` divided by `b`, rounded up."""
    return -(-a // b)
