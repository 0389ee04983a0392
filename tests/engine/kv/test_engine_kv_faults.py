"""Moves that are late, fail or lie: the pages are computed again, it is counted, no more."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import resource
import signal
import threading
import time

import numpy as np
import pytest
from kv_engines import Preempter, count, evict_all, settle, token_ids
from patience import PATIENCE_S
from tiny_engines import LONGEST, Arrival, assert_idle, drive, generate

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.kv.tier import Tier

SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=LONGEST, ignore_eos=True)
GREEDY = dataclasses.replace(SEEDED, temperature=0)


class Copies:
    """The transfer worker of an engine, whose copies between tiers can be made to misbehave."""

    def __init__(self, engine, monkeypatch):
        self.engine = engine
        self._monkeypatch = monkeypatch

    def wrap(self, name, around):
        """Has `around(copy, *arguments)` called in place of a copy: download, upload, or
        a tier's read or write."""
        kv_executor = self.engine._kv_executor
        if name in ("download", "upload"):
            owner, name = kv_executor._worker, f"_{name}"
        else:
            tier, name = name.split()
            owner = kv_executor.stores[Tier(tier)]
        copy = getattr(owner, name)
        self._monkeypatch.setattr(owner, name, lambda *given: around(copy, *given))


@pytest.fixture
def copies_of(monkeypatch):
    with contextlib.ExitStack() as stack:

        def get(llm):
            stack.callback(settle, llm.engine)
            stack.callback(monkeypatch.undo)
            return Copies(llm.engine, monkeypatch)

        yield get


@pytest.fixture
def llm(kv_llm_for):
    with impatient(kv_llm_for(host=12, disk=64, preemption="swap")) as llm:
        yield llm


@pytest.fixture
def disk_llm(kv_llm_for):
    with impatient(kv_llm_for(disk=64, preemption="swap")) as llm:
        yield llm


@contextlib.contextmanager
def impatient(llm):
    """It gives up what is slower than computing, as for users."""
    offload = llm.engine.kv._offload
    patient = vars(offload).pop("_timeout_us")
    yield llm
    assert_idle(llm.engine)
    offload._timeout_us = patient


def fallbacks(engine):
    return dict(engine.get_metrics()["jaxserve:kv_fallbacks_total"].value)


def mixture(llama):
    arrivals = [
        Arrival(prompt, SEEDED if step % 3 else GREEDY, 2 * step)
        for step, prompt in enumerate(llama.prompts[3::2])
    ]
    several = dataclasses.replace(SEEDED, n=3, max_tokens=6)
    return [*arrivals, Arrival(llama.prompts[8], several, 4)]


def check(llama, alone, llm):
    """All tokens of sequences that lose their pages time and again. Not so often that one whose
    pages never come back would not get to its end."""
    for seed in range(2):
        arrivals = mixture(llama)
        outputs = drive(llm.engine, arrivals, Preempter(llm.engine, seed, evicts=True, share=0.3))
        for arrival, output in zip(arrivals, outputs):
            assert token_ids(output) == alone.tokens(arrival.prompt, arrival.params)
            assert output.error is None


COPIES = ("download", "upload", "host write", "host read", "disk write", "disk read")


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_fails_now_and_then(llama, alone, llm, copies_of, name):
    calls = []

    def fail(copy, *given):
        calls.append(name)
        if len(calls) % 3 == 1:
            raise RuntimeError("the copy went wrong")
        return copy(*given)

    copies_of(llm).wrap(name, fail)
    before = fallbacks(llm.engine)["failed"]
    check(llama, alone, llm)
    assert len(calls) > 3
    # What failed after its sequence had given it up, or ended, is counted all the same.
    assert fallbacks(llm.engine)["failed"] - before >= len(calls) // 3


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_always_fails(llama, alone, llm, copies_of, name):
    def fail(copy, *given):
        raise MemoryError

    copies_of(llm).wrap(name, fail)
    before = fallbacks(llm.engine)["failed"]
    check(llama, alone, llm)
    assert fallbacks(llm.engine)["failed"] > before


@pytest.mark.parametrize("name", ["download", "upload", "disk read"])
def test_a_copy_that_takes_several_steps(llama, alone, llm, copies_of, name):
    """The sequence that waits for it does not run, the others do."""
    steps = []

    def linger(copy, *given):
        result, until = copy(*given), len(steps) + 3
        deadline = time.monotonic() + 0.01
        while len(steps) < until and time.monotonic() < deadline:
            time.sleep(0.0002)
        return result

    copies_of(llm).wrap(name, linger)
    arrivals = mixture(llama)
    preempter = Preempter(llm.engine, evicts=True)

    def between():
        steps.append(None)
        preempter()

    outputs = drive(llm.engine, arrivals, between)
    for arrival, output in zip(arrivals, outputs):
        assert token_ids(output) == alone.tokens(arrival.prompt, arrival.params)


def test_a_fetch_slower_than_computing_is_given_up(llama, alone, llm, copies_of):
    prompt = llama.prompts[-1]
    generate(llm, prompt, SEEDED)
    evict_all(llm.engine)
    hang = threading.Event()

    def wait(copy, *given):
        hang.wait(PATIENCE_S)
        return copy(*given)

    copies = copies_of(llm)
    copies.wrap("upload", wait)
    before = fallbacks(llm.engine)["slow"]
    try:
        output = generate(llm, prompt, SEEDED)
    finally:
        hang.set()
    assert token_ids(output) == alone.tokens(prompt, SEEDED)
    assert output.metrics.cached_tokens == 0
    assert fallbacks(llm.engine)["slow"] > before
    settle(llm.engine)
    again = generate(llm, prompt, SEEDED)
    assert token_ids(again) == alone.tokens(prompt, SEEDED)


def test_others_run_while_a_fetch_hangs(llama, alone, llm, copies_of, monkeypatch):
    prompt, other = llama.prompts[-1], llama.prompts[5]
    generate(llm, prompt, SEEDED)
    evict_all(llm.engine)
    hang = threading.Event()

    def wait(copy, *given):
        hang.wait(PATIENCE_S)
        return copy(*given)

    copies_of(llm).wrap("upload", wait)
    engine = llm.engine
    monkeypatch.setattr(engine.kv._offload, "_timeout_us", lambda *given: PATIENCE_S * 1_000_000)
    try:
        stuck = engine.add("stuck", prompt, SEEDED)
        request = engine.add("other", other, SEEDED)
        for _ in range(100):
            engine.step()
            if request.finished:
                break
        assert request.finished and not stuck.finished
        assert token_ids(engine.output(request)) == alone.tokens(other, SEEDED)
        hang.set()
        while not stuck.finished:
            engine.step()
        assert token_ids(engine.output(stuck)) == alone.tokens(prompt, SEEDED)
    finally:
        hang.set()
        engine.abort("stuck")
        engine.abort("other")
        while engine.has_work:
            engine.step()


@pytest.mark.parametrize("name", ["download", "host write", "disk write"])
def test_a_save_that_hangs_does_not_stop_decoding(llama, alone, llm, copies_of, name):
    """Staging buffers run out; page bytes are then lost, and not waited for at each step."""
    hang, waited_for = threading.Event(), []

    def wait(copy, *given):
        if not hang.wait(PATIENCE_S):
            waited_for.append(name)
        return copy(*given)

    copies_of(llm).wrap(name, wait)
    try:
        check(llama, alone, llm)
    finally:
        hang.set()
    assert not waited_for


# Disks


def corrupt(store, byte=0):
    """Flips a bit in each page of the file, behind the store's back."""
    for page in range(store.num_pages):
        offset = page * store.page_bytes + byte
        (old,) = os.pread(store._file.fileno(), 1, offset)
        os.pwrite(store._file.fileno(), bytes([old ^ 0x10]), offset)


def cut_short(store):
    """Loses all that was written."""
    os.ftruncate(store._file.fileno(), 0)


def zero(store):
    for page in range(store.num_pages):
        os.pwrite(store._file.fileno(), bytes(store.page_bytes), page * store.page_bytes)


@pytest.mark.parametrize("damage", [corrupt, cut_short, zero])
def test_a_damaged_page_is_computed_again(llama, alone, disk_llm, damage):
    prompt = llama.prompts[-1]
    engine = disk_llm.engine
    generate(disk_llm, prompt, SEEDED)
    evict_all(engine)
    assert count(engine, "kv_offload_pages", "disk") > 25
    damage(engine._kv_executor.stores[Tier.DISK])
    before = fallbacks(engine)["failed"]
    output = generate(disk_llm, prompt, SEEDED)
    assert token_ids(output) == alone.tokens(prompt, SEEDED)
    assert output.metrics.cached_tokens == 0
    assert fallbacks(engine)["failed"] > before
    # It is never tried again: its KV was given up.
    before = fallbacks(engine)["failed"]
    generate(disk_llm, prompt, SEEDED)
    assert fallbacks(engine)["failed"] == before


def test_what_comes_before_a_damaged_page_is_used(llama, alone, disk_llm):
    prompt = llama.prompts[-1]
    engine = disk_llm.engine
    generate(disk_llm, prompt, SEEDED)
    evict_all(engine)
    store = engine._kv_executor.stores[Tier.DISK]
    path = nodes_of(engine, prompt)
    offset = path[18].lower[Tier.DISK] * store.page_bytes
    os.pwrite(store._file.fileno(), b"damaged", offset)
    output = generate(disk_llm, prompt, SEEDED)
    assert token_ids(output) == alone.tokens(prompt, SEEDED)
    # Sixteen pages move at once: the second move failed.
    assert output.metrics.cached_tokens == 16 * 4


def nodes_of(engine, prompt):
    """The full pages of a prompt, in order."""
    by_parent = {}
    for node in engine.kv.tree:
        by_parent.setdefault(node.parent, []).append(node)
    path, parents = [], [node for node in by_parent if node.parent is None]
    tokens = np.asarray(prompt, ">u4").tobytes()
    while parents:
        found = [
            node
            for parent in parents
            for node in by_parent.get(parent, [])
            if node.num_tokens == 4 and tokens[16 * len(path) : 16 * len(path) + 16] == node.tokens
        ]
        path += found
        parents = found
    return path


def test_a_disk_that_is_full(llama, alone, disk_llm, copies_of):
    """From the midst of a write on; and then there is room again."""
    copies = copies_of(disk_llm)
    engine = disk_llm.engine
    full = [True]

    def refuse(copy, pages, payload):
        if full[0]:
            copy(pages[:1], payload)
            raise OSError(errno.ENOSPC, "No space left on device")
        return copy(pages, payload)

    copies.wrap("disk write", refuse)
    before = fallbacks(engine)["failed"]
    check(llama, alone, disk_llm)
    settle(engine)
    assert count(engine, "kv_offload_pages", "disk") == 0
    assert fallbacks(engine)["failed"] > before
    full[0] = False
    check(llama, alone, disk_llm)
    settle(engine)
    assert count(engine, "kv_offload_pages", "disk") > 0


def test_a_full_disk_leaves_the_host_tier_usable(llama, alone, llm, copies_of):
    """All pages of the host tier wait to be spilled to a full disk, and are fetched meanwhile."""

    def refuse(copy, *given):
        raise OSError(errno.ENOSPC, "No space left on device")

    copies_of(llm).wrap("disk write", refuse)
    engine, prompt = llm.engine, llama.prompts[-1][:47]
    params = dataclasses.replace(SEEDED, max_tokens=2)
    generate(llm, prompt, params)
    engine.kv.evict(engine.kv.pool.capacity)
    for _ in range(5):
        engine.step()
    again = engine.add("again", prompt, params)
    end = time.monotonic() + PATIENCE_S
    while not again.finished and time.monotonic() < end:
        engine.step()
    finished = again.finished
    engine.abort("again")
    assert finished
    assert token_ids(engine.output(again)) == alone.tokens(prompt, params)


def test_a_disk_that_is_full_in_earnest(llama, alone, disk_llm):
    """The system's own refusal, by the limit on the size of files."""
    llm = disk_llm
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    page_bytes = llm.engine._kv_executor.stores[Tier.DISK].page_bytes
    before = fallbacks(llm.engine)["failed"]
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * page_bytes + 100, limits[1]))
        check(llama, alone, llm)
        settle(llm.engine)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert fallbacks(llm.engine)["failed"] > before


# Ends


def test_closing_while_pages_move(llama):
    threads = threading.active_count()
    llm = llama.load(debug_kv=True, preemption="swap", host_kv_bytes=1 << 16)
    release = threading.Event()
    llm.engine._kv_executor._worker._download = lambda staging: (
        release.wait(PATIENCE_S) and np.asarray(staging)
    )
    generate(llm, llama.prompts[-1], dataclasses.replace(SEEDED, max_tokens=2))
    llm.engine.kv.evict(30)
    llm.engine.step()
    assert llm.engine.kv.num_in_flight_transfers
    release.set()
    llm.close()
    llm.close()
    assert threading.active_count() == threads


def test_a_load_that_is_refused_leaves_no_thread(llama, tmp_path):
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="cannot write to the directory"):
        llama.load(disk_kv_dir=tmp_path / "none", disk_kv_bytes=1 << 16, host_kv_bytes=1 << 16)
    assert threading.active_count() == threads
