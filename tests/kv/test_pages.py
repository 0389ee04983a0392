"""The page pool, as a state machine against a plain model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.core.errors import ConfigError
from jaxserve.kv.pages import TRASH_PAGE, PageError, PagePool


class PoolMachine(RuleBasedStateMachine):
    """The model: how often each page that is not free is referenced."""

    @initialize(num_pages=st.integers(2, 20), page_size=st.integers(1, 9))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.refs: dict[int, int] = {}

    def in_use(self) -> list[int]:
        return [page for page, refs in self.refs.items() if refs]

    def cached(self) -> list[int]:
        return [page for page, refs in self.refs.items() if not refs]

    @rule(count=st.integers(0, 8), after=st.none() | st.integers(-1, 20))
    def allocate(self, count: int, after: int | None) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(PageError, match=f"{count} pages .* {free} free"):
                self.pool.allocate(count, after)
        else:
            pages = self.pool.allocate(count, after)
            assert len(set(pages)) == count and not set(pages) & set(self.refs)
            assert all(TRASH_PAGE < page < self.pool.num_pages for page in pages)
            self.refs.update(dict.fromkeys(pages, 1))

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(list(self.refs)))
        self.pool.share(page)
        self.refs[page] += 1

    @precondition(lambda self: self.in_use())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.in_use()))
        self.refs[page] -= 1
        assert self.pool.drop(page) == self.refs[page]

    @precondition(lambda self: self.cached())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.cached()))
        self.pool.free(page)
        del self.refs[page]

    @rule(page=st.integers(-2, 21))
    def refuses_what_is_not_taken(self, page: int) -> None:
        if page not in self.refs:
            for operation in (self.pool.share, self.pool.drop, self.pool.free):
                with pytest.raises(PageError, match=f"page {page} is not taken"):
                    operation(page)

    @rule(page=st.integers(1, 20))
    def refuses_what_corrupts(self, page: int) -> None:
        if self.refs.get(page):
            with pytest.raises(PageError, match=f"page {page} is in use, {self.refs[page]} times"):
                self.pool.free(page)
        elif page in self.refs:
            with pytest.raises(PageError, match=f"page {page} has no reference"):
                self.pool.drop(page)

    @invariant()
    def balances(self) -> None:
        pool, num_cached = self.pool, len(self.cached())
        assert pool.num_cached == num_cached
        assert pool.num_used == len(self.refs) - num_cached
        assert pool.num_free == pool.capacity - len(self.refs)
        assert pool.num_available == pool.num_free + num_cached
        assert [pool.refs(page) for page in self.refs] == list(self.refs.values())

    def teardown(self) -> None:
        for page, refs in self.refs.items():
            for _ in range(refs):
                self.pool.drop(page)
            self.pool.free(page)
        whole = self.pool.allocate(self.pool.capacity)
        assert sorted(whole) == list(range(1, self.pool.num_pages))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_wastes_less_than_a_page(tokens: int, pages: int):
    assert PagePool(4, 16).pages_for(tokens) == pages


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (0, 16), (4, 0)])
def test_refuses_a_pool_without_usable_pages(num_pages: int, page_size: int):
    with pytest.raises(ConfigError):
        PagePool(num_pages, page_size)
