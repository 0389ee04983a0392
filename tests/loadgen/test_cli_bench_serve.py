"""`jaxserve bench serve` as a whole, against a scripted endpoint."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest
import scripted_server

from jaxserve.cli import main

SHORT = ("--num-requests=4", "--request-rate=100", "--input-len=40", "--output-len=5")
GAP_US = round(scripted_server.GAP_S * 1e6)


@pytest.fixture
def bench(server, capsys):
    """Runs it; exit status, rows of the report by their first cell, and stderr."""

    def run(*args, path=""):
        status = main(["bench", "serve", f"--base-url={server}{path}/v1", *map(str, args)])
        out, err = capsys.readouterr()
        rows = [re.split(r"  +", line) for line in out.splitlines() if "  " in line]
        return status, {name: cells for name, *cells in rows}, err

    return run


def test_a_run_in_numbers(bench, tmp_path):
    slos = ("--slo-ttft-ms=10000", "--slo-itl-ms=10000", "--slo-tpot-ms=9999.5", "--slo-e2e-ms=9e4")
    status, rows, _ = bench(*SHORT, *slos, f"--output={tmp_path / 'run.json'}", "--api-key=secret")
    assert status == 0
    assert rows["model"] == ["plain"]
    assert rows["requests"] == rows["completed"] == ["4"]
    # Prompts are as long as asked for, by the words' measured length: 3 + 2 * 18 or 19 tokens.
    assert int(rows["prompt tokens"][0]) in range(4 * 39, 4 * 41 + 1)
    assert rows["prompt tokens asked for"] == ["160"]
    assert rows["of which cached"] == ["4"]
    assert rows["output tokens"] == ["20"]
    for name in ("time to first token", "between tokens", "per token after the first"):
        assert all(float(cell.split()[0]) >= 15 for cell in rows[name])
    assert rows["within TTFT 10,000 ms, ITL 10,000 ms, TPOT 9,999.5 ms, e2e 90,000 ms"] == [
        "100.0%"
    ]
    assert rows["fluid requests (at least 0.9)"] == ["100.0%"]

    text = (tmp_path / "run.json").read_text()
    assert "secret" not in text
    document = json.loads(text)
    assert document["summary"]["output_tokens"] == 20
    assert document["settings"]["load"]["input_len"] == 40
    assert [request["place"] for request in document["requests"]] == [0, 1, 2, 3]
    for request in document["requests"]:
        # Timers of event loops have a resolution of a millisecond.
        assert request["arrival_us"] - 1_000 <= request["sent_us"]
        assert len(request["token_us"]) == request["output_tokens"] == 5
        assert request["token_us"][-1] >= 5 * GAP_US


def test_a_trace_is_replayed_at_its_times(bench, tmp_path):
    trace, output = tmp_path / "trace.jsonl", tmp_path / "run.json"
    rows = [(0, 1024, 20, [1, 2]), (400, 1500, 30, [1, 2, 3]), (600, 10, 10, [4])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("".join(json.dumps(dict(zip(names, row))) + "\n" for row in rows))
    scales = ("--rate-scale=2", "--length-scale=0.1", "--max-output-tokens=2")
    status, _, _ = bench("--trace", trace, *scales, f"--output={output}", path="/ids")
    assert status == 0
    requests = json.loads(output.read_text())["requests"]
    assert [request["arrival_us"] for request in requests] == [0, 200_000, 300_000]
    # Token ids: exactly as many as asked for.
    assert [request["prompt_tokens"] for request in requests] == [103, 150, 1]
    assert [len(request["token_us"]) for request in requests] == [2, 2, 1]


def test_failures_are_counted_by_reason_and_told_once(bench, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0,9,5\n0,9,4\n0.1,9,3\n0.1,9,2\n"
    )
    status, rows, err = bench("--trace", trace, "--model-name=odd_lengths")
    assert status == 0
    assert rows["completed"] == rows["failed, HTTP 429"] == ["2"]
    assert rows["output tokens"] == ["8"]
    assert err.count("failed, HTTP 429") == 1
    assert "too many requests" in err


def test_when_nothing_succeeds_the_status_says_so(bench):
    status, rows, err = bench(*SHORT, "--model-name=one_token")
    assert status == 1
    assert (rows["completed"], rows["failed, HTTP 500"]) == (["0"], ["4"])
    assert "it is broken" in err
    assert "time to first token" not in rows


@pytest.mark.parametrize("signal", ["interrupts", "terminates"])
def test_a_signal_ends_the_load_and_tells_what_was_measured(bench, tmp_path, signal):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,9,2\n3600,9,2\n")
    status, rows, err = bench("--trace", trace, f"--model-name={signal}")
    assert status == 130
    assert "tokens/s at which 99% are fluid" not in rows  # two tokens say nothing of it
    assert rows["requests"] == rows["completed"] == ["1"]
    assert "stopped after 1 of 2 requests" in err


@pytest.mark.parametrize("suffix", ["svg", "png", "html"])
def test_pictures(bench, tmp_path, suffix):
    plot = tmp_path / f"run.{suffix}"
    status, _, _ = bench(*SHORT, "--slo-ttft-ms=100", f"--plot={plot}")
    assert status == 0
    content = plot.read_bytes()
    if suffix == "svg":
        assert ET.fromstring(content).tag.endswith("svg")
    elif suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        page = content.decode()
        assert page.count("<svg") == page.count("</svg>") == 1
        assert "time to first token" in page
        assert not re.search(r"(src|href)=.?https?://", page)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rate-scale=2"], ["--rate-scale", "without a trace"]),
        (["--trace=t", "--input-len=2"], ["--input-len", "with a trace"]),
        (["--request-rate=0"], ["--request-rate is 0.0"]),
        (["--num-requests=-1"], ["--num-requests is -1"]),
        (["--duration-s=inf"], ["--duration-s is inf"]),
        (["--slo-ttft-ms=-5"], ["--slo-ttft-ms is -5.0"]),
        (["--deadline-token-ms=0"], ["--deadline-token-ms is 0.0"]),
        (["--deadline-prompt-token-ms=-1"], ["--deadline-prompt-token-ms is -1.0", "0 or more"]),
        (["--timeout-s=0"], ["--timeout-s is 0.0"]),
        (["--base-url=localhost:8000"], ["--base-url", "http://"]),
        (["--plot=run.pdf"], ["run.pdf", ".svg"]),
        (["--output=/nowhere/run.json"], ["output is", "/nowhere/run.json"]),
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
        (["--trace=/nowhere/trace.csv"], "/nowhere/trace.csv"),
        (["--base-url=http://127.0.0.1:9/v1"], "cannot be reached"),
    ],
)
def test_what_cannot_be_read_or_reached_is_an_error_in_one_line(capsys, args, word):
    assert main(["bench", "serve", *args]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert word in line
