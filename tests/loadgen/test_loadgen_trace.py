from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.errors import ConfigError
from jaxserve.loadgen.lengths import (
    Quantiles,
    lognormal_lengths,
    uniform_lengths,
    zipf_lengths,
)
from jaxserve.loadgen.trace import Fit, TraceRequest, drawn, gaps, read_trace

CSV = """\
arrived_at,num_prefill_tokens,num_decode_tokens
2.0,374,44
6.314579,396,0
3.5,10,109
"""
LENGTHS = """\
num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
3772,54,3826,69.9
10,109,119,0.1
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-17 00:00:03.9799600,110,0
"""
JSON_LINES = """\
{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}

{"timestamp": 3001, "input_length": 9, "output_length": 7, "hash_ids": [0]}
"""


@pytest.fixture
def trace(tmp_path):
    def write(text):
        path = tmp_path / "trace"
        path.write_text(text)
        return path

    return write


def test_csv_by_time_of_arrival_from_the_first_on(trace):
    assert read_trace(trace(CSV)) == [
        TraceRequest(0, 374, 44),
        TraceRequest(1_500_000, 10, 109),
        TraceRequest(4_314_579, 396, 1),
    ]


def test_azure_as_published(trace):
    """Dates have seven digits of a second, and those of 2024 a zone."""
    wanted = [
        TraceRequest(0, 4808, 10),
        TraceRequest(52_000, 3180, 8),
        TraceRequest(20_580_000_000, 110, 1),
    ]
    assert read_trace(trace(AZURE)) == wanted
    assert read_trace(trace(AZURE.replace("00,", "00+00:00,"))) == wanted


def test_csv_as_spreadsheets_write_it(trace):
    text = "\ufeff" + CSV.replace(",", ", ").replace("374", "374.0")
    assert read_trace(trace(text)) == read_trace(trace(CSV))


def test_json_lines_with_shared_blocks(trace):
    assert read_trace(trace(JSON_LINES)) == [
        TraceRequest(0, 600, 5, (0, 1), 512),
        TraceRequest(1000, 9, 7, (0,), 512),
    ]


def test_lengths_of_a_trace_with_arrivals_of_their_own(trace):
    """Those of the lines where it has no times, or else in the order of its times."""
    apart = list(itertools.islice(gaps(2.0, seed=1), 2))
    assert read_trace(trace(LENGTHS), iter(apart)) == [
        TraceRequest(0, 3772, 54),
        TraceRequest(round(apart[0] * 1e6), 10, 109),
    ]
    assert read_trace(trace(CSV), gaps(2.0, seed=1, burstiness=math.inf)) == [
        TraceRequest(0, 374, 44),
        TraceRequest(500_000, 10, 109),
        TraceRequest(1_000_000, 396, 1),
    ]
    (first, second) = read_trace(trace(JSON_LINES), gaps(math.inf, seed=1))
    assert (first.block_ids, second.arrival_us) == ((0, 1), 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no column 'num_prefill_tokens'", "arrived_at", "TIMESTAMP"]),
        ("a,b\n1,2\n", ["no column 'num_prefill_tokens'"]),
        (LENGTHS, ["no column 'arrived_at'", "request_rate"]),
        (CSV.splitlines()[0], ["no requests"]),
        (CSV + "x,1,2\n", ["line 5", "arrived_at is 'x'; it must be a number of seconds"]),
        (CSV + "1.0,1\n", ["line 5", "it has no num_decode_tokens"]),
        (CSV + "inf,1,2\n", ["line 5", "arrived_at is 'inf'"]),
        (CSV + "-1.5,1,2\n", ["line 5", "'-1.5'; it must be a number of seconds, 0 or more"]),
        (CSV + "1.0,-1,2\n", ["line 5", "num_prefill_tokens is '-1'", "0 or more"]),
        (CSV + "1.0,1,2.5\n", ["line 5", "num_decode_tokens is '2.5'", "number of tokens"]),
        (AZURE + "3.5,1,2\n", ["line 5", "TIMESTAMP is '3.5'", "a date and time, such as"]),
        (JSON_LINES + "{]\n", ["line 4"]),
        (JSON_LINES + "[1]\n", ["line 4", "[1]", "object"]),
        (JSON_LINES + '{"timestamp": 1}\n', ["line 4", "it has no input_length"]),
        (JSON_LINES.replace("3001", "-5"), ["line 3", "timestamp is -5", "milliseconds, 0 or"]),
        (JSON_LINES.replace("[0]", "3"), ["line 3", "hash_ids is 3; it must be a list"]),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(trace, text, words):
    with pytest.raises(ConfigError) as error:
        read_trace(trace(text))
    assert all(word in str(error.value) for word in words), error.value


def test_a_trace_that_is_not_there_or_is_no_text(tmp_path):
    with pytest.raises(ConfigError, match="nothing"):
        read_trace(tmp_path / "nothing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="binary"):
        read_trace(tmp_path / "binary")


def test_poisson_arrivals_have_their_rate_and_seed():
    requests = list(itertools.islice(drawn(50.0, uniform_lengths(8, 4, 1), 1), 4000))
    assert requests[0] == TraceRequest(0, 8, 4)
    # The mean of 4,000 exponential gaps is within five percent of 20 ms by three deviations.
    assert requests[-1].arrival_us / 3999 == pytest.approx(20_000, rel=0.05)
    assert requests == list(itertools.islice(drawn(50.0, uniform_lengths(8, 4, 1), 1), 4000))
    assert requests != list(itertools.islice(drawn(50.0, uniform_lengths(8, 4, 2), 2), 4000))


def test_gaps_and_lengths_of_drawn_loads():
    def found_gaps(burstiness: float) -> list[int]:
        load = itertools.islice(drawn(50.0, uniform_lengths(8, 4, 1), 1, burstiness), 4000)
        return [b.arrival_us - a.arrival_us for a, b in itertools.pairwise(load)]

    assert set(found_gaps(math.inf)) == {20_000}
    for burstiness in (
        0.25,
        4.0,
    ):  # The variance of a gamma distribution is its squared mean over its shape.
        found = found_gaps(burstiness)
        assert statistics.fmean(found) == pytest.approx(20_000, rel=0.1)
        assert statistics.pstdev(found) == pytest.approx(20_000 / burstiness**0.5, rel=0.15)
    load = list(itertools.islice(drawn(math.inf, uniform_lengths(100, 4, 1, 0.5), 1), 2000))
    assert {request.arrival_us for request in load} == {0}
    lengths = {request.prompt_tokens for request in load}
    assert (min(lengths), max(lengths)) == (50, 150)
    assert {request.output_tokens for request in load} == {2, 3, 4, 5, 6}


def test_lengths_of_every_law():
    zipf, steep = (
        list(itertools.islice(zipf_lengths(200, 100, 1, 0.5, theta), 4000)) for theta in (0, 1.5)
    )
    for found in (zipf, steep):
        totals = [sum(lengths) for lengths in found]
        assert min(totals) == 150
        assert all(abs(prompt - 2 * output) <= 2 for prompt, output in found)
    assert statistics.fmean(map(sum, zipf)) == pytest.approx(300, rel=0.02)
    # Of 301 numbers, the smallest has the share 1 / (1 + 2^-1.5 + ... + 301^-1.5) of requests.
    share = 1 / sum(n**-1.5 for n in range(1, 302))
    assert totals.count(150) / 4000 == pytest.approx(share, rel=0.1)
    laws = Quantiles(1730, 5696), Quantiles(40, 40)
    prompts, outputs = zip(*itertools.islice(lognormal_lengths(*laws, 1), 4000))
    assert statistics.median(prompts) == pytest.approx(1730, rel=0.05)
    assert statistics.quantiles(prompts, n=10)[-1] == pytest.approx(5696, rel=0.1)
    assert set(outputs) == {40}


def test_a_load_is_made_to_fit():
    load = [TraceRequest(us, 1000, 300, (1, 2)) for us in (0, 600, 1000, 2000)]
    fitted = Fit(rate_scale=2.0, length_scale=0.1, max_prompt_tokens=90, max_output_tokens=40)
    assert fitted(load)[1] == TraceRequest(300, 90, 30, (1, 2), 52)
    assert len(Fit(num_requests=3)(load)) == 3
    assert len(Fit(duration_us=1000)(load)) == 2
    assert len(Fit(rate_scale=2.0, duration_us=1000)(load)) == 3
    assert Fit()(load) == load


@given(st.integers(1, 20_000), st.floats(0.001, 2.0))
def test_scaled_blocks_still_cover_the_prompt(prompt_tokens, scale):
    blocks = -(-prompt_tokens // 512)
    request = TraceRequest(0, prompt_tokens, 1, tuple(range(blocks)))
    (scaled,) = Fit(length_scale=scale)([request])
    assert scaled.prompt_tokens <= blocks * scaled.block_tokens
