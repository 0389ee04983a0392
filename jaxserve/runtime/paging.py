"""Carries out what the KV manager plans: on the device before each step, between tiers beside them.

The device's pool is only ever touched by programs dispatched here and by the steps themselves, all
from the engine's thread and so in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxserve.engine.events import EventLog
from jaxserve.errors import ConfigError
from jaxserve.kv.books import check_books
from jaxserve.kv.copier import Copier, Ticket, TicketState
from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import TRASH_PAGE, PagePool
from jaxserve.kv.rates import Rates
from jaxserve.kv.table import PageTable
from jaxserve.kv.tiers import DiskStore, HostStore, Store, Tier
from jaxserve.kv.transfers import MOVE_SIZES
from jaxserve.models.config import ModelConfig
from jaxserve.runtime.memory import STAGING_BUFFERS
from jaxserve.runtime.page_images import ImageLayout, PageImages
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.staging import Staging
from jaxserve.runtime.startup import EnginePlan

_STAGING_WAIT_US = 100_000
"""How long a step waits for a staging buffer before it gives up the images it would save: no longer
than whoever reads a stream would hardly see. After one waited in vain none waits, until a buffer
has come back."""
_IDLE_WAIT_US = 10_000
"""How long an engine with nothing else to do waits for a move."""
_SETTLE_US = 1_000_000
"""How long a checkpoint waits for moves: what they would bring can be computed."""
_CALIBRATIONS = 3


class Paging:
    """An engine's KV manager, and the device, the copier and the stores that it plans for."""

    def __init__(self, plan: EnginePlan, runner: Runner, log: EventLog) -> None:
        """Opens the lower tiers and times moves to and from them.

        Raises ConfigError when one of them cannot be.
        """
        config, memory = plan.config, plan.memory
        self._runner = runner
        self._log = log
        self._debug = config.debug_kv
        self._stalled = False
        self._stores: dict[Tier, Store] = {}
        if memory.host_pages:
            self._stores[Tier.HOST] = HostStore(memory.host_pages, memory.image_bytes)
        if memory.disk_pages:
            self._stores[Tier.DISK] = DiskStore(
                config.disk_kv_dir, memory.disk_pages, memory.image_bytes
            )
        self._copier = None
        if self._stores:
            staging = Staging(plan.geometry.staging(1))
            self._copier = Copier(
                self._stores,
                download=staging.download,
                upload=staging.upload,
                page_bytes=memory.image_bytes,
                clock=log.now,
                staging_buffers=STAGING_BUFFERS,
            )
        rates = Rates()
        if self._copier is not None:
            with log.phase("startup", "calibrate moves"):
                self._calibrate(rates)
        self.manager = KVManager(
            PagePool(memory.num_pages, config.page_size),
            prefix_caching=config.enable_prefix_caching,
            preemption=config.preemption,
            tiers={tier: store.num_pages for tier, store in self._stores.items()},
            page_bytes=memory.image_bytes,
            copier=self._copier,
            rates=rates,
        )

    def poll(self) -> None:
        """Takes in what has moved. Call it before a step is planned."""
        for ticket in self.manager.poll(self._log.now()):
            if ticket.state is TicketState.ABANDONED:
                continue  # It may never have begun, and has brought nothing.
            self._log.moved(
                ticket.source.value,
                ticket.target.value,
                pages=len(ticket.source_pages),
                num_bytes=ticket.num_bytes,
                begin_us=ticket.begun_us,
                end_us=ticket.ended_us,
                error=ticket.error,
            )

    def carry_out(self) -> None:
        """Dispatches what must be done on the device before the step just planned."""
        operations = self.manager.operations()
        for load in operations.loads:
            self._runner.scatter(load.target_pages, load.ticket.consume())
        for save in operations.saves:
            staging = None
            self._stalled = not self._copier.reserve(0 if self._stalled else _STAGING_WAIT_US)
            if not self._stalled:
                staging = self._runner.gather(save.source_pages)
            self.manager.begin(save, staging)
        if operations.copies:
            self._runner.copy(operations.copies)
        if self._debug and operations.freed:
            self._runner.poison(operations.freed)

    def images(self, model: ModelConfig) -> PageImages:
        """Every page, on whatever tier; `model` is as its files have it."""
        layout = ImageLayout(self._runner.geometry, model)
        return PageImages(layout, self._runner, self._stores)

    def settle(self) -> None:
        """Lets all moves end, those excepted that take too long."""
        give_up_us = self._log.now() + _SETTLE_US
        while True:
            self.poll()
            self.carry_out()
            if not self.manager.mover.num_under_way or self._log.now() > give_up_us:
                return
            self.wait()

    def check(self, tables: Callable[[], Iterable[PageTable]]) -> None:
        """In debug mode, raises PageError when the books of these tables do not balance."""
        if self._debug:
            check_books(self.manager, tables())

    def wait(self) -> None:
        """Waits a little for a move, for want of anything else to do."""
        if self._copier is not None and self.manager.mover.num_under_way:
            self._copier.wait(_IDLE_WAIT_US)

    def close(self) -> None:
        """Stops the copier, frees the lower tiers and lets go of the device's memory. May be called
        twice."""
        self._runner = None
        if self._copier is not None:
            self._copier.close()
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    def _calibrate(self, rates: Rates) -> None:
        """Times moves of one page and of many between neighbouring tiers, while all are empty."""
        tiers = list(self._stores)
        for _ in range(_CALIBRATIONS):
            for above, below in zip([Tier.DEVICE, *tiers], tiers):
                for count in self._sizes():
                    for ticket in self._there_and_back(above, below, list(range(count))):
                        us = ticket.ended_us - ticket.begun_us
                        rates.moved(ticket.source, ticket.target, ticket.num_bytes, us)

    def _sizes(self) -> list[int]:
        """Sizes of moves that every tier has room for: enough to tell latency from rate."""
        least = min(store.num_pages for store in self._stores.values())
        return [size for size in MOVE_SIZES if size <= least]

    def _there_and_back(self, above: Tier, below: Tier, pages: list[int]) -> Iterable[Ticket]:
        """Moves pages down a tier, then from there to the device; tickets of those that landed."""
        staging = None
        if above is Tier.DEVICE:
            self._copier.reserve()
            staging = self._runner.gather([TRASH_PAGE] * len(pages))
        tickets = [self._copier.move(above, pages, below, pages, staging)]
        self._finish(tickets[0])
        tickets.append(self._copier.move(below, pages, Tier.DEVICE, pages))
        self._finish(tickets[1])
        for ticket in tickets:
            if ticket.error is not None:
                raise ConfigError(
                    f"a first move of KV pages from {ticket.source.value} to "
                    f"{ticket.target.value} failed: {ticket.error}. Mend that, or do without this "
                    "tier (host_kv_bytes, disk_kv_bytes)."
                )
        tickets[1].consume()
        return tickets

    def _finish(self, ticket: Ticket) -> None:
        while ticket not in self._copier.ended():
            self._copier.wait(_STAGING_WAIT_US)
