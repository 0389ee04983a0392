"""SLOs: how they are written, and what they measure."""

from __future__ import annotations

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.metrics.fluidity import Deadlines, Fluidity, linear_prefill
from jaxserve.metrics.summaries import SequenceSummary
from jaxserve.simulator.deployments.slo import Limit, Slo


def request(*token_us: int, finish_us: int = 0, prompt_tokens: int = 10) -> SequenceSummary:
    """A request that arrives at 0."""
    return SequenceSummary(
        "0", 0, 0, token_us[0], token_us[-1], finish_us, "length", prompt_tokens, 0, len(token_us),
        0, Fluidity(0, 0), token_us,
    )  # fmt: skip


def test_limits_are_of_the_99th_percentile_unless_they_name_another():
    slo = Slo.of("ttft=2s, itl_p90=50ms,tpot=1500us,e2e_p50=.5s,fluidity=0.9")
    assert slo.limits == (
        Limit("ttft", 99, 2_000_000),
        Limit("itl", 90, 50_000),
        Limit("tpot", 99, 1_500),
        Limit("e2e", 50, 500_000),
        Limit("fluidity", 99, 0.9),
    )
    assert [limit.text for limit in slo.limits] == [
        "ttft_p99 2,000 ms",
        "itl_p90 50 ms",
        "tpot_p99 1.5 ms",
        "e2e_p50 500 ms",
        "fluidity_p99 0.9",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft", "'ttft'; it must be terms such as ttft=2s"),
        ("ttft=2s,,itl=1s", "slo has ''"),
        ("ttft=2", "'ttft=2'.* with its unit"),
        ("ttft=0s", "above 0"),
        ("ttft=-1s", "above 0"),
        ("ttft=1h", "us, ms or s"),
        ("latency=2s", "'latency'; it must be queue, ttft, itl, tpot, e2e or fluidity"),
        ("ttft_p0=2s", "percentile 0"),
        ("ttft_p101=2s", "percentile 101"),
        ("fluidity=90%", "the index"),
        ("fluidity=1.5", "at most 1"),
        ("ttft=1s,ttft_p99=2s", "ttft_p99 twice"),
        ("itl=50ms,tpot=50ms", "long enough queue; add a limit of queue, ttft, e2e or fluidity"),
    ],
)
def test_what_is_no_slo(text, words):
    with pytest.raises(ConfigError, match=words):
        Slo.of(text)


def test_values_by_hand():
    """Of four requests, 75% are three; of their six gaps 50% are three."""
    slo = Slo.of("ttft_p75=1s,itl_p50=1s,tpot_p100=1s,e2e_p25=1s")
    served = [
        request(100, 110, 150, finish_us=151),
        request(300, 330, finish_us=331),
        request(200, 220, 250, 1_250, finish_us=1_251),
        request(400, finish_us=401),
    ]
    assert slo.measured(served) == (300, 30, 350, 151)
    assert slo.met((300, 30, 350, 151))
    assert slo.met((1_000_000, 30, 350, 151))
    assert not slo.met((1_000_001, 30, 350, 151))
    assert slo.over((2_000_000, 30, 350, 151)) == 2
    assert Slo.of("ttft=1s,itl=1s").measured([request(5)]) == (5, 0)


def test_a_share_of_the_requests_has_at_least_the_index():
    """The second misses one of two deadlines, the third none."""
    slo = Slo.of("fluidity_p67=0.9", Deadlines(linear_prefill(10, 0), 10))
    late, good = request(5, 25), request(10, 20)
    assert slo.measured([good, late, good]) == (0.5,)
    assert Slo.of("fluidity_p66=0.9", slo.deadlines).measured([good, late, good]) == (1.0,)
    assert not slo.met((0.5,))
    assert slo.over((0.0,)) == float("inf")
