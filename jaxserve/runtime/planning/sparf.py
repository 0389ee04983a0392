"""What a decode reads of KV on the host with SparF (InstInfer, 2409.04992; SparQ, 2312.04985).

Sizes only; `runtime/programs/host_kv/sparf_step.py` computes with them.
"""

from __future__ import annotations

import dataclasses
from typing import Self

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig


@dataclasses.dataclass(frozen=True)
class SparFSizes:
    """Of `num_layers` layers, each `kv_heads` heads of `head_dim` features of `itemsize` bytes: the
    host reads `components` features of the keys of all tokens, and `selected` tokens whole."""

    num_layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    components: int
    selected: int

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, itemsize: int) -> Self:
        """Of a resolved `config`, and a partitioned model, whose heads the host has all of."""
        pages = cdiv(config.max_model_len, config.page_size)
        return cls(
            num_layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            itemsize=itemsize,
            components=min(config.sparf_components, model.head_dim),
            selected=min(config.sparf_budget, pages * config.page_size),
        )

    def read_bytes(self, tokens: int) -> int:
        """What a decode after so many tokens on the host reads there; of full attention it would be
        keys and values of all of them."""
        numbers = tokens * self.components + 2 * min(self.selected, tokens) * self.head_dim
        return self.num_layers * self.kv_heads * numbers * self.itemsize
