"""KV groups: what they cost, against counting, and the choice among them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_bench import PROMPT, Bench

from jaxserve.core.model_config import KVSpec
from jaxserve.kv.layout import KVGroup, KVLayout


def specs(*windows: int | None) -> list[KVSpec]:
    return [KVSpec(2, 16, window) for window in windows]


def layout(
    *windows: int | None, page_size: int = 4, chunk: int = 8, context: int = 256
) -> KVLayout:
    return KVLayout.of(specs(*windows), page_size, context, chunk)


@pytest.mark.parametrize("windows", [(None,) * 3, (256,) * 3, (None, 300, 256)])
def test_without_a_window_in_the_context_there_is_one_group_as_before(windows):
    groups = layout(*windows)
    assert groups.groups == (KVGroup(None, (0, 1, 2)),) and not groups.windowed
    assert groups.layers_per_page == 3 and [place.array for place in groups.places] == [0, 1, 2]
    assert groups.pages_for(17) == 5 and groups.longest(5, 256) == 20


@pytest.mark.parametrize(
    "windows, groups",
    [
        ((8,) * 4, [(8, (0, 1, 2, 3))]),  # Mistral
        ((None, None, 8, 8), [(None, (0, 1)), (8, (2, 3))]),  # Qwen2's upper layers
        ((8, None) * 3, [(None, (1, 3, 5)), (8, (0, 2, 4))]),  # gpt-oss, Gemma 2
        ((*(8,) * 5, None) * 2, [(None, (5, 11)), *((8, pair) for pair in (  # Gemma 3
            (0, 1), (2, 3), (4, 6), (7, 8), (9, 10)))]),
        ((None, 8, 16), [(None, (0,)), (8, (1,)), (16, (2,))]),
    ],
)  # fmt: skip
def test_layers_of_a_window_form_groups_of_one_size(windows, groups):
    found = layout(*windows)
    assert [(group.window, group.layers) for group in found.groups] == groups
    places = [(place.group, place.array) for place in found.places]
    assert len(set(places)) == len(windows)
    for layer, (group, array) in enumerate(places):
        assert found.groups[group].layers[array] == layer


def test_a_window_that_saves_nothing_makes_no_group():
    assert not layout(None, 8, chunk=512).windowed
    kept = KVLayout.of(specs(None, 8), 4, 256, 512, keeps_windows=True)
    assert [group.window for group in kept.groups] == [None, 8]


windows = st.one_of(st.none(), st.integers(1, 40))


@given(st.lists(windows, min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 30), st.data())
def test_the_most_pages_are_those_of_some_step(some, page_size, chunk, data):
    groups = tuple(KVGroup(window, (layer,)) for layer, window in enumerate(some))
    found = KVLayout(page_size, groups, chunk)
    num_tokens = data.draw(st.integers(1, 120))
    steps = [
        (start, min(start + count, num_tokens))
        for start in range(num_tokens)
        for count in (1, chunk)
    ]
    assert max(found.pages_at(*step) for step in steps) <= found.pages_for(num_tokens)
    for group in groups:
        own = KVLayout(page_size, (group,), chunk)
        last = num_tokens - 1
        begun = last - last % page_size
        seen = {
            position // page_size
            for position in range(num_tokens)
            if group.window is None or position > begun - group.window
        }
        assert own.pages_at(num_tokens - 1, num_tokens) == len(seen)
        # Once the window has been left, some step holds as many as are planned.
        if group.window is None or num_tokens > group.window + chunk + 2 * page_size:
            assert max(own.pages_at(*step) for step in steps) == own.pages_for(num_tokens)
    assert found.longest(found.pages_for(num_tokens), num_tokens) >= num_tokens


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_a_long_sequence_holds_its_window_and_no_more(tmp_path, chunk):
    with Bench.closing(tmp_path, page_size=4, num_pages=64, windows=(None, 6)) as bench:
        sample = bench.start(PROMPT)
        while sample.num_computed < 100:
            if sample.num_computed == len(sample.token_ids):
                sample.token_ids.append(7)
            start = sample.num_computed
            bench.write(sample, chunk)
            bench.manager.cache_pages(sample.table, sample.num_computed)
            stop = sample.num_computed
            if start >= len(PROMPT):
                full, windowed = sample.table.tables
                assert len(full.held) == -(-stop // 4)
                assert len(windowed.held) == -(-stop // 4) - start // 4 + 2  # 5 tokens before it
                held = len(full.held) + len(windowed.held)
                assert held == bench.manager.layout.pages_at(start, stop)
                assert bench.manager.pool.num_used == held


def test_a_hit_needs_the_last_window_of_a_windowed_group_only(tmp_path):
    with Bench.closing(tmp_path, page_size=4, num_pages=64, windows=(None, 6)) as bench:
        sample = bench.run(PROMPT)
        full, windowed = sample.table.tables
        bench.leave(sample)
        assert bench.hit([*PROMPT, 0]) == 20
        for node in bench.manager.tree:  # The window's first pages are forgotten.
            if node.device is not None and node.parent.tokens == windowed.salt:
                bench.manager._allocator._evict(node)
        assert bench.hit([*PROMPT, 0]) == 20 and bench.hit(PROMPT[:5]) == 0
        again = bench.start([*PROMPT, 0])
        assert again.num_computed == 20
        assert again.table.others[0].num_released == 3
        bench.write(again)
        assert full.salt == b"" and windowed.salt.startswith(b"\xff")
