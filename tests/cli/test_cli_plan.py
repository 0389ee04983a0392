"""`plan` and `compile`: what an engine would be, and its programs in the cache."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from cli_command import CONTEXT, SETTINGS
from exhaustive import combination
from tiny_checkpoints import hf_shapes

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.llm import LLM
from jaxserve.models.loading.checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("ahead_of_time")


def test_compile_fills_the_cache_once(first_compile, run_here, tiny_model):
    counts = re.search(r"(\d+) programs compiled, 0 already cached", first_compile.stdout)
    directory = Path(first_compile.stdout.splitlines()[-1])
    assert len(list(directory.iterdir())) == int(counts[1]) > 0
    again = run_here("compile", tiny_model, *SETTINGS)
    assert f"0 programs compiled, {counts[1]} already cached" in again.stdout
    assert again.stdout.splitlines()[-1] == str(directory)


@pytest.mark.interfaces
def test_compile_makes_the_set_for_one_reader_too(first_compile, run_here, tiny_model):
    many = run_here("compile", tiny_model, "--max-num-batched-tokens=64", "--page-size=64")
    first, _, second, _ = many.stdout.splitlines()
    assert first.startswith("max_num_seqs 32: ")
    assert second.startswith("max_num_seqs 1: ")


def test_speculation_has_programs_of_two_widths(run_here, tiny_model):
    ngram = '{"num_speculative_tokens": 1}'
    settings = (*SETTINGS, "--max-num-batched-tokens=34", "--speculative-config", ngram)
    run = run_here("plan", tiny_model, *settings, "--programs")
    assert {"verify-1x1", "verify-1x2", "embed-1-0", "embed-1x2-0"} <= set(run.stdout.split())


@pytest.mark.parametrize(
    ("ngram", "reason"),
    [
        ("{", "--speculative-config is '{', which is not JSON"),
        ("{}", "--speculative-config has no num_speculative_tokens"),
        ('{"num_speculative_tokens": 99}', "num_speculative_tokens of --speculative-config is 99"),
    ],
)
def test_bad_speculation(run_here, tiny_model, capsys, ngram, reason):
    with pytest.raises(SystemExit):
        run_here("plan", tiny_model, f"--speculative-config={ngram}")
    assert f"error: {reason}" in capsys.readouterr().err


def test_compile_without_a_cache(run_here, tiny_model):
    run = run_here("compile", tiny_model, *SETTINGS, "--no-compilation-cache")
    run.assert_error("--compilation-cache")


def test_plan_needs_no_weights(run_here, tiny_model, tmp_path):
    config = tmp_path / "config.json"
    config.write_text((tiny_model / "config.json").read_text())
    run = run_here("plan", config, *SETTINGS, "--load-format=dummy", "--programs")
    assert run.status == 0, run.stderr
    rows = dict(re.split(r"  +", line)[:2] for line in run.stdout.splitlines() if "  " in line)
    shapes = hf_shapes(json.loads(config.read_text())).values()
    assert rows["weights"] == f"{4 * sum(map(math.prod, shapes)) / 1024:.1f} KiB"
    assert rows["tokens in the KV pool"] == f"{CONTEXT:,}"
    assert rows[f"requests of {CONTEXT:,} tokens at once"] == "1"
    # `compile` has put exactly these programs into the cache.
    programs = run.stdout.partition("PROGRAMS")[2].splitlines()[1:]
    assert programs
    assert all(line.endswith("  cache") for line in programs)
    summary = run_here("plan", config, *SETTINGS, "--load-format=dummy").stdout
    assert len(summary.partition("PROGRAMS")[2].splitlines()) == 6
    assert re.search(rf"^from the cache +{len(programs)}$", summary, re.MULTILINE)
    told = json.loads(run_here("plan", config, *SETTINGS, "--load-format=dummy", "--json").stdout)
    assert told["memory_bytes"]["weights"] == 4 * sum(map(math.prod, shapes))
    assert told["kv_pool"]["tokens"] == CONTEXT
    assert told["requests_at_once"] == [{"tokens": CONTEXT, "requests": 1}]
    assert [program["from_cache"] for program in told["programs"]] == [True] * len(programs)


@pytest.mark.parametrize("scheduler", ["sarathi", combination("orca")])
def test_as_many_requests_run_at_once_as_plan_says(run_here, tiny_model, scheduler):
    """Twelve pages hold four requests of three, but a policy whose sequences grow keeps a page
    free when it admits one beside others."""
    page_size, prompt = 64, 2 * 64 + 1
    config = open_checkpoint(tiny_model).config
    settings = {
        "max_model_len": prompt + page_size,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 6 + 32,
        "page_size": page_size,
        "scheduler": scheduler,
        "program_scope": "step",
        "kv_cache_memory_bytes": (1 + 12) * page_size * config.kv_bytes_per_token(4),
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    run = run_here("plan", tiny_model, *flags)
    rows = dict(re.split(r"  +", line)[:2] for line in run.stdout.splitlines() if "  " in line)
    promised = int(rows[f"requests of {prompt + page_size} tokens at once"])
    assert promised == {"sarathi": 3, "orca": 4}[scheduler]
    params = SamplingParams(temperature=0, max_tokens=page_size, ignore_eos=True)
    with LLM(tiny_model, **settings) as llm:
        for first in range(6):
            llm.engine.add(f"{first}", [3 + first] * prompt, params)
        running = []
        while llm.engine.has_work:
            llm.engine.step()
            running.append(llm.engine.scheduler.num_running)
    assert max(running) == promised


def test_a_model_that_does_not_fit_gets_its_table_and_what_would_fit(run_here, tiny_model):
    run = run_here("plan", tiny_model, *SETTINGS, "--memory-utilization=1e-7")
    run.assert_error(
        f"a request of --max-model-len {CONTEXT}", "What fits: --memory-utilization 0.0"
    )
    rows = dict(re.split(r"  +", line)[:2] for line in run.stdout.splitlines() if "  " in line)
    assert {"weights", "program scratch", "total", "missing"} <= set(rows)
    assert "PROGRAMS" not in run.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--exact"], "exact is for --device"),
        (["--device=l4", "--exact"], "no description of L4"),
    ],
)
def test_programs_of_devices_that_are_not_here(run_here, tiny_model, arguments, reason):
    run = run_here("plan", tiny_model, *SETTINGS, *arguments)
    run.assert_error(reason)


def test_programs_of_devices_that_are_not_here_are_named_but_not_compiled(run_here, tiny_model):
    options = ("plan", tiny_model, *SETTINGS, "--device=l4")
    document = json.loads(run_here(*options, "--json").stdout)
    names = [program["name"] for program in document["programs"]]
    assert names and all(program["scratch_bytes"] is None for program in document["programs"])
    summary = run_here(*options).stdout
    assert re.search(rf"^programs +{len(names)}$", summary, re.MULTILINE)
    listed = run_here(*options, "--programs").stdout.partition("PROGRAMS")[2].splitlines()[1:]
    assert [line.split() for line in listed] == [[name, "unknown"] for name in names]
