"""When a replica takes a prefix that another one has cached, and does not compute it again.

Together the prefix caches of the replicas are one store, as in Mooncake (Qin et al., FAST 2025): a
request goes where dispatch sends it, and the pages that only another replica has come after it when
that takes less time than computing them. Both times are measured: that of computing by the engine
that would compute, that of pulling here, of the pulls that were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.cluster.policies.dispatch import Demand, ReplicaLoad
from jaxserve.kv.offload.rates import LinearCost

MAX_PULLS = 4
"""Prefixes that leave one replica at a time: each lies in memory meanwhile."""

RETRY = 64
"""One of so many pulls is made although predicted slower: what they take may have changed."""


class Pull(NamedTuple):
    """The replica that has a prefix, by its index; the pages of it, from the first of the prompt
    on; and how many of these its destination has itself."""

    source: int
    num_pages: int
    num_cached: int

    def span(self, page_size: int) -> tuple[int, int]:
        """The tokens that its destination lacks, from the first to before the second."""
        return self.num_cached * page_size, self.num_pages * page_size


def plan_pull(loads: Sequence[ReplicaLoad], destination: int, demand: Demand) -> Pull | None:
    """The pull of the longest prefix of a request that a replica other than its `destination` has
    cached, if that is longer than its own; of equal ones from the replica with the fewest
    sequences. None if that one is busy with `MAX_PULLS`, or the destination with other KV that
    comes. Plan it before the request counts there."""
    num_cached = loads[destination].cached.match(demand.hashes)
    matched = [
        (load.cached.match(demand.hashes), -load.num_sequences, -index)
        for index, load in enumerate(loads)
        if index != destination and not load.draining
    ]
    num_pages, _, index = max(matched, default=(0, 0, 0))
    if num_pages <= num_cached or loads[-index].num_pulled >= MAX_PULLS:
        return None
    if not loads[destination].incoming_kv.has_room(num_pages):
        return None
    return Pull(-index, num_pages, num_cached)


class Pulls:
    """What pulls take, learned from those that were made: a time, and more for each page.

    Attributes:
        num_tokens: that they brought, beyond those that their destinations had.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._cost = LinearCost()
        self._to_skip = 0
        self._num_refused = 0

    def pays(self, num_pages: int, compute_us: int | None) -> bool:
        """Whether to pull `num_pages`, where computing what is missing takes `compute_us`, or is
        not known. While no pull was measured, one is made."""
        if self._to_skip:
            self._to_skip -= 1
            return False
        if not self._cost.known or compute_us is None:
            return True
        if self._cost.predict(num_pages, 1) < compute_us:
            return True
        self._num_refused += 1
        return self._num_refused % RETRY == 0

    def pulled(self, pull: Pull, num_tokens: int, page_size: int, us: int) -> None:
        """A pull took `us`, and its destination has the first `num_tokens` now. They are no more
        than before if the source has evicted them, or there was no room."""
        start, _ = pull.span(page_size)
        if num_tokens > start:
            self._cost.observe(num_tokens // page_size, 1, us)
            self.num_tokens += num_tokens - start

    def failed(self) -> None:
        """A pull failed: the next ones are left out."""
        self._to_skip = RETRY - 1
