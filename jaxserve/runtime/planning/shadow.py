"""What compressed KV of sequences longer than the pool takes on the device (ShadowKV, 2410.21465).

Sizes only; `runtime/programs/host_kv/shadow_step.py` computes with them.
"""

from __future__ import annotations

import dataclasses
from typing import Self

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig

CHUNK = 8
"""Tokens of a chunk, which are recalled together. Accuracy falls for more (2410.21465)."""


@dataclasses.dataclass(frozen=True)
class ShadowSizes:
    """Of `num_layers` layers, each `kv_heads` heads of `head_dim` features of `itemsize` bytes.

    A page on the host has `page_size` tokens, whose keys are `rank` numbers each on the device, and
    a mean key for each chunk and head. Each of `slots` sequences has a basis, `outliers` chunks
    with their keys and values, and the values of the `recalled` chunks that a decode attends to.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    page_size: int
    slots: int
    rank: int
    recalled: int
    outliers: int

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, itemsize: int) -> Self:
        """Of a resolved `config`, and the part of the model that one device has."""
        chunks = cdiv(config.max_model_len, config.page_size) * config.page_size // CHUNK
        return cls(
            num_layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            itemsize=itemsize,
            page_size=config.page_size,
            slots=config.max_num_seqs,
            rank=min(config.shadow_rank, model.num_kv_heads * model.head_dim),
            recalled=min(config.shadow_budget // CHUNK, chunks),
            outliers=min(config.shadow_outliers, chunks),
        )

    @property
    def width(self) -> int:
        """Numbers of a token's key or value, of all heads."""
        return self.kv_heads * self.head_dim

    @property
    def page_chunks(self) -> int:
        return self.page_size // CHUNK

    @property
    def chunk_bytes(self) -> int:
        """Values of a chunk, of one head of a layer."""
        return CHUNK * self.head_dim * self.itemsize

    def most_recalled_bytes(self, pages: int) -> int:
        """Values that a decode of a sequence with so many host pages copies to the device, if it
        attends to none of the chunks that the decode before did."""
        chunks = max(0, pages * self.page_chunks - self.outliers)
        return self.num_layers * self.kv_heads * min(self.recalled, chunks) * self.chunk_bytes

    @property
    def page_bytes(self) -> int:
        """Device memory for a host page, of all layers."""
        numbers = self.page_size * self.rank + self.page_chunks * self.width
        return self.num_layers * numbers * self.itemsize

    @property
    def slot_bytes(self) -> int:
        """Device memory for a sequence, of all layers: basis, outliers, and recalled values."""
        tokens = (2 * self.outliers + self.recalled) * CHUNK
        numbers = (self.rank + tokens) * self.width
        return self.num_layers * (numbers * self.itemsize + 4 * self.outliers)

    def device_bytes(self, host_pages: int) -> int:
        """Device memory with so many host pages; one more and a slot more are for padding."""
        return (host_pages + 1) * self.page_bytes + (self.slots + 1) * self.slot_bytes
