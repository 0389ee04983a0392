"""What KV takes."""

from __future__ import annotations

from jaxserve.core.model_config import ModelConfig


def bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one token's keys and values over all layers."""
    return itemsize * sum(spec.elements for spec in config.kv_specs)
