"""The worker: real threads, real stores, and a device that is a few numpy arrays."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from patience import PATIENCE_S
from scripts import run_script

from jaxserve.core.errors import ConfigError, EngineClosedError
from jaxserve.kv.offload.stores import DiskStore, HostStore
from jaxserve.kv.offload.transfer_worker import (
    TransferError,
    TransferHandle,
    TransferState,
    TransferWorker,
)
from jaxserve.kv.tier import Tier

NUM_PAGES, PAGE_BYTES = 8, 64
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
LONG_US = PATIENCE_S * 1_000_000  # only a failing test waits as long


class Link:
    """Copies to and from a device of numpy arrays. Either way can be held up, or made to fail."""

    def __init__(self) -> None:
        self.downloading, self.uploading = threading.Event(), threading.Event()
        self.download_gate, self.upload_gate = threading.Event(), threading.Event()
        self.download_gate.set()
        self.upload_gate.set()
        self.failure: Exception | None = None

    def download(self, staging: np.ndarray) -> np.ndarray:
        self.downloading.set()
        self._pass(self.download_gate)
        return staging.copy()

    def upload(self, payload: np.ndarray) -> np.ndarray:
        self.uploading.set()
        self._pass(self.upload_gate)
        return padded(payload)

    def _pass(self, gate: threading.Event) -> None:
        assert gate.wait(LONG_US / 1e6)
        if self.failure is not None:
            raise self.failure


def padded(payload: np.ndarray) -> np.ndarray:
    """Pages and rows of rubbish up to a power of two, as a program of fixed shapes has them."""
    rows = 1 << (len(payload) - 1).bit_length()
    staging = np.full((rows, PAGE_BYTES), 0xAB, np.uint8)
    staging[: len(payload)] = payload
    return staging


def payload_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, PAGE_BYTES), np.uint8)


class Bench:
    """A worker over both stores, and what a test does with it again and again."""

    def __init__(self, directory: Path, staging_buffers: int = 2) -> None:
        self.link = Link()
        self.host = HostStore(NUM_PAGES, PAGE_BYTES)
        self.disk = DiskStore(directory, NUM_PAGES, PAGE_BYTES)
        ticks = itertools.count(1000)
        self.transfer_worker = TransferWorker(
            {HOST: self.host, DISK: self.disk},
            download=self.link.download,
            upload=self.link.upload,
            page_bytes=PAGE_BYTES,
            clock=lambda: next(ticks),
            staging_buffers=staging_buffers,
        )

    def close(self) -> None:
        self.link.download_gate.set()
        self.link.upload_gate.set()
        self.transfer_worker.close()
        self.host.close()
        self.disk.close()

    @property
    def num_pending(self) -> int:
        """Moves that have not ended."""
        return self.transfer_worker._num_pending

    def save(self, payload: np.ndarray, pages: list[int], target: Tier = HOST) -> TransferHandle:
        """Moves page bytes away from the device."""
        assert self.transfer_worker.reserve(LONG_US)
        return self.transfer_worker.submit(
            DEVICE, range(len(payload)), target, pages, padded(payload)
        )

    def fetch(self, pages: list[int], source: Tier = HOST) -> TransferHandle:
        return self.transfer_worker.submit(source, pages, DEVICE, range(len(pages)))

    def drain(self) -> list[TransferHandle]:
        ended = []
        while self.transfer_worker.wait(LONG_US):
            ended += self.transfer_worker.ended()
        assert not self.num_pending
        return ended

    def num_free_buffers(self) -> int:
        """Of the direction that has fewer. The others stay reserved: look once, at the end."""
        return min(
            self.transfer_worker._free_in, sum(1 for _ in iter(self.transfer_worker.reserve, False))
        )


@contextlib.contextmanager
def bench_in(directory: Path, staging_buffers: int = 2) -> Iterator[Bench]:
    with contextlib.closing(Bench(directory, staging_buffers)) as bench:
        yield bench


@pytest.fixture
def bench(tmp_path):
    with bench_in(tmp_path) as opened:
        yield opened


def eventually(condition: Callable[[], bool]) -> bool:
    """For what a thread does just after a transfer ended, which is not signalled."""
    deadline = time.monotonic() + LONG_US / 1e6
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_a_round_trip_through_all_tiers(bench):
    payload = payload_of(3)
    handles = []
    for move in (
        lambda: bench.save(payload, [5, 6, 1]),
        lambda: bench.transfer_worker.submit(HOST, [5, 6, 1], DISK, [0, 1, 2]),
        lambda: bench.transfer_worker.submit(DISK, [2, 0], HOST, [7, 3]),
        lambda: bench.fetch([3, 6, 7]),
    ):
        handle = move()
        handles.append(handle)
        assert bench.transfer_worker.wait(LONG_US)
        assert bench.transfer_worker.ended() == [handle] and bench.transfer_worker.ended() == []
        assert handle.state is TransferState.LANDED
    assert [handle.num_bytes for handle in handles] == [192, 192, 128, 192]
    staged = handles[-1].consume()
    np.testing.assert_array_equal(staged[:3], payload[[0, 1, 2]])
    assert len(staged) == 4  # padded by upload


def test_times_and_the_order_of_ending(bench):
    handles = [bench.save(payload_of(1), [page]) for page in range(6)]
    assert bench.drain() == handles
    times = [time_us for t in handles for time_us in (t.begun_us, t.ended_us)]
    assert times == sorted(times)  # begun when taken up, not when asked for


def test_wait_is_over_at_once_when_nothing_is_pending(bench):
    began = time.monotonic()
    assert not bench.transfer_worker.wait(LONG_US)
    assert time.monotonic() - began < 30


def test_wait_gives_up_in_time(bench):
    bench.link.download_gate.clear()
    handle = bench.save(payload_of(1), [0])
    assert not bench.transfer_worker.wait(1000)
    assert handle.state is TransferState.PENDING and bench.num_pending == 1
    bench.link.download_gate.set()
    assert bench.transfer_worker.wait(LONG_US)
    assert bench.transfer_worker.wait(0)  # until it is handed out
    assert bench.transfer_worker.ended() == [handle] and bench.num_pending == 0


def test_fetches_do_not_wait_behind_a_slow_download(bench):
    payload = payload_of(2)
    bench.host.write([2, 3], payload)
    bench.link.download_gate.clear()
    slow = bench.save(payload_of(1, seed=1), [0])
    assert bench.link.downloading.wait(LONG_US / 1e6)
    fetch = bench.fetch([3, 2])
    assert bench.transfer_worker.wait(LONG_US)
    assert bench.transfer_worker.ended() == [fetch]
    np.testing.assert_array_equal(fetch.consume(), payload[::-1])
    assert slow.state is TransferState.PENDING
    bench.link.download_gate.set()
    assert bench.drain() == [slow]


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_failing_link_fails_its_ticket_only(bench, direction):
    payload = payload_of(2)
    bench.host.write([0, 1], payload)
    move = {"up": lambda: bench.fetch([0, 1]), "down": lambda: bench.save(payload, [4, 5])}[
        direction
    ]
    bench.link.failure = RuntimeError("the link is down")
    failed = move()
    assert bench.drain() == [failed]
    assert failed.state is TransferState.FAILED
    assert failed.error == "RuntimeError: the link is down"
    assert failed.staged is None and failed.ended_us is not None
    bench.link.failure = None
    landed = move()
    assert bench.drain() == [landed] and landed.state is TransferState.LANDED
    if direction == "up":
        landed.consume()
    np.testing.assert_array_equal(bench.host.read([0, 1]), payload)
    assert bench.num_free_buffers() == 2


def test_a_corrupt_page_fails_the_fetch_and_stages_nothing(bench):
    payload = payload_of(3)
    bench.save(payload, [0, 1, 2], DISK)
    bench.drain()
    os.pwrite(bench.disk._file.fileno(), bytes([payload[1, 0] ^ 1]), PAGE_BYTES)
    corrupt = bench.fetch([0, 1, 2], DISK)
    onward = bench.transfer_worker.submit(DISK, [1], HOST, [1])
    bench.drain()
    for handle in (corrupt, onward):
        assert handle.state is TransferState.FAILED and handle.staged is None
        assert handle.error.startswith("PageCorruptError: pages 1 ")
    whole = bench.fetch([0, 2], DISK)
    bench.drain()
    np.testing.assert_array_equal(whole.consume(), payload[[0, 2]])
    assert bench.num_free_buffers() == 2


def test_a_full_disk_fails_the_move_and_the_next_one_lands():
    """The limit on a file's size, in a process of its own, does what a full disk does."""
    script = """
        import resource, signal, tempfile
        import numpy as np
        from jaxserve.kv.offload.transfer_worker import TransferState, TransferWorker
        from jaxserve.kv.offload.stores import DiskStore, HostStore
        from jaxserve.kv.tier import Tier

        PAGE = 4096
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        payload = np.random.default_rng(0).integers(0, 256, (4, PAGE), np.uint8)
        with tempfile.TemporaryDirectory() as directory:
            stores = {Tier.HOST: HostStore(4, PAGE), Tier.DISK: DiskStore(directory, 4, PAGE)}
            worker = TransferWorker(
                stores, download=None, upload=np.copy, page_bytes=PAGE, clock=lambda: 0
            )
            stores[Tier.HOST].write([0, 1, 2, 3], payload)
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE + 1, hard))
            full = worker.submit(Tier.HOST, [0, 1, 2], Tier.DISK, [0, 1, 2])
            small = worker.submit(Tier.HOST, [3], Tier.DISK, [0])
            while TransferState.PENDING in (full.state, small.state):
                assert worker.wait(400_000_000)
                worker.ended()
            assert full.state == "failed" and full.error.startswith("OSError: [Errno 27]"), full
            assert small.state == "landed", small
            assert (stores[Tier.DISK].read([0]) == payload[3]).all()
            assert (stores[Tier.HOST].read([0, 1, 2, 3]) == payload).all()
            worker.close()
    """
    run_script(script, timeout_s=PATIENCE_S)


def test_abandoned_before_it_began_it_ends_at_once(bench):
    before = payload_of(1, seed=1)
    bench.host.write([1], before)
    bench.link.download_gate.clear()
    running = bench.save(payload_of(1), [0])
    assert bench.link.downloading.wait(LONG_US / 1e6)
    waiting = bench.save(payload_of(1), [1])
    waiting.abandon()
    assert waiting.state is TransferState.ABANDONED
    assert bench.transfer_worker.ended() == [waiting]
    assert running.state is TransferState.PENDING
    bench.link.download_gate.set()
    assert bench.drain() == [running]
    np.testing.assert_array_equal(bench.host.read([1]), before)
    assert bench.num_free_buffers() == 2


def test_abandoned_while_downloading_it_ends_when_the_thread_lets_go(bench):
    before = payload_of(1, seed=1)
    bench.host.write([0], before)
    bench.link.download_gate.clear()
    handle = bench.save(payload_of(1), [0])
    assert bench.link.downloading.wait(LONG_US / 1e6)
    handle.abandon()
    handle.abandon()
    assert handle.state is TransferState.PENDING and bench.transfer_worker.ended() == []
    bench.link.download_gate.set()
    assert bench.drain() == [handle] and handle.state is TransferState.ABANDONED
    np.testing.assert_array_equal(bench.host.read([0]), before)
    assert bench.num_free_buffers() == 2


def test_abandoned_while_uploading_it_stages_nothing(bench):
    bench.host.write([0], payload_of(1))
    bench.link.upload_gate.clear()
    handle = bench.fetch([0])
    assert bench.link.uploading.wait(LONG_US / 1e6)
    handle.abandon()
    assert handle.state is TransferState.PENDING
    bench.link.upload_gate.set()
    assert bench.drain() == [handle]
    assert handle.state is TransferState.ABANDONED and handle.staged is None
    assert bench.num_free_buffers() == 2


def test_abandoned_when_it_failed_it_is_still_a_failure(bench):
    bench.link.download_gate.clear()
    handle = bench.save(payload_of(1), [0])
    assert bench.link.downloading.wait(LONG_US / 1e6)
    handle.abandon()
    bench.link.failure = RuntimeError("the link is down")
    bench.link.download_gate.set()
    assert bench.drain() == [handle] and handle.state is TransferState.FAILED


def test_abandoned_after_it_landed_it_gives_up_what_it_staged(bench):
    bench.host.write([0], payload_of(1))
    handle = bench.fetch([0])
    assert bench.drain() == [handle]
    handle.abandon()
    handle.abandon()
    assert handle.state is TransferState.LANDED and handle.staged is None
    assert bench.transfer_worker.ended() == []
    with pytest.raises(TransferError, match="nothing is staged"):
        handle.consume()
    assert bench.num_free_buffers() == 2


def test_consumed_once(bench):
    bench.host.write([0], payload_of(1))
    bench.link.upload_gate.clear()
    handle = bench.fetch([0])
    with pytest.raises(TransferError, match="pending"):
        handle.consume()
    bench.link.upload_gate.set()
    bench.drain()
    handle.consume()
    with pytest.raises(TransferError, match="nothing is staged"):
        handle.consume()
    assert bench.num_free_buffers() == 2


def test_the_worker_keeps_no_staging_array_alive(bench):
    """A device array with a forgotten reference is device memory lost."""
    staging = padded(payload_of(2))
    gathered = weakref.ref(staging)
    assert bench.transfer_worker.reserve()
    bench.transfer_worker.submit(DEVICE, [0, 1], HOST, [0, 1], staging)
    del staging
    bench.drain()
    assert eventually(lambda: gc.collect() >= 0 and gathered() is None)
    fetches = [bench.fetch([0, 1]) for _ in range(2)]
    bench.drain()
    consumed = weakref.ref(fetches[0].consume())
    abandoned = weakref.ref(fetches[1].staged)
    fetches[1].abandon()
    assert eventually(lambda: gc.collect() >= 0 and consumed() is None and abandoned() is None)


def test_reserved_buffers_run_out_and_come_back(bench):
    bench.link.download_gate.clear()
    handles = [bench.save(payload_of(1), [page]) for page in (0, 1)]
    assert not bench.transfer_worker.reserve() and not bench.transfer_worker.reserve(1000)
    opener = threading.Timer(0.05, bench.link.download_gate.set)
    opener.start()
    assert bench.transfer_worker.reserve(LONG_US)
    opener.join()
    assert (
        bench.transfer_worker.submit(DEVICE, [0], HOST, [2], padded(payload_of(1))) in bench.drain()
    )
    assert all(handle.state is TransferState.LANDED for handle in handles)
    assert bench.num_free_buffers() == 2


def test_fetches_wait_for_staging_to_be_consumed(bench):
    payload = payload_of(5)
    bench.host.write(range(5), payload)
    handles = [bench.fetch([page]) for page in range(5)]
    for handle, left in zip(handles, (3, 2, 1, 0, 0)):
        assert eventually(lambda left=left: bench.num_pending == left)
        time.sleep(0.005)  # time enough for a thread that took one too many
        assert bench.num_pending == left
        page = handle.source_pages[0]
        np.testing.assert_array_equal(handle.consume(), payload[page : page + 1])
    assert bench.transfer_worker.ended() == handles
    assert bench.num_free_buffers() == 2


def test_a_fetch_that_waits_for_a_buffer_can_be_abandoned(bench):
    bench.host.write([0], payload_of(1))
    staged = [bench.fetch([0]) for _ in range(2)]
    waiting = bench.fetch([0])
    assert eventually(lambda: bench.num_pending == 1)
    assert bench.transfer_worker.ended() == staged
    waiting.abandon()
    assert bench.transfer_worker.ended() == [waiting] and waiting.state is TransferState.ABANDONED


def test_close_finishes_transfers_in_flight_and_fails_the_rest(bench):
    payload = payload_of(1)
    bench.host.write([4], payload)
    bench.link.download_gate.clear()
    running = bench.save(payload, [0])
    assert bench.link.downloading.wait(LONG_US / 1e6)
    waiting = [bench.save(payload, [1]), bench.transfer_worker.submit(HOST, [4], DISK, [0])]
    closer = threading.Thread(target=bench.transfer_worker.close)
    closer.start()
    assert eventually(lambda: bench.num_pending == 1)
    assert running.state is TransferState.PENDING
    assert all(handle.state is TransferState.FAILED for handle in waiting)
    assert all("closed before the transfer began" in handle.error for handle in waiting)
    bench.link.download_gate.set()
    closer.join()
    bench.transfer_worker.close()
    assert bench.transfer_worker.ended() == [*waiting, running]
    assert running.state is TransferState.LANDED
    np.testing.assert_array_equal(bench.host.read([0]), payload)
    assert not any(thread.is_alive() for thread in bench.transfer_worker._threads)
    with pytest.raises(EngineClosedError):
        bench.fetch([0])


def test_close_while_fetches_wait_for_a_buffer(bench):
    bench.host.write([0], payload_of(1))
    handles = [bench.fetch([0]) for _ in range(4)]
    assert eventually(lambda: bench.num_pending == 2)
    bench.transfer_worker.close()
    assert bench.transfer_worker.ended() == handles
    states = [handle.state for handle in handles]
    assert states == [TransferState.LANDED] * 2 + [TransferState.FAILED] * 2
    handles[0].consume()  # what landed is still worth having


def test_moves_that_make_no_sense_are_refused(bench):
    staging = padded(payload_of(1))
    move = bench.transfer_worker.submit
    for arguments, message in (
        ((DEVICE, [0], DEVICE, [1], staging), "within the device"),
        ((HOST, [0, 1], DISK, [0]), "2 source and 1 target"),
        ((HOST, [], DISK, []), "0 source and 0 target"),
        ((HOST, [0], DISK, [0], staging), "staging array is required for transfers from the"),
        ((DEVICE, [0], HOST, [0]), "staging array is required for transfers from the"),
        ((DEVICE, [0], HOST, [0], staging), "no staging buffer is reserved"),
    ):
        with pytest.raises(TransferError, match=message):
            move(*arguments)
    assert bench.num_pending == 0 and bench.transfer_worker.ended() == []


def test_a_worker_without_a_tier_or_without_staging():
    link = Link()
    parts = {"download": link.download, "upload": link.upload, "page_bytes": 64, "clock": int}
    with (
        contextlib.closing(TransferWorker({}, **parts)) as transfer_worker,
        pytest.raises(TransferError, match="no disk"),
    ):
        transfer_worker.submit(DISK, [0], DEVICE, [0])
    with pytest.raises(ConfigError, match="staging_buffers is 0"):
        TransferWorker({}, **parts, staging_buffers=0)


class MovesMachine(RuleBasedStateMachine):
    """Random moves among three tiers against dicts of what each page should hold.

    The model learns of a transfer when it settles, all pending ones at once, so that what is drawn
    never depends on how far the threads have come.
    """

    BUFFERS = 3
    ROUTES = tuple(route for route in itertools.product(Tier, Tier) if route != (DEVICE, DEVICE))

    @initialize()
    def start(self) -> None:
        self.context = contextlib.ExitStack()
        self.bench = self.context.enter_context(bench_in(Path(gettempdir()), self.BUFFERS))
        self.device = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
        self.model: dict[tuple[Tier, int], bytes] = {}
        self.moving: dict[TransferHandle, list[bytes]] = {}
        self.dropped: set[TransferHandle] = set()

    def busy(self) -> set[tuple[Tier, int]]:
        return {
            (tier, page)
            for handle in self.moving
            for tier, pages in (
                (handle.source, handle.source_pages),
                (handle.target, handle.target_pages),
            )
            for page in pages
        }

    @rule(pages=st.sets(st.integers(0, NUM_PAGES - 1), min_size=1), seed=st.integers(0, 2**32 - 1))
    def compute(self, pages: set[int], seed: int) -> None:
        """The device writes pages."""
        free = sorted({(DEVICE, page) for page in pages} - self.busy(), key=lambda key: key[1])
        for key, row in zip(free, payload_of(len(free), seed)):
            self.device[key[1]] = row
            self.model[key] = row.tobytes()

    @precondition(lambda self: self.model)
    @rule(
        route=st.sampled_from(ROUTES),
        most=st.integers(1, 5),
        shuffle=st.randoms(use_true_random=False),
    )
    def move(self, route: tuple[Tier, Tier], most: int, shuffle: random.Random) -> None:
        source, target = route
        busy = self.busy()
        sources = [page for tier, page in self.model if tier is source]
        sources = sorted(page for page in sources if (source, page) not in busy)
        shuffle.shuffle(sources)
        sources = sources[:most]
        taken = busy | {(source, page) for page in sources}
        targets = [page for page in range(NUM_PAGES) if (target, page) not in taken]
        shuffle.shuffle(targets)
        count = min(len(sources), len(targets))
        sources, targets = sources[:count], targets[:count]
        if not count:
            return
        staging = None
        if source is DEVICE:
            if sum(handle.target is DEVICE for handle in self.moving) >= self.BUFFERS:
                self.settle()  # they may hold every buffer until they are consumed
            assert self.bench.transfer_worker.reserve(LONG_US)
            staging = padded(self.device[sources])
        payload = [self.model[source, page] for page in sources]
        for page in targets:
            self.model.pop((target, page), None)
        self.moving[
            self.bench.transfer_worker.submit(source, sources, target, targets, staging)
        ] = payload

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        handle = list(self.moving)[data.draw(st.integers(0, len(self.moving) - 1))]
        handle.abandon()
        self.dropped.add(handle)

    @rule()
    def settle(self) -> None:
        while self.moving:
            assert self.bench.transfer_worker.wait(LONG_US)
            for handle in self.bench.transfer_worker.ended():
                payload = self.moving.pop(handle)
                assert handle.error is None
                if handle in self.dropped:  # abandoned, or landed before that
                    assert handle.staged is None
                    continue
                assert handle.state is TransferState.LANDED
                if handle.target is DEVICE:
                    staged = handle.consume()
                    self.device[list(handle.target_pages)] = staged[: len(payload)]
                keys = [(handle.target, page) for page in handle.target_pages]
                self.model.update(zip(keys, payload))
        for (tier, page), row in self.model.items():
            if tier is DEVICE:
                assert self.device[page].tobytes() == row
            else:
                store = self.bench.host if tier is HOST else self.bench.disk
                assert store.read([page]).tobytes() == row

    def teardown(self) -> None:
        with self.context:
            self.settle()
            assert self.bench.num_pending == 0
            assert self.bench.num_free_buffers() == self.BUFFERS


TestMoves = MovesMachine.TestCase
TestMoves.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
