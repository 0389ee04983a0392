"""The allocator of extents: every page once, in extents as long as the room allows."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.kv.extents import ExtentAllocator
from jaxserve.kv.offload.stores import page_extents


def num_extents(pages: list[int]) -> int:
    """Copies that it takes to move these pages."""
    return sum(1 for _ in page_extents(pages))


def check_joined(allocator: ExtentAllocator, free: set[int]) -> None:
    """Runs that touch have been joined: what goes on after the page before one gets all of it, and
    newcomers get the longest first, to within a factor of two."""
    whole = [extent for _, extent in page_extents(sorted(free))]
    for extent in whole:
        pages = copy.deepcopy(allocator).allocate(extent.stop - extent.start, extent.start - 1)
        assert pages == [*range(extent.start, extent.stop)]
    if whole:
        longest = max(extent.stop - extent.start for extent in whole)
        assert num_extents(copy.deepcopy(allocator).allocate(-(-longest // 2))) == 1


@given(
    first=st.integers(0, 3),
    num_pages=st.integers(0, 40),
    operations=st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 10**6))),
)
def test_no_page_is_given_twice_and_none_is_lost(first, num_pages, operations):
    allocator = ExtentAllocator(first, first + num_pages)
    free = set(range(first, first + num_pages))
    taken: list[int] = []
    for allocates, count, choice in operations:
        if allocates and count <= len(free):
            after = choice % (num_pages + 6) - 2 if choice % 2 else None
            pages = allocator.allocate(count, after)
            assert len(pages) == len(set(pages)) == count and set(pages) <= free
            free -= set(pages)
            taken += pages
        else:
            chooser = random.Random(choice)
            back = chooser.sample(taken, min(count, len(taken)))
            allocator.free(back)
            taken = [page for page in taken if page not in back]
            free |= set(back)
        assert allocator.num_free == len(free)
        check_joined(allocator, free)
    allocator.free(taken)
    assert allocator.allocate(num_pages) == list(range(first, first + num_pages))


def test_goes_on_after_a_page_where_that_is_free():
    allocator = ExtentAllocator(1, 100)
    mine = allocator.allocate(3)
    others = allocator.allocate(2)
    for _ in range(5):
        mine += allocator.allocate(1, mine[-1])
    assert num_extents(mine) == 1
    others += allocator.allocate(2, others[-1])
    assert num_extents(others) == 1
    allocator.free(others[2:])
    assert allocator.allocate(2, others[1]) == others[2:]


def test_goes_elsewhere_when_what_follows_is_taken():
    allocator = ExtentAllocator(0, 10)
    assert allocator.allocate(4) == [0, 1, 2, 3]
    page = allocator.allocate(1, 3)
    assert page == [4]
    assert allocator.allocate(2, 3) != [4, 5] and allocator.num_free == 3


def test_goes_on_as_far_as_it_can_and_then_elsewhere():
    allocator = ExtentAllocator(0, 20)
    taken = allocator.allocate(20)
    allocator.free([3, 4, *taken[10:18]])
    pages = allocator.allocate(5, 2)
    assert pages[:2] == [3, 4]
    assert num_extents(pages) == 2


def test_newcomers_leave_room_to_grow():
    """A dozen sequences that grow by turns, in a pool that they fill to a third, stay whole."""
    allocator = ExtentAllocator(1, 513)
    sequences = [allocator.allocate(4) for _ in range(12)]
    for _ in range(10):
        for pages in sequences:
            pages += allocator.allocate(1, pages[-1])
    assert [num_extents(pages) for pages in sequences] == [1] * 12


@pytest.mark.parametrize("seed", range(5))
def test_runs_are_long_under_a_low_load(seed):
    """Sequences come, grow and go at about half use; a page-wise free list would make nearly every
    page an extent of its own."""
    chooser = random.Random(seed)
    allocator = ExtentAllocator(1, 1025)
    sequences: list[list[int]] = []
    num_pages = num_copies = 0
    for step in range(3000):
        if allocator.num_free > 512:
            sequences.append(allocator.allocate(chooser.randint(1, 16)))
        growing = chooser.choice(sequences)
        growing += allocator.allocate(1, growing[-1])
        if len(sequences) > 40 or allocator.num_free < 400:
            gone = sequences.pop(chooser.randrange(len(sequences)))
            if step > 1000:
                num_pages += len(gone)
                num_copies += num_extents(gone)
            allocator.free(gone)
    assert num_pages > 5000
    assert num_pages / num_copies > 8


def test_single_pages_when_there_is_nothing_else():
    allocator = ExtentAllocator(0, 64)
    allocator.allocate(64)
    odd = list(range(1, 64, 2))
    allocator.free(odd)
    pages = allocator.allocate(32)
    assert sorted(pages) == odd and num_extents(pages) == 32
    assert allocator.num_free == 0
    allocator.free([7])
    assert allocator.allocate(1, 20) == [7]


def test_the_same_calls_give_the_same_pages():
    def pages(seed: int) -> list[list[int]]:
        chooser = random.Random(seed)
        allocator, given = ExtentAllocator(0, 50), []
        for _ in range(200):
            if chooser.random() < 0.6 and allocator.num_free >= 5:
                given.append(allocator.allocate(chooser.randint(1, 5), chooser.randrange(50)))
            elif given:
                allocator.free(given.pop(chooser.randrange(len(given))))
        return given

    assert pages(1) == pages(1) != pages(2)


def test_an_empty_allocator_has_nothing():
    allocator = ExtentAllocator(3, 3)
    assert allocator.num_free == 0
    assert allocator.allocate(0) == []
