"""The page pool, as a state machine against a plain model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.errors import ConfigError
from jaxserve.kv.pages import TRASH_PAGE, PageError, PagePool


class PoolMachine(RuleBasedStateMachine):
    """Owners hold lists of pages; the pool must agree with the sum of what they hold."""

    @initialize(num_pages=st.integers(2, 20), page_size=st.integers(1, 9))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(PageError, match=f"{count} pages .* {free} free"):
                self.pool.allocate(count)
            assert self.pool.num_free == free
        else:
            pages = self.pool.allocate(count)
            assert len(pages) == count
            self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.free(pages)
        if pages:
            with pytest.raises(PageError, match="not in use"):
                self.pool.free(pages[:1])

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def bad_free_changes_nothing(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from([pages for pages in self.owners if pages]))
        bad = data.draw(st.sampled_from([TRASH_PAGE, -1, self.pool.num_pages, pages[0]]))
        used = self.pool.num_used
        with pytest.raises(PageError):
            self.pool.free([*pages, bad])
        assert self.pool.num_used == used

    @invariant()
    def balances(self) -> None:
        held = [page for pages in self.owners for page in pages]
        assert len(set(held)) == len(held)
        assert all(TRASH_PAGE < page < self.pool.num_pages for page in held)
        assert self.pool.num_used == len(held)
        assert self.pool.num_free == self.pool.capacity - len(held)

    def teardown(self) -> None:
        for pages in self.owners:
            self.pool.free(pages)
        whole = self.pool.allocate(self.pool.capacity)
        assert sorted(whole) == list(range(1, self.pool.num_pages))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_order_is_deterministic_and_reuses_the_page_freed_last():
    pool = PagePool(8, 16)
    first, second = pool.allocate(2), pool.allocate(3)
    assert (first, second) == ([1, 2], [3, 4, 5])
    pool.free(first)
    pool.free(second)
    assert pool.allocate(5) == [3, 4, 5, 1, 2]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_wastes_less_than_a_page(tokens: int, pages: int):
    assert PagePool(4, 16).pages_for(tokens) == pages


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (0, 16), (4, 0)])
def test_refuses_a_pool_without_usable_pages(num_pages: int, page_size: int):
    with pytest.raises(ConfigError):
        PagePool(num_pages, page_size)
