"""What `jaxserve serve` refuses of several replicas before anything starts."""

from __future__ import annotations

import pytest

from jaxserve.cli import main


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--data-parallel-size=0"], "--data-parallel-size is 0; it must be 1 or more"),
        (["--data-parallel-size=two"], "'two' is not an integer"),
        (["--data-parallel-size=2", "--snapshot-dir=here"], "--snapshot-dir is of one engine"),
        (["--data-parallel-size=2", "--trace-file=t.json"], "--trace-file is of one engine"),
        (
            ["--decode-replicas=1"],
            "--decode-replicas is 1, but --prefill-replicas is 0; disaggregated prefill and",
        ),
        (["--prefill-replicas=2"], "take two replicas at least, one of each"),
        (
            ["--prefill-replicas=1", "--decode-replicas=1", "--data-parallel-size=2"],
            "--data-parallel-size is 2, but --prefill-replicas and --decode-replicas say how many",
        ),
        (["--prefill-replicas=1", "--decode-replicas=2", "--dev-mode"], "but there are 3 replicas"),
        (
            ["--disaggregation=auto"],
            "but --data-parallel-size is 1; disaggregated prefill and decode",
        ),
        (["--disaggregation=auto", "--data-parallel-size=2"], "give --slo, limits that requests"),
        (["--slo=ttft=1s"], "--slo is for disaggregation auto; leave it out"),
        (
            ["--disaggregation=auto", "--prefill-replicas=1", "--decode-replicas=1"],
            "which chooses among --data-parallel-size replicas; leave",
        ),
        (["--min-replicas=2"], "--min-replicas is 2, but --max-replicas is missing; add it, or"),
        (["--min-replicas=0", "--max-replicas=2"], "--min-replicas is 0; it must be 1 or more"),
        (["--max-replicas=1"], "--max-replicas is 1; it must be 2 or more"),
        (
            ["--min-replicas=3", "--max-replicas=2"],
            "--min-replicas is 3 and --max-replicas 2; the first must be 1 or more",
        ),
        (
            ["--max-replicas=2", "--data-parallel-size=2"],
            "--data-parallel-size is 2, a fixed number of replicas, but --max-replicas has it",
        ),
        (
            ["--max-replicas=2", "--prefill-replicas=1", "--decode-replicas=1"],
            "--prefill-replicas is 1, a fixed number",
        ),
        (["--max-replicas=3", "--snapshot-dir=s"], "there are 3 replicas; leave one"),
        (["--data-parallel-size=2", "--dev-mode"], "--dev-mode adds routes that change one"),
    ],
)
def test_refusals(options, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["serve", *options])
    except SystemExit as stop:
        status = stop.code
    assert status != 0
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
