"""Groups of decodes that read shared pages together: what they hold, and that they are the best."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import PagePool
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.decode_groups import PrefixCost, group_decodes
from jaxserve.scheduler.scheduler import Scheduler

PAGE = 4
FREE = PrefixCost(once=1.0, in_group=0.0, row=0.0, group=0.0, token_bytes=8)
COSTLY = PrefixCost(once=1.25, in_group=0.25, row=1.5, group=3.0)

tables = st.lists(st.lists(st.integers(1, 2), max_size=6), min_size=1, max_size=6)
"""Few pages, so that beginnings are often equal. Where they differ each page is another one."""


def sequence(number: int, token_ids: list[int], **fields) -> Sequence:
    return Sequence(number, f"r{number}", 0, token_ids, SamplingParams(max_tokens=8), 0, **fields)


def decode(slot: int, branches: list[int], more: int, num_drafts: int = 0) -> ScheduledChunk:
    """A decode whose pages are numbered by the branches that lead to them: a tree."""
    pages, number = [], 0
    for branch in branches:
        number = number * 3 + branch
        pages.append(number)
    start = len(pages) * PAGE + more
    own = [10**6 + slot * 100 + i for i in range(2)]
    seq = sequence(slot, list(range(start + 1)))
    return ScheduledChunk(seq, start, 1, True, 0, slot, [*pages, *own], 0, num_drafts)


@st.composite
def decodes(draw: st.DrawFn) -> list[ScheduledChunk]:
    more = st.integers(0, PAGE - 1)
    found = [decode(slot, table, draw(more)) for slot, table in enumerate(draw(tables))]
    return sorted(found, key=lambda chunk: -chunk.start)


def gain(groups, cost) -> float:
    return sum(cost.gain(count, pages * PAGE) for _, count, pages in groups)


def best_gain(chunks, cost) -> float:
    """By trying every assignment of decodes to groups."""
    best = 0.0
    for labels in itertools.product(range(len(chunks) // 2 + 1), repeat=len(chunks)):
        total = 0.0
        for label in set(labels) - {0}:
            own = [chunk for chunk, of in zip(chunks, labels) if of == label]
            prefixes = [chunk.pages[: chunk.start // PAGE] for chunk in own]
            pages = zip(*prefixes)
            shared = sum(1 for _ in itertools.takewhile(lambda page: len({*page}) == 1, pages))
            total += cost.gain(len(own), shared * PAGE) if len(own) > 1 else 0
        best = max(best, total)
    return best


@given(decodes(), st.sampled_from([FREE, COSTLY]))
def test_groups_share_the_pages_that_they_say(chunks, cost):
    ordered, groups = group_decodes(chunks, PAGE, cost)
    assert sorted(chunk.slot for chunk in ordered) == list(range(len(chunks)))
    after = 0
    for first, count, num_pages in groups:
        assert first == after and count > 1 and num_pages > 0
        after = first + count
        rows = ordered[first:after]
        assert len({tuple(chunk.pages[:num_pages]) for chunk in rows}) == 1
        assert all(num_pages * PAGE <= chunk.start for chunk in rows)
        assert cost.gain(count, num_pages * PAGE) > 0
    for run in (*(ordered[first : first + count] for first, count, _ in groups), ordered[after:]):
        assert [chunk.start for chunk in run] == sorted((c.start for c in run), reverse=True)


@settings(deadline=None, max_examples=60)
@given(decodes(), st.sampled_from([FREE, COSTLY]))
def test_no_other_groups_save_more(chunks, cost):
    _, groups = group_decodes(chunks, PAGE, cost)
    assert gain(groups, cost) == pytest.approx(best_gain(chunks, cost))


def test_without_gain_the_order_stays():
    chunks = [decode(slot, [1], 0) for slot in range(3)]
    assert group_decodes(chunks, PAGE, COSTLY) == (chunks, ())
    assert len(group_decodes(chunks, PAGE, FREE)[1]) == 1
    assert group_decodes([], PAGE, FREE) == ([], ())


def test_pages_read_once_and_alone_count_every_token_of_a_decode():
    chunks = [decode(slot, [1, 2, 1], 0, num_drafts=slot) for slot in range(3)]
    chunks += [decode(3 + slot, [2, 1], 0) for slot in range(2)]
    ordered, groups = group_decodes(chunks, PAGE, FREE)
    plan = StepPlan(tuple(ordered), decode_groups=groups)
    assert plan.prefix_page_reads == (3 + 2, 3 * (1 + 2 + 3) + 2 * 2)
    assert StepPlan(tuple(chunks)).prefix_page_reads == (0, 0)


def scheduled(prefix_cost: PrefixCost | None) -> tuple[Scheduler, StepPlan]:
    """The first decodes of three prompts with 8 tokens in common and one without."""
    kv = KVManager(PagePool(65, PAGE))
    scheduler = Scheduler(SchedulerConfig("sarathi", 4, 68, 64, 64, prefix_cost=prefix_cost), kv)
    common = list(range(100, 108))
    prompts = [[*range(12)], *([*common, 7 * n, 5] for n in range(3))]
    for number, prompt in enumerate(prompts):
        scheduler.add(sequence(number, prompt))
    for _ in range(20):
        plan = scheduler.schedule()
        if len(plan.decodes) == 4:
            return scheduler, plan
        for chunk in (*plan.decodes, *plan.prefills):
            if chunk.samples:
                scheduler.collect(chunk, 7)
    raise AssertionError("they never decode together")


def test_a_plan_has_the_groups_and_the_scheduler_their_bytes():
    scheduler, plan = scheduled(FREE)
    assert plan.decode_groups == ((0, 3, 2),)
    assert [chunk.seq.seq_id for chunk in plan.decodes][3] == 0
    assert scheduler.prefix_kv_bytes(plan) == (2 * PAGE * 8, 3 * 2 * PAGE * 8)


def test_no_cost_no_groups():
    scheduler, plan = scheduled(None)
    assert plan.decode_groups == ()
    assert scheduler.prefix_kv_bytes(plan) == (0, 0)
