"""How many pages must be free for a sequence to be admitted, and how many sequences that makes."""

from __future__ import annotations

import dataclasses
import math

from jaxserve.engine.policies import POLICIES
from jaxserve.engine.scheduler_config import SchedulerConfig


@dataclasses.dataclass(frozen=True)
class AdmissionRule:
    """A scheduler's rule for a pool of `capacity` pages of `page_size` tokens.

    watermark_pages: pages that an admission leaves free for sequences that run already and grow.
    """

    capacity: int
    page_size: int
    max_num_seqs: int
    reserves: bool
    watermark_pages: int

    @classmethod
    def of(cls, config: SchedulerConfig, capacity: int, page_size: int) -> AdmissionRule:
        return cls(
            capacity=capacity,
            page_size=page_size,
            max_num_seqs=config.max_num_seqs,
            reserves=POLICIES[config.policy].pages == "reserve",
            # At least one page, so that a preempted sequence does not return into a full pool.
            watermark_pages=max(1, math.ceil(config.watermark * capacity)),
        )

    def margin(self, num_running: int) -> int:
        """Pages that must be left free by an admission beside `num_running` sequences."""
        return 0 if self.reserves or not num_running else self.watermark_pages

    def pages(self, num_tokens: int, kv_limit: int) -> int:
        """Pages that a sequence of `num_tokens` tokens takes when it is admitted, the KV of which
        will be of `kv_limit` tokens at most."""
        return -(-(kv_limit if self.reserves else num_tokens) // self.page_size)

    def num_at_once(self, num_tokens: int) -> int:
        """Requests of `num_tokens` tokens that run at once, having no beginning in common.

        The tokens are those of a prompt and one more, whose KV is not needed. With "grow", requests
        whose prompts are a smaller part of their tokens are admitted in greater number, and some
        of them preempted as they grow.
        """
        pages = self.pages(num_tokens - 1, num_tokens - 1)
        if pages > self.capacity:
            return 0
        others = max(0, self.capacity - pages - self.margin(1)) // pages
        return min(1 + others, self.max_num_seqs)
