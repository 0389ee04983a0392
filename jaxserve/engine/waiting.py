"""Who is admitted next: the waiting sequences in one order, by how urgent they are, or with a fair
share for every tenant.

All queues are used in the same way:

- `add(seq)` when a sequence arrives and each time it is preempted, `remove(seq)` when it is
  admitted or ends while it waits, `finished(seq)` once, when it ends wherever it is, and
  `set_priority(seq, priority)` while it waits;
- iterate to admit. Whoever takes a sequence removes it, and charges its prefill, before asking for
  the next; a sequence that is still there by then was passed over, and is not offered again.
- `charge(seq, prefill_tokens, decode_tokens)` for work done on it: at its first admission all that
  is to be prefilled (what a cache holds is not), later each token that it samples. What is computed
  again after a preemption served nobody and is charged to nobody.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.engine.sequence import Sequence

DECODE_WEIGHT = 2
"""What a sampled token counts, in prefilled ones, as in the paper of `FairQueue`."""

_order = attrgetter("order")


class WaitingQueue:
    """Waiting sequences by `order`, whosever they are."""

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
        """Moves a waiting sequence to where another priority puts it."""
        self.remove(seq)
        seq.set_priority(priority)
        self.add(seq)

    def charge(self, seq: Sequence, prefill_tokens: int, decode_tokens: int) -> None:
        """Nobody's share is counted here."""

    def finished(self, seq: Sequence) -> None:
        """Nobody's share is counted here."""


class SlackQueue(WaitingQueue):
    """The most urgent first, by a key that changes as time passes (`slack.py`).

    Prompts of about the same length, up to twice as long, are in one class. Within a class the
    order is that of arrival, which is nearly that of urgency; between classes their first ones are
    compared. So the cost of an iteration depends on the classes, some twenty, and not on how many
    wait.
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
    """One tenant's counter, and what it has in the engine."""

    def __init__(self) -> None:
        self.counter = 0
        self.is_new = True  # Nothing was charged to it yet.
        self.waiting = WaitingQueue()
        self.unfinished: set[int] = set()  # Ids of its sequences, waiting or running.


class FairQueue:
    """The tenant served least goes first: the virtual token counter of "Fairness in Serving Large
    Language Models" (Sheng et al., OSDI 2024, algorithm VTC).

    Each tenant has a counter of the tokens it was served, a prefilled one weighing 1 and a sampled
    one `DECODE_WEIGHT`. The next sequence is the first, by `order`, of the tenant with the least
    counter; of tenants that are level, the one whose sequence arrived first. Sequences without a
    tenant are together one tenant.

    - A tenant's counter rises past another's who waits only by the sequence that it was admitted
      with and by what it has running. So those who always have something waiting stay within one
      prompt and the output of one batch of each other, however many requests each sends.
    - Whoever comes to have something waiting is lifted to the least counter of those who wait, or
      if nobody does, to that of the last who did: time spent idle earns no credit. A counter that
      is higher stays, so that coming back does not clear it.
    - Priority is part of `order`, and so decides among a tenant's own sequences. It does not reach
      across tenants, or everyone would claim the highest.
    - Nobody starves: the others' counters rise with what they are served until the one who waits is
      the least, and `order` is static. The paper's rule alone would let an endless row of tenants
      with one request each hold the least counter down. So those never served have no say in it,
      and newcomers join at the counter of those who were.

    A tenant is forgotten when it has nothing in the engine and would return at the lifted counter.
    """

    def __init__(self) -> None:
        self._accounts: dict[str | None, _Account] = {}
        self._waiting: dict[str | None, _Account] = {}  # Those with something waiting.
        self._last = _Account()  # The last that stopped waiting.
        self._level = 0
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

    @property
    def num_tenants(self) -> int:
        """Tenants remembered: those with something in the engine, and some who were before."""
        return len(self._accounts)

    def add(self, seq: Sequence) -> None:
        account = self._accounts.get(seq.tenant)
        if account is None:
            self._sweep()
            account = self._accounts[seq.tenant] = _Account()
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
        """Moves a waiting sequence among those of its tenant, who is no newcomer by that."""
        self._waiting[seq.tenant].waiting.set_priority(seq, priority)

    def charge(self, seq: Sequence, prefill_tokens: int, decode_tokens: int) -> None:
        """Counts tokens served to the tenant of an unfinished sequence."""
        account = self._accounts[seq.tenant]
        account.counter += prefill_tokens + DECODE_WEIGHT * decode_tokens
        account.is_new = False

    def finished(self, seq: Sequence) -> None:
        self._accounts[seq.tenant].unfinished.remove(seq.seq_id)

    def _raise_level(self) -> int:
        """The counter at which a tenant that comes to wait starts at least. It never falls."""
        waiting = self._waiting.values() or [self._last]
        known = [account.counter for account in waiting if not account.is_new]
        self._level = max(self._level, min(known, default=0))
        return self._level

    def _sweep(self) -> None:
        """Forgets tenants, when there are twice as many as the last sweep left."""
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
    """A tenant's next sequence in an iteration and those behind it, to sort by when it is due."""
    return account.counter, seq.arrival_us, seq.seq_id, account, seq, rest
