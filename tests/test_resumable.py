"""Scripts that are told to stop during a list of prompts, and are run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from exhaustive import exhaustive
from patience import PATIENCE_S

SCRIPT = """
    import json, os, signal, sys
    from pathlib import Path
    from tiny_engines import TinyModel
    from jaxserve import SamplingParams, resumable

    model, work, stop_at = TinyModel.open(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=4 + 3 * i, ignore_eos=True)
        for i in range(len(model.prompts))
    ]
    with model.load() as llm, resumable(llm, work, deadline_s=400) as streams:
        runner = llm.engine._runner
        pack, packs = runner.pack, iter(range(1, 1000))
        def counted(plan, step_id):
            if next(packs) == stop_at:
                for name in sys.argv[4:]:
                    os.kill(os.getpid(), getattr(signal, name))
            return pack(plan, step_id)
        runner.pack = counted
        outputs = [stream.result() for stream in streams] or llm.generate(
            model.prompts, params, use_tqdm=False
        )
        print(json.dumps([[len(streams)]] + [output.outputs[0].token_ids for output in outputs]))
"""


def run(model, work, stop_at, *signals):
    """Runs the script, which is sent signals during a step."""
    arguments = [str(model.path), str(work), str(stop_at), *signals]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture(scope="module")
def undisturbed(llama, tmp_path_factory):
    """What the script prints that no one stops."""
    return run(llama, tmp_path_factory.mktemp("unused"), 0)


@pytest.mark.parametrize(
    "stop_at, signals",
    [
        (7, ["SIGTERM"]),
        pytest.param(30, ["SIGTERM", "SIGTERM"], marks=pytest.mark.interfaces),
        pytest.param(12, ["SIGINT", "SIGTERM"], marks=[pytest.mark.interfaces, exhaustive]),
    ],
)
def test_a_list_of_prompts_is_finished_by_the_next_process(
    llama, undisturbed, tmp_path, stop_at, signals
):
    """By step 30 some have ended, whose outputs no caller has read. However many signals come
    within a step, none cuts it in two."""
    first = run(llama, tmp_path, stop_at, *signals)
    assert first.returncode == os.EX_TEMPFAIL, first.stderr
    assert first.stdout == ""
    second = run(llama, tmp_path, 0)
    assert second.returncode == 0, second.stderr
    (restored,), *outputs = json.loads(second.stdout)
    assert restored == len(llama.prompts)
    assert not list(tmp_path.iterdir())
    (restored,), *expected = json.loads(undisturbed.stdout)
    assert restored == 0
    assert outputs == expected


def test_sigterm_after_all_is_done_is_only_an_end(llama, tmp_path):
    script = textwrap.dedent(SCRIPT) + "    os.kill(os.getpid(), signal.SIGTERM)\n"
    done = subprocess.run(
        [sys.executable, "-c", script, str(llama.path), str(tmp_path), "0"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == os.EX_TEMPFAIL, done.stderr
    assert len(json.loads(done.stdout)) == len(llama.prompts) + 1
    assert not (tmp_path / "manifest.json").exists()


def test_a_directory_that_cannot_be_used_is_refused_at_the_start(llama, tmp_path):
    (tmp_path / "letter.txt").write_text("not a snapshot's")
    done = run(llama, tmp_path, 0)
    assert done.returncode == 1 and "letter.txt" in done.stderr and not done.stdout
