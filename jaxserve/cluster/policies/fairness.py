"""A fair share for each tenant of all replicas, and not of each alone.

The counters are those of the virtual token counter (Sheng et al., OSDI 2024, see `FairQueue`), of
what a tenant was served by all replicas. The queue of a replica orders tenants by these counters,
as of the last exchange, and by what it has served since.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

Tenant = str | None


class FairShares:
    """Counters of all replicas together.

    Attributes:
        counters: tokens that each tenant was served, as a queue counts them, by tenant.
    """

    def __init__(self) -> None:
        self.counters: dict[Tenant, int] = {}
        self._waiting: dict[Hashable, frozenset[Tenant]] = {}
        self._level = 0

    def exchange(
        self, replica: Hashable, served: Mapping[Tenant, int], waiting: Collection[Tenant]
    ) -> None:
        """Takes what a replica has served to each tenant since the last time, and the tenants that
        wait there. One that waits nowhere else is lifted to the lowest counter of those that wait,
        so that idle time earns no credit."""
        for tenant, amount in served.items():
            self.counters[tenant] = self.counters.get(tenant, 0) + amount
        before = frozenset().union(*self._waiting.values())
        self._waiting[replica] = frozenset(waiting)
        known = [self.counters[each] for each in before if self.counters.get(each)]
        self._level = max(self._level, min(known, default=0))
        for tenant in self._waiting[replica] - before:
            self.counters[tenant] = max(self.counters.get(tenant, 0), self._level)
        waits = frozenset().union(*self._waiting.values())
        self.counters = {
            tenant: counter
            for tenant, counter in self.counters.items()
            if tenant in waits or counter > self._level
        }

    def keep(self, replicas: Collection[Hashable]) -> None:
        """Forgets the waiting tenants of all other replicas, which were lost or removed."""
        self._waiting = {each: self._waiting[each] for each in self._waiting.keys() & replicas}
