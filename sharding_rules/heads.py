"""Attention heads on `tensor` ranks that do not divide them: replication and padding."""

from __future__ import annotations

import dataclasses

import numpy as np


def pad_to(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """How the heads of an attention layer are split over `tensor` ranks, the same number on each.

    Query head h of the model reads its KV head `h // (num_heads // num_kv_heads)`. The layout has
    `kv_heads` KV heads, each read by `group` query heads; rank r holds the r-th part of them. With
    enough ranks, KV heads are replicated `copies` times and their query heads split over the
    copies; zeros pad the rest. The layout has the fewest KV heads per rank, which are memory and
    what decode reads, and then the fewest query heads. If the degree divides the KV heads, the
    layout is the model's own.

    Raises ValueError when KV heads do not divide the query heads.
    """

    num_heads: int
    num_kv_heads: int
    tensor: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads do not divide by {self.num_kv_heads} KV heads."
            )
        if self.tensor < 1:
            raise ValueError(f"the tensor degree is {self.tensor}; it must be at least 1.")

    @property
    def kv_heads(self) -> int:
        """KV heads on all ranks, copies and zeros included."""
        return pad_to(self.num_kv_heads, self.tensor)

    @property
    def group(self) -> int:
        """Query heads that read each of `kv_heads`, zeros included."""
        room = self.kv_heads // self.num_kv_heads
        return -(-self._queries_per_kv // room)

    @property
    def copies(self) -> int:
        """Number of copies of each KV head of the model. No rank holds one twice."""
        return -(-self._queries_per_kv // self.group)

    @property
    def _queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    def queries(self) -> np.ndarray:
        """[kv_heads, group] The model's query head in each place, -1 for zeros.

        Each query head is in one place, which reads its KV head.
        """
        heads = np.full((self.num_kv_heads, self.copies * self.group), -1)
        per_kv = self._queries_per_kv
        heads[:, :per_kv] = np.arange(self.num_heads).reshape(-1, per_kv)
        return self._padded(heads.reshape(-1, self.group))

    def keys(self) -> np.ndarray:
        """[kv_heads] The model's KV head in each place, -1 for zeros."""
        return self._padded(np.repeat(np.arange(self.num_kv_heads), self.copies))

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        """`rows`, followed by -1 up to `kv_heads`."""
        fill = np.full((self.kv_heads - len(rows), *rows.shape[1:]), -1)
        return np.concatenate([rows, fill])
