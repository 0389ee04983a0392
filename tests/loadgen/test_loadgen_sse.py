from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.loadgen.client import EventDecoder


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a \n\n", [b" a "]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": keep-alive\n\nevent: message\nid: 1\ndata: a\n\n", [b"a"]),
        (b"data: not yet\n", []),
        (b"data: \xc3\xa9\n\n", ["é".encode()]),
    ],
)
def test_the_specification_of_events(stream, events):
    assert EventDecoder().feed(stream) == events


PIECES = st.sampled_from([b"data: a", b"data: bb", b"\n", b"\n\n", b"\r\n", b": c", b"id: 1"])


@given(st.lists(PIECES).map(b"".join), st.lists(st.integers(0, 60)))
def test_it_does_not_matter_where_the_bytes_are_cut(stream, cuts):
    ends = sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)})
    decoder, events = EventDecoder(), []
    for begin, end in zip([0, *ends], ends):
        events += decoder.feed(stream[begin:end])
    assert events == EventDecoder().feed(stream)
