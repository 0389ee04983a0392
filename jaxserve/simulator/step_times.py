"""How long the devices take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.work import causal_pairs
from jaxserve.scheduler.decode_groups import PrefixCost


class StepTimes(Protocol):
    """The time of each operation on the devices, in seconds."""

    def step(self, key: ProgramKey, plans: Sequence[StepPlan]) -> float:
        """Time of one dispatch of program `key`, which runs all of `plans` together: one, or with
        pipeline stages one per stage, some of them empty."""

    def copy(self, num_pages: int) -> float:
        """Time of reading and writing so many KV pages on the device."""


@dataclasses.dataclass(frozen=True)
class PrefixSharing:
    """What decodes save that read their first pages together.

    Attributes:
        cost: what attention to a shared prefix costs, next to that of decodes alone.
        page_size: tokens of a page.
    """

    cost: PrefixCost
    page_size: int

    def saved(self, plan: StepPlan) -> float:
        """How many tokens less the decodes of a plan read, in a layer of full attention."""
        return sum(
            self.cost.gain(num_decodes, num_pages * self.page_size)
            for _, num_decodes, num_pages in plan.decode_groups
        )


@dataclasses.dataclass(frozen=True)
class LinearTimes:
    """A step takes `base_s`, `token_s` per token of its program, padding included, and `pair_s`
    per pair of a query and a key that it sees. Page copies take `page_s` a page.

    A dispatch of several plans takes as long as the plan with the most pairs.
    """

    base_s: float
    token_s: float
    pair_s: float = 0.0
    page_s: float = 0.0

    def step(self, key: ProgramKey, plans: Sequence[StepPlan]) -> float:
        pairs = max(map(num_pairs, plans)) if self.pair_s else 0
        return self.base_s + self.token_s * key.num_tokens + self.pair_s * pairs

    def copy(self, num_pages: int) -> float:
        return self.page_s * num_pages


def num_pairs(plan: StepPlan) -> int:
    """Pairs of a query and a key that it sees, in all chunks of a plan."""
    chunks = (*plan.decodes, *plan.prefills)
    return sum(causal_pairs(chunk.start, chunk.start + chunk.num_tokens) for chunk in chunks)
