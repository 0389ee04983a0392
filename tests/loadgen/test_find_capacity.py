"""`jaxserve bench serve --find-capacity`: against computed queues, and a scripted endpoint."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cli import main
from jaxserve.cli.bench.find_capacity import CapacityFinder, Found, Probe, Stopped
from jaxserve.cli.bench.serve import BenchServe
from jaxserve.core.errors import EndpointError
from jaxserve.loadgen.results import RequestResult
from jaxserve.loadgen.timed_response import TimedResponse
from jaxserve.loadgen.trace import TraceRequest
from jaxserve.simulator.deployments.capacity import rate_at
from jaxserve.simulator.deployments.slo import Slo

MS = 1000
SLO = Slo.of("ttft=100ms")


def requests(count: int, rate: float) -> list[TraceRequest]:
    return [TraceRequest(round(place / rate * 1e6), 8, 2) for place in range(count)]


class Queue:
    """A server with one place: each request takes it for `service_us`. Its load generator sends
    requests `lag_us` late that arrive faster than `gap_us` apart."""

    def __init__(self, service_us: int, gap_us: int = 0, lag_us: int = 0, fails: str | None = None):
        self.service_us, self.gap_us, self.lag_us, self.fails = service_us, gap_us, lag_us, fails
        self.numbers: list[int] = []

    def __call__(self, load: list[TraceRequest], number: int) -> list[RequestResult]:
        self.numbers.append(number)
        free_us, results = 0, []
        late = load[-1].arrival_us < self.gap_us * (len(load) - 1)
        for place, request in enumerate(load):
            sent_us = request.arrival_us + (self.lag_us if late and number else 0)
            free_us = max(free_us, sent_us) + self.service_us
            took_us = free_us - sent_us
            response = TimedResponse((took_us, took_us), took_us, failure=self.fails)
            results.append(RequestResult(place, request, sent_us, response))
        return results


def found_by(queue: Queue, rate: float = 10.0, count: int = 40, slo: Slo = SLO) -> Found:
    told: list[Probe] = []
    found = CapacityFinder(queue, requests(count, rate), rate, slo, told.append).find()
    assert tuple(told) == found.probes
    return found


@settings(deadline=None)
@given(st.integers(5, 90), st.floats(0.5, 200.0))
def test_the_capacity_is_that_of_every_rate_of_the_grid(service_ms, rate):
    """Whatever rate the search begins at, and in a dozen probes."""
    found = found_by(Queue(service_ms * MS), rate)
    assert found.best.met and found.at_least is None
    above = CapacityFinder(Queue(service_ms * MS), requests(40, rate), rate, SLO, lambda _: None)
    assert above._meets(found.best.step)
    assert not above._meets(found.best.step + 1)
    assert found.rate == rate_at(found.best.step, rate)
    assert len({probe.step for probe in found.probes}) == len(found.probes) <= 16
    # The queue of 40 may grow to 100 ms; a rate beyond that is the server's throughput and more.
    assert 1 / (service_ms * MS / 1e6) / 1.03 < found.rate


def test_no_prompt_is_sent_in_two_probes():
    queue = Queue(20 * MS)
    found = found_by(queue)
    assert queue.numbers == list(range(1 + len(found.probes)))


def test_a_load_that_the_generator_sent_late_is_not_met():
    """Beyond 20 requests a second it lags; the server could do 50."""
    found = found_by(Queue(20 * MS, gap_us=50 * MS, lag_us=60 * MS))
    assert found.rate <= 20 < found.rate * 1.025
    assert found.at_least == "the load generator was 60.0 ms late"
    late = next(probe for probe in found.probes if probe.rate > 21)
    assert SLO.met(late.values) and not late.met
    assert "does not count: the load generator was 60.0 ms late" in late.text()
    assert found.text().startswith("capacity: at least ")
    assert found.text().endswith("give it more CPU, or run it on another machine.")


def test_a_load_that_ends_before_its_first_answer_is_none():
    """Ten requests of half a second: any rate would meet the SLO."""
    found = found_by(Queue(500 * MS), rate=1.0, count=10, slo=Slo.of("ttft=60s"))
    assert found.at_least == "the load was over before its first answer"
    assert "--num-requests" in found.text()


def test_an_slo_out_of_reach_ends_when_each_request_is_alone():
    found = found_by(Queue(150 * MS))
    assert found.rate is None
    assert [probe.rate for probe in found.probes[:2]] == [10.0, pytest.approx(5.0, rel=0.01)]
    assert len(found.probes) == 2  # at 5 a second 150 ms do not overlap
    assert found.text() == (
        "no rate that was tried meets ttft_p99 100 ms; the best seen is ttft_p99 150.0 ms at "
        f"{found.probes[1].rate:,.3f} requests/s."
    )


def test_failed_requests_miss_every_slo():
    found = found_by(Queue(10 * MS, fails="HTTP 500"))
    assert found.rate is None
    assert all(probe.failed == 40 and probe.values is None for probe in found.probes)
    assert "no request was answered" in found.text()


def test_a_server_that_has_gone_ends_the_search():
    with pytest.raises(EndpointError, match="is it running"):
        found_by(Queue(10 * MS, fails="no connection"))


def test_a_probe_that_was_stopped_does_not_count():
    queue = Queue(10 * MS)
    finder = CapacityFinder(
        lambda load, number: queue(load, number)[: None if number < 3 else 5],
        *(requests(40, 10.0), 10.0, SLO, lambda _: None),
    )
    with pytest.raises(Stopped):
        finder.find()
    assert len(finder.so_far().probes) == 2
    assert finder.so_far().rate is not None


SEARCH = ("--model-name=one_by_one", "--request-rate=20", "--burstiness=inf", "--output-len=2")
"""Answers take 40 ms, one at a time."""


@pytest.fixture
def search(server, capsys):
    def run(*args):
        asked = [*SEARCH, "--num-requests=12", "--find-capacity", *args]
        status = main(["bench", "serve", f"--base-url={server}/v1", *asked])
        return status, *capsys.readouterr()

    return run


def test_of_a_live_server(search, tmp_path):
    output = tmp_path / "capacity.json"
    status, out, err = search("--slo=ttft=150ms", "--json", f"--output={output}")
    document = json.loads(out)
    assert json.loads(output.read_text()) == document
    assert (status == 0) == (document["capacity_requests_per_s"] is not None)
    rates = {probe["requests_per_s"]: probe["met"] for probe in document["probes"]}
    assert err.count("requests/s   ttft_p99") >= len(rates)
    assert document["settings"]["slo"] == "ttft=150ms"
    if status == 0:  # A busy machine may meet it at no rate.
        capacity = document["capacity_requests_per_s"]
        assert rates[capacity]
        assert capacity == max(rate for rate, met in rates.items() if met)
        missed = min(rate for rate in rates if rate > capacity)
        assert missed == pytest.approx(capacity * 1.025)


def test_what_is_printed_when_no_rate_will_do(search):
    status, out, err = search("--slo=ttft=1ms,itl_p90=9s")
    assert status == 1
    for line in out.splitlines():  # On a busy machine the generator may be late.
        assert "requests/s   ttft_p99 " in line
        assert line.endswith("not met") or "does not count: the load generator was" in line
    assert err.splitlines()[-1].startswith(
        "error: no rate that was tried meets ttft_p99 1 ms, itl_p90 9,000 ms; the best seen is "
    )


def test_ctrl_c_between_two_loads(search, monkeypatch):
    """What was measured before is printed."""
    served, numbers = BenchServe._served, iter(range(3))

    def interrupted(*args):
        if next(numbers) == 2:  # after the warm-up and a probe
            raise KeyboardInterrupt
        return served(*args)

    monkeypatch.setattr(BenchServe, "_served", interrupted)
    status, out, err = search("--slo=ttft=9s", "--json")
    assert status == 130 and err.endswith("stopped after 1 probes\n")
    assert len(json.loads(out)["probes"]) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--find-capacity"], ["--find-capacity needs", "--slo ttft=2s"]),
        (["--find-capacity", "--slo=ttft=2"], ["ttft=2", "unit"]),
        (["--find-capacity", "--slo=itl=2s"], ["any rate meets", "ttft=2s"]),
        (["--find-capacity", "--slo=queue=2s"], ["queue=2s", "clients do not see", "ttft"]),
        (["--find-capacity", "--slo=ttft=2s", "--slo-ttft-ms=5"], ["--slo-ttft-ms", "no effect"]),
        (["--find-capacity", "--slo=ttft=2s", "--plot=a.svg"], ["--plot", "leave it out"]),
        (["--slo=ttft=2s"], ["--slo has no effect", "--find-capacity"]),
    ],
)
def test_settings_that_make_no_sense(capsys, args, words):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "serve", *args])
    assert stop.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--num-requests=5"], "too few to see a queue grow"),
        (["--request-rate=inf"], "arrives all at once"),
    ],
)
def test_a_load_whose_rate_cannot_be_searched_for(capsys, args, word):
    assert main(["bench", "serve", "--find-capacity", "--slo=ttft=2s", *args]) == 1
    assert word in capsys.readouterr().err
