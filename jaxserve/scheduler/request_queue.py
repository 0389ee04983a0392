"""Waiting queues: in priority and arrival order, by urgency, or with a fair share per tenant.

All queues have the same interface:

- `add(seq)` when a sequence arrives and each time it is preempted, `remove(seq)` when it is
  admitted or finishes while waiting, `finished(seq)` once, when it finishes in any state, and
  `set_priority(seq, priority)` while it waits;
- iterate to admit. The caller removes a sequence that it admits, and charges its prefill, before
  it asks for the next; a sequence that it does not remove is skipped in this iteration.
- `charge(seq, prefill_tokens, decode_tokens)` for work done on it: at its first admission all
  tokens to be prefilled (cached ones are not), later each sampled token. Recomputation after a
  preemption is not charged.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.core.sequence import Sequence

DECODE_WEIGHT = 2
"""Cost of a sampled token relative to a prefilled one, as in the paper of `FairQueue`."""

_order = attrgetter("order")


class WaitingQueue:
    """Waiting sequences by `order`, regardless of tenant."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of admission; see above for what may happen between two."""
        index = 0
        while index < len(self._sequences):
            seq = self._sequences[index]
            yield seq
            if index < len(self._sequences) and self._sequences[index] is seq:
                index += 1

    def add(self, seq: Sequence) -> None:
        insort(self._sequences, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        """Raises ValueError when it is not waiting."""
        index = bisect_left(self._sequences, seq.order, key=_order)
        if index == len(self._sequences) or self._sequences[index] is not seq:
            raise ValueError(f"sequence {seq.seq_id} is not waiting")
        del self._sequences[index]

    def set_priority(self, seq: Sequence, priority: int) -> None:
        """Changes the priority of a waiting sequence and reorders it."""
        self.remove(seq)
        seq.set_priority(priority)
        self.add(seq)

    def charge(self, seq: Sequence, prefill_tokens: int, decode_tokens: int) -> None:
        """Does nothing: this queue has no fair shares."""

    def exchange(
        self, counters: Mapping[str | None, int]
    ) -> tuple[dict[str | None, int], list[str | None]]:
        """Nothing: this queue has no fair shares."""
        return {}, []

    def finished(self, seq: Sequence) -> None:
        """Does nothing: this queue has no fair shares."""


class SlackQueue(WaitingQueue):
    """Orders by urgency, most urgent first; urgency changes with time (`slack.py`).

    Prompts whose lengths are within a factor of two are in one class. Within a class the order is
    that of arrival, which nearly equals urgency order; across classes the heads are compared. So an
    iteration costs O(classes), some twenty, not O(waiting sequences).
    """

    def __init__(self, urgency: Callable[[Sequence], Any]) -> None:
        self._urgency = urgency
        self._classes: dict[int, WaitingQueue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of admission; see above for what may happen between two."""
        heads = []
        for waiting in self._classes.values():
            rest = iter(waiting)
            self._push_next(heads, rest)
        while heads:
            _, _, seq, rest = heapq.heappop(heads)
            yield seq
            self._push_next(heads, rest)

    def add(self, seq: Sequence) -> None:
        self._class_of(seq).add(seq)

    def remove(self, seq: Sequence) -> None:
        """Raises ValueError when it is not waiting."""
        self._class_of(seq).remove(seq)

    def _class_of(self, seq: Sequence) -> WaitingQueue:
        return self._classes.setdefault(seq.num_prompt.bit_length(), WaitingQueue())

    def _push_next(self, heads: list[tuple], rest: Iterator[Sequence]) -> None:
        for seq in rest:
            heapq.heappush(heads, (self._urgency(seq), seq.seq_id, seq, rest))
            break


class _Account:
    """One tenant's token counter and its unfinished sequences."""

    def __init__(self) -> None:
        self.counter = 0
        self.unshared = 0  # Of it, what was charged since the last exchange.
        self.is_new = True  # Nothing has been charged to it yet.
        self.waiting = WaitingQueue()
        self.unfinished: set[int] = set()  # Ids of its sequences, waiting or running.


class FairQueue:
    """Admits the tenant served least first: the virtual token counter of "Fairness in Serving Large
    Language Models" (Sheng et al., OSDI 2024, algorithm VTC).

    Each tenant has a counter of the tokens it was served, a prefilled one weighing 1 and a sampled
    one `DECODE_WEIGHT`. The next sequence is the first, by `order`, of the tenant with the lowest
    counter; ties go to the tenant whose sequence arrived first. Sequences without a tenant form one
    tenant.

    - A tenant's counter exceeds that of a waiting tenant only by the sequence it was admitted with
      and by its running sequences. So tenants that always have a backlog stay within one prompt
      and the output of one batch of each other, however many requests each sends.
    - A tenant that starts waiting is lifted to the lowest counter of the waiting tenants, or if
      there are none, to that of the last one: idle time earns no credit. A higher counter stays, so
      that leaving and returning does not reset it.
    - Priority is part of `order`, and so orders a tenant's own sequences. It has no effect across
      tenants, or every tenant would claim the highest.
    - No tenant starves: the others' counters rise as they are served until the waiting tenant has
      the lowest, and `order` is static. The paper's rule alone would let an endless series of
      tenants with one request each hold the lowest counter down. So tenants never served do not
      count towards it, and new tenants join at the counter of those served.

    A tenant is dropped when it has no unfinished sequence and would return at the lifted counter.
    Of several engines that serve the same tenants, `exchange` passes each what the others have
    served.
    """

    def __init__(self) -> None:
        self._accounts: dict[str | None, _Account] = {}
        self._waiting: dict[str | None, _Account] = {}  # Those with something waiting.
        self._last = _Account()  # The tenant that stopped waiting last.
        self._level = 0
        self._shared: Mapping[str | None, int] = {}  # The counters of the last exchange.
        self._num_waiting = 0
        self._sweep_at = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of admission; see above for what may happen between two.

        Costs O(tenants waiting) at the start and O(log of that) for each sequence asked for.
        """
        heads = []
        for account in self._waiting.values():
            rest = iter(account.waiting)
            heads.append(_head(account, next(rest), rest))
        heapq.heapify(heads)
        while heads:
            *_, account, seq, rest = heads[0]
            yield seq
            following = next(rest, None)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, _head(account, following, rest))

    def add(self, seq: Sequence) -> None:
        account = self._accounts.get(seq.tenant)
        if account is None:
            self._sweep()
            account = self._accounts[seq.tenant] = _Account()
            account.counter = self._shared.get(seq.tenant, 0)
        if not account.waiting:
            account.counter = max(account.counter, self._raise_level())
            self._waiting[seq.tenant] = account
        account.waiting.add(seq)
        account.unfinished.add(seq.seq_id)
        self._num_waiting += 1

    def remove(self, seq: Sequence) -> None:
        """Raises ValueError when it is not waiting."""
        account = self._waiting.get(seq.tenant)
        if account is None:
            raise ValueError(f"sequence {seq.seq_id} is not waiting")
        account.waiting.remove(seq)
        self._num_waiting -= 1
        if not account.waiting:
            self._last = self._waiting.pop(seq.tenant)

    def set_priority(self, seq: Sequence, priority: int) -> None:
        """Reorders a waiting sequence within its tenant, without lifting the tenant's counter."""
        self._waiting[seq.tenant].waiting.set_priority(seq, priority)

    def charge(self, seq: Sequence, prefill_tokens: int, decode_tokens: int) -> None:
        """Counts tokens served to the tenant of an unfinished sequence."""
        account = self._accounts[seq.tenant]
        cost = prefill_tokens + DECODE_WEIGHT * decode_tokens
        account.counter += cost
        account.unshared += cost
        account.is_new = False

    def exchange(
        self, counters: Mapping[str | None, int]
    ) -> tuple[dict[str | None, int], list[str | None]]:
        """Takes the counters of all engines, to which what was charged here since the last exchange
        is added. Returns that, by tenant, and the tenants that wait."""
        served = {}
        self._shared = counters
        for tenant, account in self._accounts.items():
            if account.unshared:
                served[tenant] = account.unshared
            if tenant in counters:
                account.counter = counters[tenant] + account.unshared
                account.is_new &= not account.counter
            account.unshared = 0
        return served, list(self._waiting)

    def finished(self, seq: Sequence) -> None:
        self._accounts[seq.tenant].unfinished.remove(seq.seq_id)

    def _raise_level(self) -> int:
        """The minimum counter of a tenant that starts waiting. It never decreases."""
        waiting = self._waiting.values() or [self._last]
        known = [account.counter for account in waiting if not account.is_new]
        self._level = max(self._level, min(known, default=0))
        return self._level

    def _sweep(self) -> None:
        """Drops idle tenants, when there are twice as many as after the last sweep."""
        if len(self._accounts) < self._sweep_at:
            return
        level = self._raise_level()
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.unfinished or account.counter > level
        }
        self._sweep_at = 2 * len(self._accounts) + 16


def _head(
    account: _Account, seq: Sequence, rest: Iterator[Sequence]
) -> tuple[int, int, int, _Account, Sequence, Iterator[Sequence]]:
    """Heap entry of a tenant in an iteration: sort key, account, next sequence and the rest."""
    return account.counter, seq.arrival_us, seq.seq_id, account, seq, rest
