"""Tiers of KV pages below the device: host memory and disk, and transfers to and from them."""
