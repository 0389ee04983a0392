"""Admission: pages needed per sequence, and sequences that fit a pool."""

from __future__ import annotations

import dataclasses
import math

from jaxserve.core.errors import PromptTooLongError, RequestError
from jaxserve.core.sequence import Sequence
from jaxserve.kv.host_pages import HostKV
from jaxserve.kv.layout import KVLayout
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.policies import POLICIES


@dataclasses.dataclass(frozen=True)
class AdmissionRule:
    """A scheduler's rule for a pool of `capacity` pages.

    watermark_pages: pages that an admission leaves free for running sequences to grow into.
    """

    capacity: int
    layout: KVLayout
    max_num_seqs: int
    reserves: bool
    watermark_pages: int
    host_kv: HostKV | None = None
    """For sequences longer than the pool; None refuses these."""

    @classmethod
    def of(
        cls,
        config: SchedulerConfig,
        capacity: int,
        layout: KVLayout,
        host_kv: HostKV | None = None,
    ) -> AdmissionRule:
        return cls(
            capacity=capacity,
            layout=layout,
            max_num_seqs=config.max_num_seqs,
            reserves=POLICIES[config.policy].pages == "reserve",
            watermark_pages=_watermark_pages(config.watermark, capacity),
            host_kv=host_kv,
        )

    def margin(self, num_running: int) -> int:
        """Pages that an admission must leave free while `num_running` sequences run."""
        return 0 if self.reserves or not num_running else self.watermark_pages

    def tokens(self, num_tokens: int, kv_limit: int) -> int:
        """Tokens whose pages are allocated on admission of a sequence of `num_tokens` tokens, whose
        KV will have at most `kv_limit` tokens."""
        return kv_limit if self.reserves else num_tokens

    def num_at_once(self, num_tokens: int) -> int:
        """Maximum concurrency of requests of `num_tokens` tokens without a common prefix.

        The tokens are those of a prompt and one more, whose KV is not needed. With "grow", requests
        with shorter prompts and longer outputs are admitted in greater number, and some of them
        preempted as they grow.
        """
        pages, most = self.layout.pages_for(num_tokens - 1), self.max_num_seqs
        if self.host_kv is not None:
            pages = self.host_kv.in_pool(num_tokens - 1)
            if on_host := self.host_kv.on_host(num_tokens - 1):
                most = min(most, self.host_kv.num_pages // on_host)
        if pages > self.capacity or not most:
            return 0
        others = max(0, self.capacity - pages - self.margin(1)) // pages
        return min(1 + others, most)


def _watermark_pages(watermark: float, capacity: int) -> int:
    """At least one page, so that a preempted sequence does not resume into a full pool."""
    return max(1, math.ceil(watermark * capacity))


def capacity_beside_watermark(num_pages: int, watermark: float = SchedulerConfig.watermark) -> int:
    """Capacity in pages of a pool in which sequences may take `num_pages` beside the watermark."""
    return num_pages + _watermark_pages(watermark / (1 - watermark), num_pages)


def kv_limit(
    seq: Sequence,
    max_model_len: int,
    capacity: int,
    layout: KVLayout,
    host_kv: HostKV | None = None,
) -> int:
    """Maximum number of tokens whose KV a sequence needs, as in `Sequence.kv_limit`.

    Raises RequestError for an empty prompt, PromptTooLongError for one that leaves no room in the
    context or that, with its `max_tokens`, can never fit a pool of `capacity` pages, nor one
    with `host_kv` beside it.
    """
    length = seq.num_prompt
    if not length:
        raise RequestError("the prompt has no tokens; it needs at least one")
    if length >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {length} tokens and the context limit is {max_model_len}; "
            f"shorten it to at most {max_model_len - 1}"
        )
    room = max_model_len - length
    pool_tokens = most_tokens = layout.longest(capacity, max_model_len)
    if host_kv is not None:
        most_tokens = host_kv.longest(max_model_len)
    wanted = seq.params.max_tokens
    if wanted is None:  # Up to the context limit, or to the pool's capacity if that is smaller.
        within = pool_tokens if length <= pool_tokens else most_tokens
        wanted = max(1, within + 1 - length)
    max_tokens = min(wanted, room)
    limit = length + max_tokens - 1
    pages = layout.pages_for(limit)
    fits = pages <= capacity if host_kv is None else host_kv.on_host(limit) <= host_kv.num_pages
    if not fits:
        beside = ""
        if host_kv is not None:
            beside = (
                f", of which a longer request has {host_kv.in_pool(limit)}, beside up to "
                f"{host_kv.num_pages} on the host (host_kv_bytes)"
            )
        raise PromptTooLongError(
            f"a prompt of {length} tokens with max_tokens {max_tokens} needs {pages} KV pages "
            f"and the pool has {capacity}{beside}; prompt and max_tokens may add up to "
            f"{most_tokens + 1} tokens"
        )
    return limit
