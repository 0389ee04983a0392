"""Which requests move: away from the full and the draining, and never back and forth."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from test_dispatch import demand_of, loads, prompt

from jaxserve.cluster.policies.copies import (
    LAST_TOKENS,
    MAX_STAGES,
    CopyCounts,
    CopyStages,
    Span,
    pieces,
)
from jaxserve.cluster.policies.dispatch import ReplicaLoad, dispatch
from jaxserve.cluster.policies.moves import (
    MAX_MOVES,
    MOVE_HIGH_FREENESS,
    MOVE_LOW_FREENESS,
    Move,
    plan_moves,
)


def carry_out(replicas: list[ReplicaLoad], moves: list[Move]) -> None:
    for key, source, destination in moves:
        demand = replicas[source].demands[key]
        replicas[source].remove(key)
        replicas[destination].add(key, demand)


def test_nothing_moves_while_there_is_room():
    replicas = loads(2)
    for key in range(6):
        replicas[0].add(key, demand_of(prompt(key)))
    assert replicas[0].freeness() > MOVE_LOW_FREENESS
    assert plan_moves(replicas) == []


def test_the_smallest_leaves_a_full_pool_for_the_freest():
    replicas = loads(4, num_pages=30)
    replicas[0].add("long", demand_of(prompt(1, 60)))
    replicas[0].add("short", demand_of(prompt(2, 20)))
    replicas[0].grow("short", 40)
    replicas[1].add("other", demand_of(prompt(3, 40)))
    replicas[3].draining = True
    assert plan_moves(replicas) == [Move("short", 0, 2)]
    assert plan_moves(replicas, lambda _, key: key != "short") == [Move("long", 0, 2)]
    replicas[0].num_moving = 1  # It still counts there.
    assert plan_moves(replicas) == []
    replicas[0].num_moving = 0
    replicas[2].add("much", demand_of(prompt(4, 60)))
    assert replicas[2].has_room(replicas[0].demands["short"]) is False
    assert plan_moves(replicas) == []  # The other would be left with little.


def test_those_who_wait_for_a_slot_move_though_there_are_pages():
    replicas = loads(2, num_pages=1000, max_num_seqs=2)
    for key in range(3):
        replicas[0].add(key, demand_of(prompt(key)))
    assert plan_moves(replicas) == [Move(2, 0, 1)]  # the last that came
    replicas[1].add("a", demand_of(prompt(7), num_sequences=2))
    assert plan_moves(replicas) == []


def test_all_leave_a_draining_replica_for_any_with_room():
    replicas = loads(3, num_pages=30)
    for key in range(3):
        replicas[1].add(key, demand_of(prompt(key, 70)))
    replicas[1].draining = True
    replicas[1].num_moving = MAX_MOVES
    assert plan_moves(replicas) == []
    replicas[1].num_moving -= 1
    while moves := plan_moves(replicas):
        carry_out(replicas, moves)
    assert [len(load.demands) for load in replicas] == [1, 1, 1]  # No other has room for the last.
    assert replicas[0].freeness() >= MOVE_HIGH_FREENESS


def test_others_leave_a_high_priority_its_headroom():
    replicas = loads(2, num_pages=40)
    replicas[0].add("high", demand_of(prompt(1, 20), priority=-1))
    replicas[0].add("low", demand_of(prompt(2, 40), priority=1))
    replicas[0].add("short", demand_of(prompt(3)))
    assert replicas[0].num_used_pages < 25 and replicas[0].freeness() < MOVE_LOW_FREENESS
    moves = plan_moves(replicas)
    assert moves == [Move("low", 0, 1)]  # The lowest priority first, though it is longer.
    carry_out(replicas, moves)
    assert replicas[0].freeness() >= MOVE_LOW_FREENESS and plan_moves(replicas) == []
    replicas[0].draining = True
    replicas[1].add("much", demand_of(prompt(4, 60)))
    assert replicas[1].freeness(replicas[0].demands["high"]) < 0
    moves = plan_moves(replicas, lambda _, key: key == "high")
    assert moves == [Move("high", 0, 1)]  # There is no headroom for it, but there is room.


def test_prompts_go_to_prefill_and_what_has_begun_to_decode():
    replicas = [ReplicaLoad(30, 4, 4, role) for role in ("prefill", "decode", "decode")]
    for key in "ab":
        assert dispatch(replicas, demand_of(prompt(1))) == 0
        replicas[0].add(key, demand_of(prompt(1)))
    # Pages of the prompt that is computed first are copied meanwhile.
    assert plan_moves(replicas) == [Move("a", 0, 1)]
    assert plan_moves(replicas, lambda _, key: key != "a") == []
    replicas[0].grow("b", 1)
    assert plan_moves(replicas) == [Move("b", 0, 1)]
    replicas[0].grow("a", 1)
    assert plan_moves(replicas, lambda _, key: key != "b") == [Move("a", 0, 1)]
    replicas[1].add("full", demand_of(prompt(2, 116)))
    assert plan_moves(replicas, lambda _, key: key != "b") == [Move("a", 0, 2)]
    replicas[2].add("full", demand_of(prompt(3, 116)))
    assert plan_moves(replicas) == []  # It decodes where it is, until there is room.
    replicas[0].draining = True
    assert dispatch(replicas, demand_of(prompt(1))) in (1, 2)


def test_pages_of_a_prompt_are_copied_first_and_then_what_was_generated():
    counts = CopyCounts()
    stages = CopyStages(10, 4, counts, during_prefill=True)
    wanted = []
    for num_tokens in (4, 4, 10):  # There is no room for the second page until all is computed.
        wanted.append(stages.wanted)
        stages.staged(num_tokens)
    assert wanted == [4, 8, 10] and stages.wanted is None
    assert (counts.copied, counts.during_prefill) == (10, 4)
    stages.during_prefill = False
    assert not stages.goes_on(LAST_TOKENS) and stages.goes_on(LAST_TOKENS + 1)


def test_a_request_that_generates_faster_than_it_is_copied_moves_nevertheless():
    stages = CopyStages(10, 4, CopyCounts(), during_prefill=False)
    assert stages.goes_on(0)  # Its prompt is not copied.
    for stage in range(MAX_STAGES):
        assert stages.goes_on(100)
        stages.staged(10 + 100 * stage)
    assert not stages.goes_on(100)
    no_room = CopyStages(10, 4, CopyCounts(), during_prefill=False)
    no_room.staged(0)
    assert not no_room.goes_on(100)


requests = st.tuples(
    st.integers(0, 2),
    st.integers(0, 9),
    st.integers(1, 90),
    st.integers(1, 3),
    st.integers(0, 60),
    st.integers(-1, 1),
)


@given(st.lists(requests, max_size=25), st.integers(0, 2), st.booleans(), st.booleans())
def test_on_a_static_load_moves_come_to_an_end(session, drained, drains, apart):
    """No ping-pong: where none drains, no request moves twice among those of a role."""
    roles = ("prefill", "decode", "decode") if apart else ("any",) * 3
    replicas = [ReplicaLoad(40, 4, 6, role) for role in roles]
    for key, (place, first, length, num_sequences, num_output, priority) in enumerate(session):
        demand = demand_of(prompt(first, length), num_sequences, priority=priority)
        replicas[place].add(key, demand)
        replicas[place].grow(key, num_output)
    replicas[drained].draining = drains
    moved = Counter()
    while moves := plan_moves(replicas):
        assert len({move.source for move in moves}) == len(moves)
        assert len({move.destination for move in moves}) == len(moves)
        before = [load.has_room(demand_of([])) for load in replicas]
        carry_out(replicas, moves)
        for move in moves:
            taker = replicas[move.destination]
            assert before[move.destination] and not taker.draining
            assert taker.num_used_pages <= taker.num_pages
            assert taker.num_sequences <= taker.max_num_seqs
        moved.update(move.key for move in moves)
        assert moved.total() <= 3 * len(session)
    if not drains:
        assert all(count <= 1 + apart for count in moved.values())
    assert sum(len(load.demands) for load in replicas) == len(session)


def test_pages_of_a_stage():
    """Those of a prompt that is computed are full; samples share those of their prompt."""
    assert Span.of(0, 7, num_prompt=10, page_size=4).num_pages == 1
    assert Span.of(0, 10, num_prompt=10, page_size=4).num_pages == 3
    assert Span.of(6, 17, num_prompt=10, page_size=4).num_pages == 4
    assert Span.of(6, 17, num_prompt=10, page_size=4, num_sequences=3).num_pages == 1 + 3 * 3
    assert Span.of(13, 17, num_prompt=10, page_size=4, num_sequences=3).num_pages == 3 * 2
    assert Span.of(0, 3, num_prompt=10, page_size=4).num_pages == 0


@given(
    st.integers(1, 60),
    st.integers(0, 40),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 12),
)
def test_pieces_are_all_of_it(num_prompt, num_output, page_size, num_sequences, max_pages):
    num_tokens = num_prompt + num_output
    found = list(pieces(num_prompt, num_tokens, page_size, num_sequences, max_pages))
    assert [each.start for each in found] == [0, *(each.stop for each in found[:-1])]
    assert found[-1].stop == num_tokens
    assert all(each.num_pages <= max(max_pages, num_sequences) for each in found)
    whole = Span.of(0, num_tokens, num_prompt, page_size, num_sequences).num_pages
    assert sum(each.num_pages for each in found) == whole
