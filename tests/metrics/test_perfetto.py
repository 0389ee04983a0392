from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from event_sessions import Session, VirtualClock
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.events import Collected, Dispatched, EventLog, Phase, Preempted, Transferred
from jaxserve.metrics.perfetto import trace_events, write_trace


def check_format(events) -> None:
    """What the Trace Event Format asks for, and that spans of a track do not overlap."""
    processes, tracks, spans = set(), set(), defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            if event["name"] == "process_name":
                processes.add(event["pid"])
            else:
                tracks.add((event["pid"], event["tid"]))
            continue
        assert event["pid"] in processes
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"] and all(
                isinstance(value, int) and value >= 0 for value in event["args"].values()
            )
            continue
        assert (event["pid"], event["tid"]) in tracks
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert (event["ph"], event["s"]) == ("i", "t")
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    assert not times or times[0] == 0
    for track, intervals in spans.items():
        for (_, end), (begin, _) in pairwise(sorted(intervals)):
            assert end <= begin, track


def spans_of(events, track: str) -> list[tuple[str, int, int]]:
    """(name, begin, end) of the spans on the track whose name begins so."""
    (key,) = [
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"].startswith(track)
    ]
    return [
        (event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X" and (event["pid"], event["tid"]) == key
    ]


@pytest.fixture
def overlapped():
    """Two sequences; the second is preempted while a token of it is on its way."""
    clock = VirtualClock()
    log = EventLog(clock=clock, keep_all=True)

    def at(us):
        clock.us = us
        return log

    def dispatch(step, us, decode_rows=0, prefill=(), running=1):
        at(us).dispatched(
            step,
            f"program {step}",
            begin_us=us - 5,
            scheduled_us=us - 3,
            packed_us=us - 1,
            decode_rows=decode_rows,
            prefill=prefill,
            padded_tokens=0,
            pages_used=running,
            pages_total=8,
        )

    at(100).arrived(0, "a", 24)
    at(101).arrived(1, "b", 8)
    at(106).admitted(0)
    dispatch(0, 110, prefill=[(0, 16)])
    at(116).admitted(1)
    dispatch(1, 120, prefill=[(0, 8), (1, 8)])
    at(150).collected(0, [], begin_us=121, ready_us=150)
    dispatch(2, 160, decode_rows=2)
    at(200).collected(1, [0, 1], begin_us=161, ready_us=200)
    at(206).preempted(1)
    dispatch(3, 210, decode_rows=1)
    at(250).collected(2, [0, 1], begin_us=211, ready_us=250)
    at(300).collected(3, [0], begin_us=251, ready_us=300)
    at(301).finished(0, "length")
    at(305).resumed(1)
    dispatch(4, 310, prefill=[(1, 10)])
    at(350).collected(4, [1], begin_us=311, ready_us=350)
    at(360).failed(1, "lost")
    return log.records


def test_a_timeline_by_hand(overlapped):
    events = trace_events(overlapped)
    check_format(events)
    assert spans_of(events, "a (") == [
        ("queued", 0, 6),
        ("prefill", 9, 50),
        ("prefill", 50, 100),
        ("decode", 100, 201),
    ]
    assert spans_of(events, "b (") == [
        ("queued", 1, 16),
        ("prefill", 50, 100),
        ("decode", 100, 106),
        ("preempted", 106, 205),
        ("prefill", 209, 250),
        ("decode", 250, 260),
    ]
    assert spans_of(events, "device") == [
        ("program 0", 9, 50),
        ("program 1", 50, 100),
        ("program 2", 100, 150),
        ("program 3", 150, 200),
        ("program 4", 209, 250),
    ]
    assert spans_of(events, "host")[:4] == [
        ("schedule", 5, 7),
        ("pack", 7, 9),
        ("dispatch", 9, 10),
        ("schedule", 15, 17),
    ]
    instants = [(e["ts"], e["name"], e["args"]) for e in events if e["ph"] == "i"]
    assert instants == [
        (106, "preempted", {}),
        (201, "length", {}),
        (260, "error", {"error": "lost"}),
    ]
    counters = [(e["ts"], e["args"]) for e in events if e["name"] == "sequences"]
    assert counters[0] == (9, {"running": 1, "waiting": 1})
    assert counters[-1] == (260, {"running": 0, "waiting": 0})
    assert {e["name"] for e in events if e["ph"] == "C"} == {
        "sequences",
        "tokens a step",
        "pages used",
    }


def test_a_chunk_on_its_way_is_cut_where_its_sequence_ends(overlapped):
    aborted = [record for record in overlapped if record.time_us <= 120]
    clock = VirtualClock()
    clock.us = 130
    log = EventLog(aborted.append, clock=clock)
    log.finished(0, "abort")
    log.collected(0, [], begin_us=131, ready_us=150)
    log.collected(1, [1], begin_us=151, ready_us=200)
    events = trace_events(aborted)
    check_format(events)
    # The second chunk would have begun after the end, and is not drawn.
    assert spans_of(events, "a (") == [("queued", 0, 6), ("prefill", 9, 30)]
    assert spans_of(events, "b (")[-1] == ("decode", 100, 100)


def test_a_token_from_before_a_preemption_starts_no_decode():
    """Also where the resumption and its first chunk share a microsecond with the token's step."""
    clock = VirtualClock()
    log = EventLog(clock=clock, keep_all=True)
    times = {"begin_us": 0, "scheduled_us": 0, "packed_us": 0, "padded_tokens": 0}
    log.arrived(0, "a", 4)
    log.admitted(0)
    log.dispatched(0, "p", **times, decode_rows=0, prefill=[(0, 4)], pages_used=1, pages_total=8)
    log.preempted(0)
    log.resumed(0)
    log.dispatched(1, "p", **times, decode_rows=0, prefill=[(0, 3)], pages_used=1, pages_total=8)
    clock.us = 10
    log.collected(0, [0], begin_us=0, ready_us=10)
    clock.us = 20
    log.collected(1, [], begin_us=10, ready_us=20)
    events = trace_events(log.records)
    check_format(events)
    assert "decode" not in [name for name, *_ in spans_of(events, "a (")]


def test_the_file_is_json_that_a_viewer_opens(overlapped, tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, overlapped)
    document = json.loads(path.read_text())
    assert document["traceEvents"] == trace_events(overlapped)
    write_trace(path, [])
    check_format(json.loads(path.read_text())["traceEvents"])


def test_phases_that_overlap_are_on_separate_tracks():
    records = [
        Phase(30, "compile", "d4", 10),
        Phase(35, "compile", "d8", 12),
        Phase(40, "compile", "d16", 30),
        Phase(50, "startup", "compile", 10),
    ]
    events = trace_events(records)
    check_format(events)
    tracks = [spans_of(events, f"track {i}") for i in range(3)]
    assert tracks == [
        [("d4", 0, 20), ("d16", 20, 30)],
        [("compile", 0, 40)],
        [("d8", 2, 25)],
    ]


def test_moves_of_each_way_are_on_a_track(overlapped):
    """They are logged when the host hears of them, after the steps that ran meanwhile."""
    moves = [
        Transferred(140, "device", "host", 2, 64, 122, None),
        Transferred(145, "host", "device", 1, 32, 130, None),
        Transferred(190, "device", "host", 3, 96, 150, "OSError: disk full"),
    ]
    records = [*overlapped[:8], *moves, *overlapped[8:]]
    events = trace_events(records)
    check_format(events)
    assert spans_of(events, "KV device to host") == [("transfer", 22, 40), ("failed", 50, 90)]
    assert spans_of(events, "KV host to device") == [("transfer", 30, 45)]
    arguments = [e["args"] for e in events if e["name"] in ("transfer", "failed")]
    assert arguments == [
        {"pages": 2, "bytes": 64},
        {"pages": 1, "bytes": 32},
        {"pages": 3, "bytes": 96, "error": "OSError: disk full"},
    ]
    others = [e for e in events if e["name"] not in ("transfer", "failed")]
    assert [e for e in others if e["ph"] != "M"] == [
        e for e in trace_events(overlapped) if e["ph"] != "M"
    ]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 10), st.booleans())
def test_a_random_session_makes_a_well_formed_timeline(random, requests, drain):
    clock = VirtualClock()
    log = EventLog(clock=clock, keep_all=True)
    lives = Session(log, clock, random).run(requests, drain).lives
    events = trace_events(log.records)
    check_format(events)

    collected = [record for record in log.records if isinstance(record, Collected)]
    steps = {r.step: r for r in log.records if isinstance(r, Dispatched)}
    assert [name for name, _, _ in spans_of(events, "device")] == [
        steps[record.step].program for record in collected
    ]
    preemptions = [record for record in log.records if isinstance(record, Preempted)]
    assert [e["name"] for e in events if e["ph"] == "i"].count("preempted") == len(preemptions)
    ended = [e for e in events if e["ph"] == "i" and e["name"] != "preempted"]
    assert len(ended) == sum(life.reason is not None for life in lives.values())
    origin = log.records[0].time_us
    for sequence, life in lives.items():
        spans = spans_of(events, f"request-{sequence} (")
        assert spans[0][:2] == ("queued", life.arrival_us - origin)
        if not life.preemptions:
            decode = [begin for name, begin, _ in spans if name == "decode"]
            assert decode == [us - origin for us in life.token_us[:1]]
