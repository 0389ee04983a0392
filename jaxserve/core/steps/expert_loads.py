"""How the tokens of steps are spread over experts, as plain data."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class ExpertLoads:
    """Tokens of steps so far that took each expert, int64 [sparse layers, experts]: those that were
    computed, drafts and recomputed tokens included."""

    tokens: np.ndarray

    @classmethod
    def of(cls, num_layers: int, num_experts: int) -> ExpertLoads:
        return cls(np.zeros((num_layers, num_experts), np.int64))

    def add(self, counts: np.ndarray) -> None:
        """The counts of one step."""
        self.tokens += counts

    @property
    def by_expert(self) -> list[int]:
        """Tokens of each expert, over all layers."""
        return self.tokens.sum(axis=0).tolist()

    @property
    def balancedness(self) -> float:
        """Tokens of an average expert by those of the most loaded one, the mean over layers, 0..1;
        1 is even, and what there is before any token."""
        most = self.tokens.max(axis=1)
        return float(np.where(most > 0, self.tokens.mean(axis=1) / np.maximum(most, 1), 1).mean())
