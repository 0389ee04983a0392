"""Schedules of sequences longer than the pool: what each step reads, and who holds which page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import PromptTooLongError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import Buckets
from jaxserve.kv.host_pages import HostKV, HostPages
from jaxserve.kv.invariants import check_invariants
from jaxserve.kv.layout import KVGroup, KVLayout
from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import PageError, PagePool
from jaxserve.runtime.planning.memory import host_kv
from jaxserve.scheduler.admission import AdmissionRule
from jaxserve.scheduler.policies import POLICIES
from jaxserve.scheduler.scheduler import Scheduler, SchedulerConfig

CONTEXT = 200
POISON = -1


def layout_of(page_size, chunk, windows):
    return KVLayout(page_size, (KVGroup(None), *map(KVGroup, windows)), chunk)


class World:
    """A scheduler, and pages of the device and the host that have the number of each token."""

    def __init__(self, page_size, chunk, capacity, host_pages, rows, policy="sarathi", windows=()):
        """`windows` are of KV groups beside the first."""
        layout = layout_of(page_size, chunk, windows)
        self.limits = host_kv(layout, 1 + capacity, host_pages)
        self.host_pages = HostPages(self.limits)
        self.kv = KVManager(
            PagePool(1 + capacity, page_size), layout=layout, host_pages=self.host_pages
        )
        timed = {}
        if POLICIES[policy].chunk == "timed":
            buckets = Buckets(tuple(range(1, rows + 1)), (0, rows), (chunk,))
            timed = {"target_step_us": 50, "buckets": buckets}
        config = SchedulerConfig(
            policy=policy,
            max_num_seqs=rows,
            max_num_batched_tokens=rows + chunk,
            max_prefill_tokens=chunk,
            max_model_len=CONTEXT,
            min_chunk_tokens=1,
            **timed,
        )
        self.scheduler = Scheduler(config, self.kv)
        self.device = np.full((1 + capacity, page_size), POISON)
        self.host = np.full((host_pages, page_size), POISON)
        self.most_running = 0

    def add(self, seq_id, prompt, max_tokens, priority=0):
        """The new sequence; None if it can never have the pages it asks for."""
        seq = Sequence(
            seq_id=seq_id,
            request_id=f"r{seq_id}",
            index=0,
            prompt_token_ids=list(range(3, 3 + prompt)),
            params=SamplingParams(max_tokens=max_tokens),
            arrival_us=seq_id,
            priority=priority,
            salt=str(seq_id).encode(),
        )
        length = prompt + max_tokens - 1
        if self.limits.on_host(length) > self.limits.num_pages:
            pages = self.kv.layout.pages_for(length)
            with pytest.raises(PromptTooLongError, match=f"needs {pages} KV pages"):
                self.scheduler.add(seq)
            return None
        self.scheduler.add(seq)
        return seq

    def step(self):
        """Plans a step, copies pages, then writes and reads what its chunks do."""
        plan = self.scheduler.schedule()
        operations = self.kv.operations()
        for device, host in operations.to_host:
            self.host[host] = self.device[device]
        self.device[operations.freed] = POISON
        chunks = (*plan.decodes, *plan.prefills)
        for chunk in chunks:
            for group in range(len(self.kv.layout.groups)):
                pages, since = self._pages(chunk, group)
                assert since <= chunk.start
                for position in range(chunk.start, chunk.stop):
                    page, offset = divmod(position, self.kv.pool.page_size)
                    pages[page][offset] = self._number(chunk.seq, position)
        for chunk in chunks:
            for group, kind in enumerate(self.kv.layout.groups):
                pages, _ = self._pages(chunk, group)
                first = 0 if kind.window is None else max(0, chunk.start + 1 - kind.window)
                read = np.concatenate(pages)[first : chunk.stop].tolist()
                assert read == [self._number(chunk.seq, each) for each in range(first, chunk.stop)]
        for chunk in chunks:
            if chunk.samples:
                self.scheduler.collect(chunk, 7)
                if chunk.seq.num_output == chunk.seq.params.max_tokens:
                    self.scheduler.finish(chunk.seq, "length")
        self.most_running = max(self.most_running, len(chunks))
        check_invariants(self.kv, self.scheduler.tables.values())

    def _pages(self, chunk, group):
        """Its pages of a KV group, wherever they are, and the tokens on the host."""
        host_pages = chunk.host_pages[group] if chunk.host_pages else ()
        on_host = [self.host[page] for page in host_pages]
        pages = [chunk.pages, *(pages for pages, _ in chunk.others)][group]
        in_pool = [self.device[page] for page in pages[len(on_host) :]]
        return on_host + in_pool, len(on_host) * self.kv.pool.page_size

    @staticmethod
    def _number(seq, position):
        return seq.seq_id * CONTEXT + position

    def run(self):
        for _ in range(4000):
            if not self.scheduler.has_work:
                break
            self.step()
        else:
            raise AssertionError("some sequence never ends")
        assert self.host_pages.num_used == self.kv.pool.num_used == 0


jobs = st.lists(
    st.tuples(st.integers(1, 120), st.integers(1, 24), st.integers(0, 2), st.integers(0, 30)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    jobs=jobs,
    page_size=st.integers(1, 5),
    chunk=st.integers(1, 12),
    windows=st.sampled_from([(), (), (7,), (None,), (None, 3, 20)]),
)
def test_every_step_reads_what_was_written(policy, data, jobs, page_size, chunk, windows):
    layout = layout_of(page_size, chunk, windows)
    least = layout.num_full * layout.chunk_pages + layout.window_pages
    capacity = least + data.draw(st.integers(0, 8), "more pages")
    host_pages = data.draw(st.integers(0, 150 // page_size), "host pages")
    rows = data.draw(st.integers(1, 3))
    world = World(page_size, chunk, capacity, host_pages, rows, policy, windows)
    waiting = sorted(enumerate(jobs), key=lambda job: job[1][3])
    while waiting or world.scheduler.has_work:
        if waiting:
            seq_id, (prompt, max_tokens, priority, _) = waiting.pop(0)
            world.add(seq_id, prompt, max_tokens, priority)
        for _ in range(data.draw(st.integers(1, 8))):
            if world.scheduler.has_work:
                world.step()
        running = world.scheduler.running
        if running and data.draw(st.booleans()):
            seq = data.draw(st.sampled_from(running))
            if data.draw(st.booleans()):
                world.scheduler.preempt(seq)
            else:
                world.scheduler.abort(seq.seq_id)
        if not waiting:
            break
    world.run()


def test_two_ten_times_the_pool_at_once():
    world = World(page_size=4, chunk=4, capacity=5, host_pages=2 * 48, rows=2)
    for seq_id in range(2):
        world.add(seq_id, 180, 20)
    world.run()
    assert world.most_running == 2


def test_one_that_waits_for_the_host_lets_those_of_the_pool_pass():
    """But no other that takes host pages, even if there are enough of them."""
    world = World(page_size=4, chunk=4, capacity=8, host_pages=38 + 7, rows=3)
    first, second = (world.add(seq_id, 150, 11) for seq_id in range(2))  # 38 on the host each
    third = world.add(2, 30, 7)  # 7
    short = world.add(3, 5, 2)
    while not short.finished:
        world.step()
    assert first.slot is not None and second.waiting and third.waiting
    while not second.started:
        world.step()
        assert third.started <= second.started
    assert first.finished
    world.run()
    assert {seq.finish_reason for seq in (first, second, third)} == {"length"}


@pytest.mark.parametrize(("host_pages", "fits"), [(37, False), (38, True), (39, True)])
def test_a_host_budget_of_a_page_less_refuses_that_request_alone(host_pages, fits):
    world = World(page_size=4, chunk=4, capacity=4, host_pages=host_pages, rows=2)
    other = world.add(0, 20, 4)
    seq = world.add(1, 150, 11)  # 160 tokens, on 40 pages, of which 2 stay in the pool
    assert (seq is not None) == fits
    world.run()
    assert other.finish_reason == "length"


def test_without_max_tokens_only_a_prompt_longer_than_the_pool_takes_the_host():
    world = World(page_size=4, chunk=4, capacity=4, host_pages=20, rows=2)
    for seq_id, (prompt, most) in enumerate([(5, 12), (16, 1), (17, 72)]):
        seq = Sequence(seq_id, "r", 0, list(range(prompt)), SamplingParams(max_tokens=None), 0)
        world.scheduler.add(seq)
        assert seq.max_tokens == most
        on_host = world.scheduler.tables[seq_id].num_host_pages
        assert on_host == (20 if prompt == 17 else 0)


def test_how_many_run_at_once():
    config = World(page_size=4, chunk=4, capacity=8, host_pages=30, rows=3).scheduler.config
    rule = AdmissionRule.of(config, 8, KVLayout(4), HostKV(8, 3, 30, KVLayout(4)))
    assert [rule.num_at_once(1 + 4 * pages) for pages in (2, 8, 9, 18, 19, 33, 34)] == [
        *(3, 1),  # in the pool
        *(2, 2, 1, 1),  # beside it: 3 pages each in the pool, all others on the host
        0,
    ]


def test_host_pages_are_freed_once():
    pages = HostPages(HostKV(4, 2, 3, KVLayout(4)))
    taken = pages.allocate(2)
    assert (pages.num_used, pages.num_free) == (2, 1)
    with pytest.raises(PageError, match="2 host pages requested, 1 free"):
        pages.allocate(2)
    pages.free(taken)
    with pytest.raises(PageError, match="is not taken"):
        pages.free(taken)
