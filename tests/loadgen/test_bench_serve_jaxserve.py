"""`jaxserve bench serve` against `jaxserve serve`, processes as people run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from patience import PATIENCE_S
from server_process import ServerProcess, write_chat_model

pytestmark = pytest.mark.interfaces
BLOCK = 64
BENCH = (sys.executable, "-m", "jaxserve", "bench", "serve")
KEY = "sesame"


@pytest.fixture(scope="module")
def base_url(tmp_path_factory):
    """A server that wants a key and drafts, of a tiny model whose tokens are bytes."""
    directory = tmp_path_factory.mktemp("bench_served")
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    options = ("--served-model-name=tiny", f"--api-key={KEY}")
    options += (f"--speculative-config={json.dumps(drafts)}",)
    server = ServerProcess(write_chat_model(directory), directory / "log", *options)
    yield f"http://127.0.0.1:{server.wait_ready().port}/v1"
    assert server.stop() == 0, server.text()
    assert "Traceback" not in server.text()


@pytest.fixture
def bench(base_url, tmp_path):
    """Runs it; its exit status, stderr, and what it wrote."""

    def run(*args):
        output = tmp_path / "run.json"
        done = subprocess.run(
            [*BENCH, f"--base-url={base_url}", f"--output={output}", *map(str, args)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return done, json.loads(output.read_text()) if output.exists() else None

    return run


def test_a_trace_with_shared_prefixes(bench, tmp_path):
    trace = tmp_path / "trace.jsonl"
    shared = [0, 1, 2, 3]
    rows = [
        {
            "timestamp": 1000 * place,
            "input_length": 512 * 5,
            "output_length": 8 * (place + 1),
            "hash_ids": [*shared, 10 + place],
        }
        for place in range(6)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done, run = bench("--trace", trace, "--length-scale=0.125", f"--api-key={KEY}")
    assert done.returncode == 0, done.stderr
    assert run["summary"]["failures"] == {}
    for place, request in enumerate(run["requests"]):
        assert request["prompt_tokens"] == 5 * BLOCK
        assert request["output_tokens"] == len(request["token_us"]) == place + 1
        assert request["token_us"] == sorted(request["token_us"])
    # The first prompt is known when the last comes. They share four blocks of five, and by chance
    # the fifth may begin alike.
    assert 4 * BLOCK <= run["requests"][-1]["cached_tokens"] < 5 * BLOCK
    assert run["requests"][0]["cached_tokens"] == 0


def test_chats_of_text_have_about_the_length_that_was_asked_for(bench):
    load = ("--request-rate=20", "--num-requests=10", "--input-len=200", "--output-len=12")
    done, run = bench(*load, "--endpoint=chat", f"--api-key={KEY}")
    assert done.returncode == 0, done.stderr
    summary = run["summary"]
    assert (summary["completed"], summary["output_tokens"]) == (10, 120)
    assert summary["prompt_tokens"] == pytest.approx(10 * 200, rel=0.1)
    assert "fluidity index" in done.stdout


def test_drafts_are_those_that_the_server_counted_meanwhile(bench):
    load = ("--request-rate=50", "--num-requests=6", "--input-len=60", "--output-len=30")
    for _ in range(2):
        done, run = bench(*load, f"--api-key={KEY}", "--seed=3")
        assert done.returncode == 0, done.stderr
        drafts = run["drafts"]
        assert 0 < drafts["drafts"] < 6 * 30, "those of earlier loads are not in it"
        assert drafts["drafts"] <= drafts["draft_tokens"] <= 2 * drafts["drafts"]
        assert sum(drafts["accepted_by_position"]) == drafts["accepted_tokens"]
        assert re.search(rf"^draft tokens +{drafts['draft_tokens']:,}$", done.stdout, re.MULTILINE)


def test_more_than_the_server_can_do_at_once_is_sent_all_the_same(bench):
    """Forty requests within a tenth of a second, to four places."""
    load = ("--request-rate=400", "--num-requests=40", "--input-len=100", "--output-len=30")
    done, run = bench(*load, f"--api-key={KEY}")
    assert done.returncode == 0, done.stderr
    assert run["summary"]["completed"] == 40
    sent = [request["sent_us"] for request in run["requests"]]
    first_end = min(request["sent_us"] + request["end_us"] for request in run["requests"])
    assert sum(us < first_end for us in sent) > 4


def test_its_capacity_is_found(bench):
    """The server can do more than any rate that is tried before all requests are there at once, or
    less: whichever it is, the search ends and says so. With equal gaps it soon tries a rate at
    which each request is alone, however slow the machine."""
    load = ("--request-rate=50", "--burstiness=inf", "--num-requests=10")
    load += ("--input-len=50", "--output-len=8")
    search = ("--find-capacity", "--slo=ttft_p90=200ms", "--json", "--seed=1")
    done, run = bench(*load, *search, f"--api-key={KEY}")
    assert json.loads(done.stdout) == run
    probes = run["probes"]
    assert probes[0]["requests_per_s"] == 50
    met = [probe["requests_per_s"] for probe in probes if probe["met"]]
    assert run["capacity_requests_per_s"] == max(met, default=None)
    assert done.returncode == (0 if met else 1), done.stderr
    assert KEY not in done.stdout


def test_without_the_key_nothing_is_measured(bench):
    done, run = bench()
    assert done.returncode == 1
    assert run is None
    assert done.stderr.startswith("error: ")
    assert "401" in done.stderr and "--api-key" in done.stderr
