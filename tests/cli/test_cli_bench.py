from __future__ import annotations

import json
import re

import pytest
from cli_command import SETTINGS

from jaxserve.cli.bench.accuracy import report


def test_bench_offline_counts_what_it_served_and_measures_the_limit(run_here, tiny_model, tmp_path):
    config, trace_file = tiny_model / "config.json", tmp_path / "trace.json"
    run = run_here(
        *("bench", "offline", "--num-prompts=3", "--input-len=40", "--output-len=6"),
        *("--model", config, "--load-format=dummy", "--scheduler=vllm", *SETTINGS),
        *("--trace-file", trace_file),
    )
    assert run.status == 0, run.stderr
    rows = [re.split(r"  +", line) for line in run.stdout.splitlines() if "  " in line]
    values = {name: cells for name, *cells in rows}
    assert values["requests"] == ["3"]
    assert values["prompt tokens"] == ["120"]
    assert values["output tokens"] == ["18"]
    # One sequence at a time: two chunks of its prompt, the second of which gives the first token.
    assert values["steps"] == [str(3 * (2 + 5))]
    # 32 + 32 rows for 40 tokens, then one row a token.
    assert values["padding, of the rows computed"] == [f"{24 / 69:.1%}"]
    assert values["scheduler"] == ["vllm"]
    assert len(values["time to first token"]) == len(values["between tokens"]) == 3
    assert re.fullmatch(r"\d+\.\d%( to \d+\.\d%)?", values["device idle, of the time"][0])
    assert 0 <= float(values["share of the limit reached"][0].rstrip("%")) < 100
    events = json.loads(trace_file.read_text())["traceEvents"]
    assert sum(event["name"] == "decode" for event in events) == 3
    assert "draft tokens" not in values


def test_bench_offline_counts_drafts(run_here, tiny_model, tmp_path):
    """All layers draft, so every draft is right: in the table, in the JSON and in the trace."""
    trace_file = tmp_path / "trace.json"
    drafts = {"method": "layer_skip", "num_layers": 2, "num_speculative_tokens": 3}
    given = (
        *("bench", "offline", "--num-prompts=2", "--input-len=8", "--output-len=9"),
        *("--model", tiny_model, "--speculative-config", json.dumps(drafts), *SETTINGS),
    )
    told = json.loads(run_here(*given, "--json", "--trace-file", trace_file).stdout)
    assert told["num_draft_tokens"] == told["num_accepted_tokens"] > told["num_drafts"] > 0
    steps = [event["args"] for event in json.loads(trace_file.read_text())["traceEvents"]]
    for name in ("draft_tokens", "accepted_tokens"):
        assert sum(step.get(name, 0) for step in steps) == told[f"num_{name}"]
    table = run_here(*given).stdout
    assert re.search(rf"of which accepted +{told['num_accepted_tokens']} \(100.0%\)", table)
    assert re.search(r"tokens of a sequence and step with drafts +[34]\.\d\d", table)


def test_bench_offline_as_json(run_here, tiny_model):
    run = run_here(
        *("bench", "offline", "--num-prompts=2", "--input-len=8", "--output-len=4", "--json"),
        *("--model", tiny_model, *SETTINGS),
    )
    told = json.loads(run.stdout)
    assert (told["requests"], told["prompt_tokens"], told["output_tokens"]) == (2, 16, 8)
    assert 0 < told["time_to_first_token_s"]["p50"] <= told["time_s"]
    assert told["between_tokens_s"]["p99"] > 0
    assert 0 <= told["share_of_limit"] < 1
    assert 0 <= told["device_idle"]["least"] <= told["device_idle"]["most"] <= 1


COMPRESSED = ("--kv-on=host", "--kv-compression=shadow")
FULL_RANK = (*COMPRESSED, "--shadow-rank=64", "--shadow-outliers=2")
ALL_TOKENS = (
    *("--kv-on=host", "--kv-compression=sparf"),
    *("--sparf-components=64", "--sparf-budget=256"),
)


@pytest.mark.parametrize(
    ("options", "read", "share"),
    [
        (FULL_RANK, "values copied, of those attended to", r"[1-9]\d?\.\d%"),
        (ALL_TOKENS, "tokens attended to, of those on the host", r"100\.0%"),
    ],
)
def test_bench_accuracy_of_all_that_there_is_is_that_of_full_attention(
    run_here, tiny_model, tmp_path, options, read, share
):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"short\n\n{'a long one, ' * 12}\n")
    run = run_here(
        *("bench", "accuracy", prompts, "--max-tokens=12", *options, "--model", tiny_model),
        *("--max-num-batched-tokens=17", "--page-size=16", "--max-model-len=256"),
        "--kv-cache-memory-bytes=96KiB",
    )
    assert run.status == 0, run.stderr
    told = dict(re.split(r"  +", line.strip()) for line in run.stdout.splitlines())
    assert told["prompts"] == "2"
    assert told["longer than the pool, so compressed"] == "1"
    assert told["answers that are the same"] == "2"
    assert told["tokens before the first difference"] == "100.0%"
    assert re.fullmatch(share, told[read])


def test_tokens_after_a_difference_do_not_agree():
    read = ("values copied, of those attended to", 0.25)
    told = report([(1, 2, 3, 4), (5, 6)], [(1, 9, 3, 4), (5, 6)], 1, read)
    values = dict(re.split(r"  +", line.strip()) for line in told.splitlines())
    assert values["answers that are the same"] == "1"
    assert values["tokens before the first difference"] == f"{3 / 6:.1%}"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "--kv-compression is 'none'"),
        ((*COMPRESSED, "--max-tokens=1"), "--max-tokens is 1"),
    ],
)
def test_bench_accuracy_without_what_it_compares_is_refused(run_here, capsys, options, told):
    with pytest.raises(SystemExit):
        run_here("bench", "accuracy", "prompts.txt", *options)
    assert told in capsys.readouterr().err


def test_bench_accuracy_without_prompts_is_refused(run_here, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n")
    run_here("bench", "accuracy", prompts, *COMPRESSED).assert_error("there are no prompts in")
