"""When replicas are added and removed: by the freeness of all of them, as Llumnix does.

Llumnix (Sun et al., OSDI 2024) keeps the average freeness of the instances between two thresholds.
Here it is that of an average sequence: free pages of all pools by all sequences, so that one idle
replica does not hide that others are full. A replica is removed only if the others, with its
requests, stay above the higher threshold: on a static load nothing is added after a removal, and
nothing is removed after an addition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Literal

from jaxserve.cluster.policies.dispatch import ReplicaLoad
from jaxserve.core.errors import ConfigError

SCALE_LOW_FREENESS = 2.0
"""A replica is added when sequences may grow by fewer pages each, or more of them than run wait."""

SCALE_HIGH_FREENESS = 6.0
"""One is removed if sequences may grow by so many pages each without it."""

HIGH_SLOTS = 0.75
"""One is removed if the others then run all sequences with this share of their slots."""

ADD_AFTER_S = 2.0
REMOVE_AFTER_S = 30.0
"""How long the condition must hold: a replica takes long to load, and bursts come again."""


@dataclasses.dataclass(frozen=True)
class Removal:
    """The index of the replica that drains, and then ends."""

    replica: int


def check_bounds(min_replicas: int | None, max_replicas: int | None) -> None:
    """Raises ConfigError for bounds of the number of replicas that leave no number. Without
    `max_replicas` that number is fixed."""
    if max_replicas is None:
        if min_replicas is not None:
            raise ConfigError(
                f"min_replicas is {min_replicas}, but max_replicas is missing; add it, or leave "
                "both out for a fixed number of replicas."
            )
    elif not 1 <= (min_replicas or 1) <= max_replicas:
        raise ConfigError(
            f"min_replicas is {min_replicas or 1} and max_replicas {max_replicas}; the first must "
            "be 1 or more, and the second no smaller."
        )


class Autoscaler:
    """Decides about one replica at a time.

    Attributes:
        min_replicas, max_replicas: how many there may be.
    """

    def __init__(
        self,
        min_replicas: int,
        max_replicas: int,
        add_after_s: float = ADD_AFTER_S,
        remove_after_s: float = REMOVE_AFTER_S,
    ) -> None:
        self.min_replicas = min_replicas
        self.max_replicas = max_replicas
        self._after_s = {"add": add_after_s, "remove": remove_after_s}
        self._wanted: Literal["add", "remove"] | None = None
        self._since_s = 0.0

    def decide(self, loads: Sequence[ReplicaLoad], now_s: float) -> Literal["add"] | Removal | None:
        """What to do now, if anything. `now_s` is of any clock. While a replica is loaded or
        drains nothing is done, and time counts from then on."""
        wanted = self._desired(loads)
        if wanted != self._wanted:
            self._wanted, self._since_s = wanted, now_s
        if wanted is None or now_s - self._since_s < self._after_s[wanted]:
            return None
        self._wanted = None
        return "add" if wanted == "add" else Removal(_least_used(loads))

    @staticmethod
    def are_full(loads: Collection[ReplicaLoad]) -> bool:
        """Whether these need another replica."""
        fills_up = _freeness(loads, loads) < SCALE_LOW_FREENESS
        return fills_up or _num_sequences(loads) > _num_slots(loads)

    def _desired(self, loads: Sequence[ReplicaLoad]) -> Literal["add", "remove"] | None:
        if any(load.draining for load in loads):
            return None
        if len(loads) < self.min_replicas:
            return "add"
        if len(loads) < self.max_replicas and self.are_full(loads):
            return "add"
        if len(loads) > self.min_replicas and _can_do_without(loads, loads[_least_used(loads)]):
            return "remove"
        return None


def _can_do_without(loads: Collection[ReplicaLoad], load: ReplicaLoad) -> bool:
    others = [each for each in loads if each is not load]
    runs = _num_sequences(loads) <= HIGH_SLOTS * _num_slots(others)
    return runs and _freeness(others, loads, load.num_pages_to_move) >= SCALE_HIGH_FREENESS


def _freeness(
    pools: Collection[ReplicaLoad], loads: Collection[ReplicaLoad], num_more: int = 0
) -> float:
    """Pages that each sequence of `loads` may grow by, with `num_more` pages of the pools used."""
    num_free = sum(pool.num_pages - pool.num_used_pages for pool in pools) - num_more
    return num_free / max(1, _num_sequences(loads))


def _num_sequences(loads: Collection[ReplicaLoad]) -> int:
    return sum(load.num_sequences for load in loads)


def _num_slots(loads: Collection[ReplicaLoad]) -> int:
    return sum(load.max_num_seqs for load in loads)


def _least_used(loads: Sequence[ReplicaLoad]) -> int:
    """The one that drains soonest."""
    return min(range(len(loads)), key=lambda index: (loads[index].num_sequences, -index))
