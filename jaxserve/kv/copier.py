"""Moving images of pages between tiers, in threads, while the device computes.

The one primitive is `Copier.move`; a *ticket* stands for one move until it ends. The device's KV
pool is never touched here: a program gathers pages into a *staging* array before a move away
from the device, and another scatters one into the pool after a move to it. The engine's thread
dispatches both, in order with its steps, so no copy can see a page half written and no step can
read one that has not arrived (the swap manager of FastSwitch, Shen et al. 2024, with staging
arrays in place of copies to and from the pool itself).
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError, EngineClosedError, JaxserveError
from jaxserve.kv.tiers import Store, Tier


class MoveError(JaxserveError):
    """A move that cannot be made, or a ticket used against its state: a fault of the caller."""


class TicketState(enum.StrEnum):
    """How a move stands. All but PENDING are final."""

    PENDING = "pending"
    LANDED = "landed"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclasses.dataclass(eq=False)
class Ticket:
    """One move of images, made by `Copier.move`.

    From `begun_us`, when a thread took it up (until then: when it was asked for), to `ended_us`.
    Until it ended none of its pages may be used for anything else. `error` says what made it fail;
    the images at its target are then worth nothing, and those at its source are untouched.
    `staged` is the device array with one row per page, as `upload` made it, of a move to the
    device that landed, until it is consumed or abandoned.
    """

    source: Tier
    target: Tier
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    num_bytes: int
    begun_us: int
    ended_us: int | None = None
    error: str | None = None
    staged: Any = dataclasses.field(default=None, repr=False)
    _copier: Copier = dataclasses.field(kw_only=True, repr=False)
    _gathered: Any = dataclasses.field(default=None, kw_only=True, repr=False)
    _holds_buffer: bool = dataclasses.field(default=False, kw_only=True, repr=False)
    _abandoned: bool = dataclasses.field(default=False, kw_only=True, repr=False)

    @property
    def state(self) -> TicketState:
        if self.ended_us is None:
            return TicketState.PENDING
        if self.error is not None:
            return TicketState.FAILED
        return TicketState.ABANDONED if self._abandoned else TicketState.LANDED

    def abandon(self) -> None:
        """Nobody waits for this move any more.

        One that no thread has begun ends at once. One that is under way stays pending, and its
        pages stay taken, until the thread has let go of them; what it stages is dropped. One
        that has ended keeps its state and only gives up what it staged. Whichever it is, its
        staging buffer comes back.
        """
        self._copier._abandon(self)

    def consume(self) -> Any:
        """What was staged, once; its staging buffer is given back.

        Raises MoveError when nothing is staged: not landed, not for the device, or taken before.
        """
        return self._copier._consume(self)


class Copier:
    """Two threads that carry out moves: one to the device, one for all the others.

    So whoever waits for pages never waits behind pages on their way out. Each thread takes its
    moves in the order asked; between the two there is no order, and it is for the owner to see
    to it that no page of a pending ticket is given to another use.

    At most `staging_buffers` staging arrays exist in each direction. A move to the device takes one
    when a thread begins it and holds it until `Ticket.consume`; for a move away from the device
    the owner takes one by `reserve` before the gather, and the move gives it back as it ends. So an
    owner who waits in `reserve`, and consumes nothing meanwhile, does not wait for itself.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        *,
        download: Callable[[Any], np.ndarray],
        upload: Callable[[np.ndarray], Any],
        page_bytes: int,
        clock: Callable[[], int],
        staging_buffers: int = 2,
    ) -> None:
        """Starts the threads. `clock` gives integer microseconds.

        `download` takes a staging array to host memory, as images for `Store.write`; `upload`
        takes images as from `Store.read` to a new staging array, with rows of padding if it
        likes. Both run in the copier's threads and return when the copy is done.

        Raises ConfigError without a staging buffer.
        """
        if staging_buffers < 1:
            raise ConfigError(f"staging_buffers is {staging_buffers}; it must be at least 1")
        self._stores = dict(stores)
        self._download = download
        self._upload = upload
        self._page_bytes = page_bytes
        self._clock = clock
        # Guards all that follows and every ticket; told of whatever another thread may wait for.
        self._changed = threading.Condition()
        self._free_in = self._free_out = staging_buffers
        self._reserved_buffers = 0
        self._to_device: deque[Ticket] = deque()
        self._from_device: deque[Ticket] = deque()
        self._num_pending = 0
        self._ended: list[Ticket] = []
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=name, daemon=True)
            for queue, name in (
                (self._to_device, "jaxserve-kv-in"),
                (self._from_device, "jaxserve-kv-out"),
            )
        ]
        for thread in self._threads:
            thread.start()

    def move(
        self,
        source: Tier,
        source_pages: Sequence[int],
        target: Tier,
        target_pages: Sequence[int],
        staging: Any = None,
    ) -> Ticket:
        """Has the images of `source_pages` copied to `target_pages`, and returns at once.

        `staging` is the array `[>= pages, ...]` of a gather already dispatched, for moves away
        from the device; it uses up one `reserve`.

        Raises MoveError for a move that makes no sense, EngineClosedError after `close`.
        """
        self._check(source, source_pages, target, target_pages, staging)
        ticket = Ticket(
            source,
            target,
            tuple(source_pages),
            tuple(target_pages),
            num_bytes=len(source_pages) * self._page_bytes,
            begun_us=self._clock(),
            _copier=self,
            _gathered=staging,
        )
        with self._changed:
            if self._closed:
                raise EngineClosedError("the copier was closed; it moves no more pages")
            if source is Tier.DEVICE:
                if not self._reserved_buffers:
                    raise MoveError("no staging buffer is reserved; call reserve() before a gather")
                self._reserved_buffers -= 1
                ticket._holds_buffer = True
            self._num_pending += 1
            self._queue_of(ticket).append(ticket)
            self._changed.notify_all()
        return ticket

    def reserve(self, timeout_us: int = 0) -> bool:
        """Takes a staging buffer for a gather to come; False if none is free in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free_out, timeout_us / 1e6):
                return False
            self._free_out -= 1
            self._reserved_buffers += 1
            return True

    def ended(self) -> list[Ticket]:
        """The tickets that ended since the last call, in order of ending."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_us: int) -> bool:
        """Waits for a ticket that `ended` has not yet handed out.

        False when there is none in time, or at once when none is pending.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._num_pending, timeout_us / 1e6)
            return bool(self._ended)

    @property
    def num_pending(self) -> int:
        """Tickets that have not ended."""
        return self._num_pending

    def close(self) -> None:
        """Finishes what is under way, fails what is not begun, and stops; again does nothing.

        The stores stay open. `ended` still hands out what ended.
        """
        with self._changed:
            self._closed = True
            for queue in (self._to_device, self._from_device):
                while queue:
                    self._end(queue.popleft(), error="the copier was closed before the move began")
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _check(
        self,
        source: Tier,
        source_pages: Sequence[int],
        target: Tier,
        target_pages: Sequence[int],
        staging: Any,
    ) -> None:
        names = f"{source.value} to {target.value}"
        if source is target is Tier.DEVICE:
            raise MoveError(f"{names}: pages are copied within the device by a program")
        for tier in (source, target):
            if tier is not Tier.DEVICE and tier not in self._stores:
                raise MoveError(f"{names}: this copier has no {tier.value} tier")
        if not source_pages or len(source_pages) != len(target_pages):
            raise MoveError(
                f"{names}: {len(source_pages)} source and {len(target_pages)} target pages; "
                f"give as many of each, and at least one"
            )
        if (staging is not None) != (source is Tier.DEVICE):
            raise MoveError(f"{names}: a staging array belongs to moves from the device only")

    def _queue_of(self, ticket: Ticket) -> deque[Ticket]:
        return self._to_device if ticket.target is Tier.DEVICE else self._from_device

    def _run(self, queue: deque[Ticket]) -> None:
        while (ticket := self._begin(queue)) is not None:
            self._carry_out(ticket)

    def _begin(self, queue: deque[Ticket]) -> Ticket | None:
        """The next ticket, with a buffer if it needs one; None once closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (queue and (queue is self._from_device or self._free_in))
            )
            if self._closed:
                return None
            ticket = queue.popleft()
            if ticket.target is Tier.DEVICE:
                self._free_in -= 1
                ticket._holds_buffer = True
            ticket.begun_us = self._clock()
            return ticket

    def _carry_out(self, ticket: Ticket) -> None:
        try:
            staged = self._copy(ticket)
        except Exception as error:  # whatever it is, it concerns this move alone
            self._end(ticket, error=f"{type(error).__name__}: {error}")
        else:
            self._end(ticket, staged)

    def _copy(self, ticket: Ticket) -> Any:
        """Copies the images; what is staged for the device, if anything."""
        if ticket.source is Tier.DEVICE:
            images = self._download(ticket._gathered)
        else:
            images = self._stores[ticket.source].read(ticket.source_pages)
        if ticket._abandoned:
            return None
        if ticket.target is Tier.DEVICE:
            return self._upload(images)
        return self._stores[ticket.target].write(ticket.target_pages, images)

    def _end(self, ticket: Ticket, staged: Any = None, error: str | None = None) -> None:
        with self._changed:
            ticket._gathered = None
            ticket.error = error
            if staged is None or ticket._abandoned:
                self._give_back(ticket)
            else:
                ticket.staged = staged
            ticket.ended_us = self._clock()  # last: it is what makes the rest count
            self._num_pending -= 1
            self._ended.append(ticket)
            self._changed.notify_all()

    def _give_back(self, ticket: Ticket) -> None:
        if ticket._holds_buffer:
            ticket._holds_buffer = False
            self._free_in += ticket.target is Tier.DEVICE
            self._free_out += ticket.target is not Tier.DEVICE
            self._changed.notify_all()

    def _abandon(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket.ended_us is not None:
                ticket.staged = None
                self._give_back(ticket)
                return
            ticket._abandoned = True
            queue = self._queue_of(ticket)
            if ticket in queue:
                queue.remove(ticket)
                self._end(ticket)

    def _consume(self, ticket: Ticket) -> Any:
        with self._changed:
            if ticket.staged is None:
                raise MoveError(f"nothing is staged by {ticket} ({ticket.state})")
            staged, ticket.staged = ticket.staged, None
            self._give_back(ticket)
            return staged
