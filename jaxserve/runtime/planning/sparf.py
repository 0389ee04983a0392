"""What a decode reads of KV on the host with SparF (InstInfer, 2409.04992; SparQ, 2312.04985).

Sizes only; `runtime/programs/host_kv/sparf_step.py` computes with them.
"""

from __future__ import annotations

import dataclasses


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

    def read_bytes(self, tokens: int) -> int:
        """What a decode after so many tokens on the host reads there; of full attention it would be
        keys and values of all of them."""
        numbers = tokens * self.components + 2 * min(self.selected, tokens) * self.head_dim
        return self.num_layers * self.kv_heads * numbers * self.itemsize
