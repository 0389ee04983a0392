"""What lines are called, which are called alike, and what they are seeded by."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from batch_files import write_lines
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.errors import RequestError
from jaxserve.offline.custom_ids import custom_id_of, duplicates, seed_of
from jaxserve.offline.lines import open_lines

ids = st.one_of(st.none(), st.sampled_from(["a", "b", "line-2", "line-3"]), st.text(max_size=2))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ids") / "in.jsonl"


@given(st.lists(st.one_of(ids, st.just("{broken")), min_size=1, max_size=12))
def test_the_first_line_of_an_id_has_it(path: Path, given_ids: list[str | None]):
    """Lines without an id, and broken ones, get their number as id: no other line may have it."""
    lines = [text if text == "{broken" else {"custom_id": text} for text in given_ids]
    opened = open_lines(write_lines(path, lines))
    names = [
        f"line-{number}" if text in (None, "", "{broken") else text
        for number, text in enumerate(given_ids, 1)
    ]
    expected = {
        place: names.index(name) for place, name in enumerate(names) if names.index(name) != place
    }
    assert duplicates(opened) == expected


@pytest.mark.parametrize("custom_id", ["", 3, ["a"], {}, True, "x" * 513])
def test_an_id_is_text(custom_id: object):
    with pytest.raises(RequestError, match="custom_id is"):
        custom_id_of({"custom_id": custom_id}, 1)


def test_seeds_differ_where_anything_does():
    seeds = [
        seed_of(custom_id, place, seed)
        for custom_id in ("a", "b", "\ud800", "0 a")
        for place in (0, 1)
        for seed in (0, 1)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[0] == seed_of("a", 0, 0)


def test_seeds_are_spread():
    draw = random.Random(0)
    seeds = [seed_of(str(draw.random()), 0, 0) for _ in range(1000)]
    ones = sum(bin(seed).count("1") for seed in seeds) / (63 * len(seeds))
    assert 0.48 < ones < 0.52
