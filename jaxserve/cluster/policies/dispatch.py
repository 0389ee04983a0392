"""Which replica a request is dispatched to: by the prefixes it has cached, and by its freeness.

Virtual usage and freeness are those of Llumnix (Sun et al., OSDI 2024): a replica's freeness is the
number of steps until its pool is full, if each sequence grows by a token a step, here in pages. It
counts all waiting requests and not only the first. As there, requests of a high priority have
headroom in it: pages that count as used and are not, so that few others run beside them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Self

from jaxserve.cluster.policies.incoming_kv import IncomingKV
from jaxserve.cluster.policies.prefixes import CachedPrefixes, num_leading
from jaxserve.core.arithmetic import cdiv
from jaxserve.core.cluster_status import Role

HEADROOM = 0.5
"""The share of a replica's pages that is left free, while others have room, for all requests of a
high priority there. A step then reads little KV beside theirs."""


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a request takes of a replica.

    Attributes:
        hashes: of the full pages of its prompt, see `page_hashes`.
        num_tail: tokens of its prompt after those pages and `num_unhashed`.
        num_sequences: its samples, each of which has its own pages after those of the prompt.
        num_output: tokens that it has generated, of all samples.
        priority: lower ones run first; below 0, the default, it is high.
        num_unhashed: full pages of its prompt that its samples alone share: without a prefix cache.
    """

    hashes: tuple[bytes, ...]
    num_tail: int
    num_sequences: int = 1
    num_output: int = 0
    priority: int = 0
    num_unhashed: int = 0

    @classmethod
    def of(
        cls,
        num_tokens: int,
        hashes: tuple[bytes, ...] | None,
        page_size: int,
        num_sequences: int = 1,
        priority: int = 0,
    ) -> Self:
        """That of a prompt of `num_tokens` whose full pages have `hashes`; None without a prefix
        cache."""
        num_full, num_tail = divmod(num_tokens, page_size)
        num_unhashed = num_full if hashes is None else 0
        return cls(hashes or (), num_tail, num_sequences, 0, priority, num_unhashed)

    def grown(self, num_tokens: int) -> Demand:
        """The demand after `num_tokens` more tokens."""
        return dataclasses.replace(self, num_output=self.num_output + num_tokens)

    def own_pages(self, page_size: int) -> int:
        """Pages beyond those of `hashes`."""
        length = self.num_tail + cdiv(self.num_output, self.num_sequences)
        return self.num_unhashed + self.num_sequences * max(1, cdiv(length, page_size))

    def num_pages(self, page_size: int) -> int:
        """All pages that it needs."""
        return len(self.hashes) + self.own_pages(page_size)


class ReplicaLoad:
    """The requests of one replica, as its router counts them.

    Attributes:
        role: what it is for; where there is no other, it serves requests from first to last.
        draining: no request is dispatched to it; it ends, or has not begun yet.
        cached: the prefixes that it has cached.
        demands: of its requests, in the order in which they came.
        num_moving: those of its requests whose KV is being copied to others.
        num_pulled: prefixes that are being copied from it to others.
        incoming_kv: the KV that others send it.
    """

    def __init__(
        self, num_pages: int, page_size: int, max_num_seqs: int, role: Role = "any"
    ) -> None:
        """`num_pages` are those of its pool, `max_num_seqs` its maximum of running sequences."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.role = role
        self.draining = False
        self.cached = CachedPrefixes(num_pages)
        self.incoming_kv = IncomingKV(num_pages)
        self.num_sequences = self.num_moving = self.num_pulled = 0
        self.demands: dict[Hashable, Demand] = {}
        self._shared: Counter[bytes] = Counter()
        self._own_pages = 0
        self._num_high = 0

    def add(self, key: Hashable, demand: Demand) -> None:
        """A request is dispatched to it."""
        self.demands[key] = demand
        self._shared.update(demand.hashes)
        self._own_pages += demand.own_pages(self.page_size)
        self._num_high += demand.priority < 0
        self.num_sequences += demand.num_sequences
        self.cached.add(demand.hashes)

    def grow(self, key: Hashable, num_tokens: int) -> None:
        """Its request has generated more tokens."""
        before = self.demands[key]
        after = self.demands[key] = before.grown(num_tokens)
        self._own_pages += after.own_pages(self.page_size) - before.own_pages(self.page_size)

    def remove(self, key: Hashable) -> None:
        """Its request has ended."""
        demand = self.demands.pop(key)
        for page in demand.hashes:
            if self._shared[page] > 1:
                self._shared[page] -= 1
            else:
                del self._shared[page]
        self._own_pages -= demand.own_pages(self.page_size)
        self._num_high -= demand.priority < 0
        self.num_sequences -= demand.num_sequences

    @property
    def num_used_pages(self) -> int:
        """Pages of all its requests, shared ones once."""
        return len(self._shared) + self._own_pages

    @property
    def num_pages_to_move(self) -> int:
        """Pages of all its requests where they share none."""
        hashes = sum(len(demand.hashes) for demand in self.demands.values())
        return hashes + self._own_pages

    def virtual_usage(self, more: Demand | None = None) -> float:
        """Used pages and those of `more`, with the headroom of high priorities; infinite while it
        drains."""
        high = self._num_high + (more is not None and more.priority < 0)
        return self._usage(more) + (HEADROOM * self.num_pages if high else 0)

    def _usage(self, more: Demand | None) -> float:
        if self.draining:
            return math.inf
        usage = self.num_used_pages
        if more is not None:
            num_shared = num_leading(more.hashes, self._shared)
            usage += more.num_pages(self.page_size) - num_shared
        return usage

    def freeness(self, more: Demand | None = None) -> float:
        """Pages that each of its sequences, and those of `more`, may grow by; negative when more
        are needed than there are."""
        num_sequences = self.num_sequences + (0 if more is None else more.num_sequences)
        return (self.num_pages - self.virtual_usage(more)) / max(1, num_sequences)

    def has_room(self, more: Demand) -> bool:
        """Whether it runs a request at once, and does not have it wait."""
        num_sequences = self.num_sequences + more.num_sequences
        return num_sequences <= self.max_num_seqs and self._usage(more) <= self.num_pages

    def uncached_pages(self, demand: Demand) -> int:
        """Full pages of a prompt that it has to compute."""
        return len(demand.hashes) - self.cached.match(demand.hashes)


def dispatch(loads: Sequence[ReplicaLoad], demand: Demand) -> int | None:
    """The index of the replica that should get a request; None while all of them drain.

    Of those with room for it, first of those where that leaves the headroom of high priorities, the
    one with the fewest pages in use and to compute: a cached prefix attracts requests until the
    pages of those it attracted outweigh it. When none has room, the one with the highest freeness.
    Equal ones by their sequences, then by index. One that only decodes gets it where no other is
    ready.
    """

    def rank(index: int) -> Iterable[float]:
        load = loads[index]
        if load.has_room(demand):
            usage = load.virtual_usage(demand)
            cost = usage + load.uncached_pages(demand)
            return usage > load.num_pages, cost, load.num_sequences, index
        return 2, -load.freeness(demand), load.num_sequences, index

    ready = [index for index, load in enumerate(loads) if not load.draining]
    prefilling = [index for index in ready if loads[index].role != "decode"]
    return min(prefilling or ready, key=rank, default=None)
