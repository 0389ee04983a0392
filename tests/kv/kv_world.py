"""A KV manager at work without a device: sequences, stores, and a transfer worker cranked by hand.

The KV of a token depends on all tokens before it, so here the content of a position is a number
that names its whole prefix: a sequence that reads a page that is not its own, not yet there, or
reused too soon reads a wrong number.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
from cranked_transfer_worker import CrankedTransferWorker

from jaxserve.core.settings.choices import Preemption
from jaxserve.kv.invariants import check_invariants
from jaxserve.kv.layout import KVGroup, KVLayout
from jaxserve.kv.manager import KVManager, Match
from jaxserve.kv.offload.stores import DiskStore, HostStore
from jaxserve.kv.offload.transfer_worker import TransferHandle
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.pages import PagePool
from jaxserve.kv.prefix_cache.node import Node
from jaxserve.kv.tier import Tier

POISON = -1
_WORD_BYTES = 8


@dataclasses.dataclass(eq=False)
class Sample:
    """A sequence: its tokens, and how many of them have their KV on the device."""

    token_ids: list[int]
    salt: bytes = b""
    num_computed: int = 0
    running: bool = False
    fresh: bool = False
    """Admitted in the plan that is being made."""
    fetching: bool = False
    table: PageTable = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.table = PageTable(self.known, self.salt)

    def known(self, start: int, stop: int) -> list[int]:
        return self.token_ids[start:stop]


class World:
    """A manager, a device of numbers, and the sequences that use them.

    Work is done in plans, as an engine does it: releases and the like, then admissions, then
    `step` carries out what the manager lists. What needs pages that are written steps first.
    Operations take small integers to choose by, so that a test can drive them at random.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_pages: int = 8,
        page_size: int = 2,
        host_pages: int = 0,
        disk_pages: int = 0,
        preemption: Preemption = "swap",
        prefix_caching: bool = True,
        staging_buffers: int = 2,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        groups = tuple(KVGroup(window) for window in windows)
        page_bytes = page_size * _WORD_BYTES
        self.page_size = page_size
        self.device = np.full((num_pages, page_size), POISON, np.int64)
        self.stores: dict[Tier, HostStore | DiskStore] = {}
        if host_pages:
            self.stores[Tier.HOST] = HostStore(host_pages, page_bytes)
        if disk_pages:
            self.stores[Tier.DISK] = DiskStore(directory, disk_pages, page_bytes)
        self.now_us = 0
        self.staging_buffers = staging_buffers
        self.transfer_worker = CrankedTransferWorker(
            self.stores,
            download=np.copy,
            upload=lambda payload: payload.view(np.int64),
            page_bytes=page_bytes,
            clock=lambda: self.now_us,
            staging_buffers=staging_buffers,
        )
        self.manager = KVManager(
            PagePool(num_pages, page_size),
            layout=KVLayout(page_size, groups, max_chunk=3 * page_size),
            prefix_caching=prefix_caching,
            preemption=preemption,
            tiers={tier: store.num_pages for tier, store in self.stores.items()},
            page_bytes=page_bytes,
            transfer_worker=self.transfer_worker if self.stores else None,
        )
        self.samples: list[Sample] = []
        self.groups: list[list[Node]] = []
        self.begun: dict[bool, TransferHandle] = {}
        self.num_operations = 0
        self.num_hits = 0
        self._contents: dict[tuple[bytes, bytes], list[int]] = {}

    @property
    def running(self) -> list[Sample]:
        """Samples whose pages can be given up: those of the plan in the making cannot."""
        return [sample for sample in self.samples if sample.running and not sample.fresh]

    @property
    def waiting(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.running]

    @property
    def behind(self) -> list[Sample]:
        """Samples with tokens that can be computed."""
        return [
            sample
            for sample in self.running
            if not sample.fetching and sample.num_computed < len(sample.token_ids)
        ]

    @property
    def caught_up(self) -> list[Sample]:
        """Samples that can sample a token, and have room for it."""
        room = self.room
        return [
            sample for sample in self.running if sample.num_computed == len(sample.token_ids) < room
        ]

    @property
    def room(self) -> int:
        """The most tokens that a sequence alone has pages for."""
        return self.manager.layout.longest(self.manager.pool.capacity, max_model_len=100)

    @property
    def finishable(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.fresh]

    @property
    def evictable(self) -> int:
        return self.manager.pool.num_cached

    @property
    def disk(self) -> DiskStore | None:
        return self.stores.get(Tier.DISK)

    @property
    def startable(self) -> list[bool]:
        """Directions in which a move can begin."""
        return [
            way
            for way in (True, False)
            if way not in self.begun and self.transfer_worker.can_begin(way)
        ]

    @property
    def possible(self) -> list[str]:
        """The operations for which there is something to operate on."""
        return [name for name, needed in OPERATIONS.items() if not needed or getattr(self, needed)]

    def close(self) -> None:
        self.transfer_worker.close()
        for store in self.stores.values():
            store.close()

    def do(self, operation: str, *choices: int) -> None:
        """One operation, and all that must hold after it."""
        getattr(self, operation)(*choices)
        self.num_operations += 1
        check_invariants(self.manager, [sample.table for sample in self.samples])

    # What sequences do

    def add(self, base: int, cut: int, more: int) -> None:
        """A sequence that begins like another, or like none."""
        token_ids, salt = [], b"ab"[base % 2 : base % 2 + 1]
        if self.samples and base % 4:
            other = _pick(self.samples, base)
            token_ids = other.token_ids[: cut % (len(other.token_ids) + 1)]
            salt = other.salt
        token_ids = token_ids + [(more >> bit) & 1 for bit in range(1 + more % 12)]
        self._join(Sample(token_ids[: 1 + self.room // 2], salt))

    def fork(self, which: int) -> None:
        """One more sample of a prompt, or a beam that continues another."""
        other = _pick(self.samples, which)
        self._join(Sample(list(other.token_ids), other.salt))

    def _join(self, sample: Sample) -> None:
        if len(self.samples) == MAX_SAMPLES:
            self.step()
            self.finish(0, 0, 1)
        sample.table = self.manager.new_table(sample.known, sample.salt)
        self.samples.append(sample)

    def admit(self, which: int) -> None:
        """One of those that wait, or the next that fits."""
        waiting = self.waiting
        first = which % len(waiting)
        for sample in waiting[first:] + waiting[:first]:
            if self.take(sample) is not None:
                break

    def take(self, sample: Sample) -> Match | None:
        """Admits a sample if it fits; what was found of it if so."""
        manager, length = self.manager, len(sample.token_ids)
        match = manager.match(sample.table, length - 1)
        num_pages = manager.layout.pages_for(length)
        assert match.num_tokens < length
        if match.arriving or not manager.fits(match, length, 0):
            return None
        copied = manager.counters.copied_pages
        manager.allocate(sample.table, match, length)
        held = sum(len(table.held) for table in sample.table.tables)
        assert held == num_pages or (manager.windowed and held < num_pages)
        assert manager.counters.copied_pages <= copied + 1
        sample.running = sample.fresh = True
        self.num_hits += match.num_tokens > 0
        sample.fetching = manager.is_fetching(sample.table)
        sample.num_computed = 0 if sample.fetching else sample.table.num_cached
        return match

    def compute(self, which: int, count: int) -> None:
        """A step of one sequence: a chunk of its prefill, or a token."""
        self.write(_pick(self.behind, which), 1 + count % (3 * self.page_size))

    def write(self, sample: Sample, count: int | None = None) -> None:
        """Computes the next tokens of a sample, all it has by default, as far as pages go."""
        left = len(sample.token_ids) - sample.num_computed
        stop = sample.num_computed + min(count or left, left)
        table, manager = sample.table, self.manager
        if not sample.fetching:
            while stop > sample.num_computed:
                if manager.extend(table, sample.num_computed, stop):
                    self.check_held(sample, stop)
                    break
                stop -= 1
        self.step()
        if sample.fetching:
            return
        for own in table.tables:
            contents = self.contents(own.salt, sample.token_ids)
            for position in range(sample.num_computed, stop):
                page, offset = divmod(position, self.page_size)
                self.device[own.pages[page], offset] = contents[position]
        sample.num_computed = stop

    def check_held(self, sample: Sample, stop: int) -> None:
        """A sequence holds the pages of its windows and of what it computes now, and perhaps those
        of what it computes next, but never more than it may."""
        held = sum(len(table.held) for table in sample.table.tables)
        layout = self.manager.layout
        assert layout.pages_at(sample.num_computed, stop) <= held
        assert held <= layout.pages_for(len(sample.token_ids))

    def append(self, which: int, token_id: int) -> None:
        """A sequence that has been computed samples a token."""
        _pick(self.caught_up, which).token_ids.append(token_id % 2)

    def register(self, which: int, lag: int, partial: int) -> None:
        """Has what is written found by others, if not all of it yet."""
        sample = _pick(self.running, which)
        num_tokens = self.num_known(sample, lag)
        self.manager.cache_pages(sample.table, num_tokens, partial=bool(partial % 2))

    def num_known(self, sample: Sample, lag: int) -> int:
        """Tokens written that the host knows: the last may still be on the device alone."""
        least = 0 if sample.fetching else sample.table.num_cached
        return max(least, sample.num_computed - lag % 2)

    def finish(self, which: int, lag: int, keep: int) -> None:
        sample = _pick(self.finishable, which)
        if sample.running:
            num_tokens = self.num_known(sample, lag)
            self.manager.release(sample.table, num_tokens, keep=bool(keep % 4))
        else:
            self.manager.unpin_table(sample.table)
        self.samples.remove(sample)

    def preempt(self, which: int, lag: int) -> None:
        sample = _pick(self.running, which)
        num_tokens = self.num_known(sample, lag)
        swap = self.manager.prefers_swap(sample.table, num_tokens)
        self.manager.release(sample.table, num_tokens, pin=swap, keep=swap)
        sample.running = sample.fetching = False
        sample.num_computed = 0

    def abandon(self, which: int) -> None:
        self.manager.unpin_table(_pick(self.waiting, which).table)

    def pin(self, which: int, count: int) -> None:
        """A group holds the pages of its prefix."""
        sample = _pick(self.running, which)
        nodes = self.manager.prefix_nodes(sample.table, len(sample.token_ids))
        group = nodes[: count % (len(nodes) + 1)]
        self.manager.pin(group)
        self.groups.append(group)

    def unpin(self, which: int, _: int) -> None:
        self.manager.unpin(self.groups.pop(which % len(self.groups)))

    def evict(self, count: int) -> None:
        pool = self.manager.pool
        free, evictable = pool.num_free, self.manager.pool.num_cached
        done = self.manager.evict(count % 4)
        assert done == min(count % 4, evictable) == pool.num_free - free

    def reset(self) -> None:
        self.manager.reset()
        assert not len(self.manager.tree)

    # What moves do

    def begin_move(self, which: int) -> None:
        way = self.startable[which % len(self.startable)]
        self.begun[way] = self.transfer_worker.begin(way)

    def end_move(self, which: int, fails: int) -> None:
        way = list(self.begun)[which % len(self.begun)]
        self.now_us += 10
        self.transfer_worker.end(self.begun.pop(way), fails=fails % 16 == 15)

    def corrupt(self, page: int) -> None:
        """The disk changes a byte."""
        file = self.disk._file.fileno()
        offset = (page % self.disk.num_pages) * self.disk.page_bytes
        (byte,) = os.pread(file, 1, offset)
        os.pwrite(file, bytes([byte ^ 0xFF]), offset)

    def poll(self, delay: int) -> None:
        """Takes in what has moved, now and then after more time than anything may take."""
        self.step()
        self.now_us += 10_000_000 if delay % 32 == 31 else delay
        self.manager.poll(self.now_us)
        for sample in self.running:
            if sample.fetching and not self.manager.is_fetching(sample.table):
                sample.fetching = False
                if self.manager.windowed and self.manager.fetch_failed(sample.table):
                    self.manager.release(sample.table, 0)
                    sample.running = False
                else:
                    sample.num_computed = sample.table.num_cached

    # The device

    def step(self) -> None:
        """Carries out what has been planned, in order; then everybody reads all he may."""
        operations = self.manager.operations()
        for load in operations.loads:
            payload = load.handle.consume()
            self.device[load.target_pages] = payload[: len(load.target_pages)]
        for save in operations.saves:
            if self.transfer_worker.reserve():
                self.manager.start_save(save, self.device[save.source_pages])
            else:
                self.manager.cancel_save(save)
        if operations.copies:
            sources, targets = zip(*operations.copies)
            self.device[list(targets)] = self.device[list(sources)]
        self.device[operations.freed] = POISON
        for sample in self.samples:
            sample.fresh = False
            self.check_readable(sample)

    def check_readable(self, sample: Sample) -> None:
        """A sequence reads its own KV, and nothing else, at every position it has computed."""
        if sample.running:
            stop = sample.num_computed
            for group, table in zip(self.manager.layout.groups, sample.table.tables):
                start = 0 if group.window is None else max(0, stop + 1 - group.window)
                read = self.device[table.pages].ravel()[start:stop].tolist()
                assert read == self.contents(table.salt, sample.token_ids)[start:stop]

    def check_page_bytes(self) -> None:
        """Every page that the tree knows is that of its prefix, on the device and in the host's
        memory. (On a disk it may have been changed; then its checksum says so.)"""
        assert all(node.attached for node in self.manager.tree._full.values())
        for node in self.manager.tree:
            contents = self.contents(*_prefix(node))[-node.num_tokens :]
            if node.device is not None:
                assert self.device[node.device, : node.num_tokens].tolist() == contents
            if Tier.HOST in node.lower:
                (row,) = self.stores[Tier.HOST].read([node.lower[Tier.HOST]]).view(np.int64)
                assert row[: node.num_tokens].tolist() == contents

    def contents(self, salt: bytes, token_ids: list[int]) -> list[int]:
        """What the KV of each of these tokens is, after all before it."""
        known = self._contents.setdefault((salt, bytes(token_ids)), [])
        if not known:
            content = int.from_bytes(salt)
            for token_id in token_ids:
                content = abs(hash((content, token_id)))
                known.append(content)
        return known

    # The rest of it

    def settle(self) -> None:
        """Lets every move end and be passed on, until nothing moves any more."""
        self.step()
        for _ in range(200):
            while self.startable:
                self.begin_move(0)
            while self.begun:
                self.end_move(0, 0)
            self.poll(0)
            if not self.manager.num_in_flight_transfers:
                self.step()
                return
        raise AssertionError("moves beget moves for ever")

    def end(self) -> None:
        """Everybody leaves, and everything is forgotten: nothing may be missing."""
        self.step()
        while self.samples:
            self.do("finish", 0, 0, 1)
        for group in self.groups:
            self.manager.unpin(group)
        self.settle()
        check_invariants(self.manager, [])
        self.check_page_bytes()
        pool, tree = self.manager.pool, self.manager.tree
        assert pool.num_used == 0
        assert pool.num_cached == self.manager.pool.num_cached
        assert self.transfer_worker.free_buffers == (self.staging_buffers, self.staging_buffers)
        assert not any(node.pins or node.in_transfer for node in tree)
        self.manager.reset()
        assert pool.num_free == pool.capacity
        assert all(usage.num_used == 0 for usage in self.manager.tiers.values())
        assert self.manager.transfers() == []
        assert not tree._full and not tree._roots


OPERATIONS = {
    "add": None,
    "fork": "samples",
    "admit": "waiting",
    "compute": "behind",
    "append": "caught_up",
    "register": "running",
    "finish": "finishable",
    "preempt": "running",
    "abandon": "waiting",
    "pin": "running",
    "unpin": "groups",
    "evict": "evictable",
    "reset": None,
    "begin_move": "startable",
    "end_move": "begun",
    "corrupt": "disk",
    "poll": None,
    "step": None,
}
"""What a world can be driven by, and which of its attributes must not be empty for it."""

MAX_SAMPLES = 8


def _pick(samples: list[Sample], which: int) -> Sample:
    return samples[which % len(samples)]


def _prefix(node: Node) -> tuple[bytes, list[int]]:
    """The salt of a node, and all tokens up to its end."""
    pages: list[bytes] = []
    while node.parent is not None:
        pages.append(node.tokens)
        node = node.parent
    packed = b"".join(reversed(pages))
    return node.tokens, np.frombuffer(packed, ">u4").tolist()
