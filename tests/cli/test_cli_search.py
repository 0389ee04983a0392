"""`jaxserve search`: the best deployment on target devices."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from jaxserve.cli import parse
from jaxserve.cli.planning.described import Described, sizes
from jaxserve.cli.search.space import Space
from jaxserve.core.settings.config import EngineConfig
from jaxserve.simulator.deployments.capacity import CapacitySearch
from jaxserve.simulator.profile import HeldOut, Profile, ProgramTime

SPACE = (
    "--device=h200,h100",
    "--devices=4,8",
    "--tensor-parallel-size=1,4,8",
    "--pipeline-parallel-size=1",
    "--scheduler=sarathi",
    "--max-num-seqs=64",
    "--max-num-batched-tokens=576,1088",
    "--processes=1",
)
LOAD = ("--request-rate=2", "--input-len=300", "--output-len=20", "--num-requests=16")
SLO = "--slo=ttft_p90=2s,itl_p90=60ms"
PRICES = "h200 = 3.5\nh100 = 2.5\n"


@pytest.fixture
def prices(tmp_path) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    return path


@pytest.fixture
def searches(monkeypatch) -> list[int]:
    """Grows with every search for a capacity."""
    begun = []
    between = CapacitySearch.between

    def watched(self: CapacitySearch, above: int | None, last: int):
        begun.append(last)
        return between(self, above, last)

    monkeypatch.setattr(CapacitySearch, "between", watched)
    return begun


def test_the_best_deployment(run_here, config_70b, tmp_path, prices, searches):
    options = (*SPACE, *LOAD, SLO, "--prices", prices)
    out, report = tmp_path / "search.jsonl", tmp_path / "report.html"
    run = run_here("search", config_70b, *options, "--json", "--out", out, "--report", report)
    assert run.status == 0, run.stderr
    assert "warning: the best deployment has" in run.stderr and "--num-requests" in run.stderr
    found = json.loads(run.stdout)
    # One device holds no Llama 70B.
    assert {row["settings"]["tensor_parallel_size"] for row in found["dropped"]} == {1}
    assert all("may be used" in row["reason"] for row in found["dropped"])
    deployments, best = found["deployments"], found["deployments"][found["winner"]]
    assert len(deployments) + len(found["dropped"]) == 2 * 2 * 5
    assert best["outcome"] == "met"
    assert best["requests_per_s"] >= found["load_requests_per_s"] == 2
    assert best["cost"] == (3.5 if best["device"] == "h200" else 2.5) * best["num_devices"]
    serving = [row for row in deployments if (row["requests_per_s"] or 0) >= 2]
    assert best["cost"] == min(row["cost"] for row in serving)
    assert found["winner"] in found["front"]
    met = [row for row in deployments if row["outcome"] == "met"]
    assert all(row["requests_per_s"] <= row["most_requests_per_s"] for row in met)
    assert all(row["values"]["itl_p90"] <= 60_000 for row in met)
    assert "one request alone [s]" in report.read_text()
    # The same command finds all of it in its file.
    count, lines = len(searches), out.read_bytes().splitlines(keepends=True)
    assert 1 <= count < len(lines) == len(deployments) + 1
    again = run_here("search", config_70b, *options, "--json", "--out", out)
    assert len(searches) == count
    assert json.loads(again.stdout)["deployments"] == deployments
    # One that was killed while it wrote a line continues there, to the same bytes.
    whole = out.read_bytes()
    out.write_bytes(b"".join(lines[:3]) + lines[3][:10])
    run_here("search", config_70b, *options, "--out", out)
    assert count <= len(searches) <= 2 * count
    assert out.read_bytes() == whole
    run = run_here("search", config_70b, *options[:-2], "--out", out)
    run.assert_error("another space, load, SLO, prices or version")
    out.write_text("{}\n")
    run_here("search", config_70b, *options, "--out", out).assert_error("not the file of a search")
    # The command that it prints is one.
    manifest = tmp_path / "serving.yaml"
    run = run_here("search", config_70b, *options, "--manifest", manifest, "--image", "here/j:1")
    assert "cost/h" in run.stdout
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("best: ")]
    words = shlex.split(line.removeprefix("best: jaxserve "))
    serve = parse(words)
    assert serve.engine.tensor_parallel_size == best["settings"]["tensor_parallel_size"]
    assert serve.engine.max_num_batched_tokens == best["settings"]["max_num_batched_tokens"]
    assert serve.data_parallel_size == best["replicas"]
    assert str(serve.engine.model) == str(config_70b)
    # So is that of the pod, which has the devices of all replicas.
    _, deployment, _ = yaml.safe_load_all(manifest.read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert parse(container["args"]).engine == serve.engine
    assert parse(container["args"]).data_parallel_size == serve.data_parallel_size
    assert container["image"] == "here/j:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": best["num_devices"]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            (SLO, "--request-rate=5000"),
            ["serves 5,000.00 requests/s", "the most is", "requests/s, by"],
        ),
        (("--slo=ttft=1ms",), ["meets ttft_p99 1 ms at any rate", "the best", "ttft_p99", "TP"]),
        (
            ("--slo=itl_p50=10us,ttft=1s",),
            ["itl_p50 0.01 ms, ttft_p99 1,000 ms at any rate; the best"],
        ),
    ],
)
def test_an_slo_out_of_reach(run_here, config_70b, options, words):
    load = [word for word in LOAD if not word.startswith("--request-rate")]
    run = run_here(
        "search", config_70b, *SPACE[2:], "--device=h200", "--devices=8", *load, *options
    )
    run.assert_error(*words)
    worst_of_16 = "ttft_p99 of 16 requests is that of the worst of them; add --num-requests 100"
    assert (worst_of_16 in run.stderr) == ("ttft_p90" not in options[0])
    assert "deployments" in run.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((SLO,), ["--device", "h100, h200"]),
        ((SLO, "--device=h20"), ["'h20'", "h100, h200"]),
        (("--device=h200",), ["--slo", "ttft=2s"]),
        (("--device=h200", "--slo=ttft=2"), ["--slo has 'ttft=2'", "unit"]),
        (("--device=h200", "--slo=itl=20ms"), ["--slo is 'itl=20ms'", "queue"]),
        ((SLO, "--device=h200", "--devices=0"), ["--devices is (0,)"]),
        (
            (SLO, "--device=h200", "--devices=8", "--tensor-parallel-size=3"),
            ["--tensor-parallel-size 3", "--pipeline-parallel-size 1,2,4", "divides devices 8"],
        ),
        ((SLO, "--device=h200", "--scheduler=fifo"), ["--scheduler is 'fifo'", "sarathi"]),
        ((SLO, "--device=h200", "--max-num-seqs=0"), ["--max-num-seqs is 0"]),
        ((SLO, "--device=h200", "--prefill-replicas=few"), ["--prefill-replicas has 'few'"]),
        ((SLO, "--device=h200", "--draft-acceptance=0.7"), ["needs --speculative-config"]),
        (
            (SLO, "--device=h200", "--num-speculative-tokens=2"),
            ["--num-speculative-tokens needs --speculative-config"],
        ),
        ((SLO, "--device=h200", "--processes=0"), ["--processes is 0"]),
        ((SLO, "--device=h200", "--report=x.pdf"), [".html"]),
        ((SLO, "--device=h200", "--manifest=x.yaml"), ["--manifest and --image", "Dockerfile"]),
        ((SLO, "--device=h200", "--image=x"), ["go together"]),
        (
            (
                *("--device=h200", "--devices=32", "--tensor-parallel-size=16", SLO, *LOAD),
                *("--pipeline-parallel-size=1", "--scheduler=sarathi", "--max-num-seqs=64"),
                *("--max-num-batched-tokens=576", "--manifest=x.yaml", "--image=x"),
            ),
            [
                "the only deployment to search",
                "spans 2 hosts",
                "search with devices for one engine",
            ],
        ),
        ((SLO, "--device=h200", "--request-rate=inf"), ["all at once"]),
        ((SLO, "--device=h200", "--prices=missing.toml"), ["missing.toml"]),
        ((SLO, "--device=h200", "--profile=missing.json"), ["missing.json"]),
        (
            (SLO, "--device=l4", "--devices=1"),
            ["18 deployments", "18 of them", "needs", "may be used"],
        ),
        ((SLO, *SPACE, "--input-len=9000"), ["9000 tokens", "8192", "--max-input-tokens"]),
        (
            (
                SLO,
                "--device=h200",
                "--devices=8",
                "--max-num-seqs=64",
                "--max-num-batched-tokens=64",
            ),
            ["must exceed the sequences"],
        ),
    ],
)
def test_bad_input(run_here, config_70b, capsys, options, words):
    try:
        run = run_here("search", config_70b, *options)
    except SystemExit as stop:  # While arguments are parsed.
        assert stop.code == 2
        stderr = capsys.readouterr().err
    else:
        assert run.status == 1
        stderr = run.stderr
    (error,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h200 = 3.5\n", ["no price of 'h100'", "3.50"]),
        ("h200 = 3.5\nh100 = -1\n", ["the price -1 of 'h100'"]),
        ("h200 = '3.5'\n", ["the price '3.5' of 'h200'"]),
        ("h200: 3.5\n", ["cannot be read"]),
    ],
)
def test_bad_prices(run_here, config_70b, prices, text, words):
    prices.write_text(text)
    run_here("search", config_70b, *SPACE, SLO, "--prices", prices).assert_error(*words)


def test_measured_step_times_replace_modelled_ones(run_here, config_70b, tmp_path):
    """Steps of 1 ms each, of the engine with 64 sequences on H200s."""
    config = EngineConfig(
        config_70b, tensor_parallel_size=8, max_num_seqs=64, max_num_batched_tokens=576
    )
    plan = Described.of(config, "h200", None).plan
    profile = Profile(
        settings=plan.config.of_programs(),
        model=sizes(plan.shapes),
        device={"platform": "gpu", "kind": "NVIDIA H200", "memory_bytes": 150_000_000_000},
        host_bytes_per_s=5e10,
        page_copy_s=1e-6,
        programs=dict.fromkeys(plan.shapes.buckets.keys(), ProgramTime(1e-3)),
        held_out=HeldOut(0, 0.0, 0.0),
    )
    path = tmp_path / "profile.json"
    profile.write(path)
    others = ("--devices=8", "--tensor-parallel-size=8", "--max-num-batched-tokens=576", *LOAD)
    options = (*SPACE, *others, SLO, "--profile", path, "--json")
    run = run_here("search", config_70b, *options, "--max-num-seqs=32,64")
    assert run.status == 0, run.stderr
    found = {
        (row["device"], row["settings"]["max_num_seqs"]): row
        for row in json.loads(run.stdout)["deployments"]
    }
    assert {place for place, row in found.items() if "measured" in row["step_times"]} == {
        ("h200", 64)
    }
    # Of 300 tokens a request prefills in one step, and decodes in 19.
    assert found["h200", 64]["latency_us"] == 20_000
    assert all(row["latency_us"] > 100_000 for row in found.values() if "mod" in row["step_times"])
    assert "1 of 4 deployments have measured step times" in run.stderr
    run = run_here("search", config_70b, *options, "--max-num-seqs=32")
    run.assert_error("profile.json' is of none of the 2", "measured with 64")
    run = run_here("search", config_70b, *options, "--device=l4", "--max-num-seqs=64")
    run.assert_error("profile.json' is of none", "NVIDIA H200, which is no L4")
    twice = ("--profile", f"{path},{path}")
    run = run_here("search", config_70b, *SPACE, *others, SLO, *twice)
    run.assert_error("--profile has", "same device, model and settings")


def test_prefill_apart_and_drafts_are_searched(run_here, config_70b):
    """Of two engines one may prefill while the other decodes; a request alone is faster with drafts
    that are kept."""
    space = ("--device=h200", "--devices=8", "--tensor-parallel-size=4", *SPACE[3:6], SPACE[7])
    space += ("--max-num-batched-tokens=576", "--prefill-replicas=auto")
    drafts = '--speculative-config={"num_speculative_tokens": 2}'
    space += (drafts, "--num-speculative-tokens=0,2", "--draft-acceptance=0.9")
    run = run_here("search", config_70b, *space, *LOAD, SLO, "--json")
    assert run.status == 0, run.stderr
    document = json.loads(run.stdout)
    deployments = document["deployments"]
    tried = {
        (d["prefill_replicas"], bool(d["settings"]["speculative_config"])) for d in deployments
    }
    assert tried == {(0, False), (0, True), (1, False), (1, True)}
    plain, drafting = (each for each in deployments if not each["prefill_replicas"])
    if plain["settings"]["speculative_config"]:
        plain, drafting = drafting, plain
    assert drafting["latency_us"] < plain["latency_us"]
    words = shlex.split(drafting["command"])[1:]
    assert parse(words).engine.speculative_config.num_speculative_tokens == 2
    apart = [each["command"] for each in deployments if each["prefill_replicas"]]
    assert all("--prefill-replicas 1 --decode-replicas 1" in command for command in apart)


def test_prefill_apart_comes_out_as_a_command_and_a_manifest(run_here, config_70b, tmp_path):
    manifest = tmp_path / "serving.yaml"
    space = ("--device=h200", "--devices=8", "--tensor-parallel-size=2", *SPACE[3:6], SPACE[7])
    space += ("--max-num-batched-tokens=576", "--prefill-replicas=1,3")
    space += ('--speculative-config={"num_speculative_tokens": 2}', "--draft-acceptance=0.9")
    more = ("--manifest", manifest, "--image", "here/j:1", "--report", tmp_path / "report.html")
    run = run_here("search", config_70b, *space, *LOAD, SLO, *more)
    assert run.status == 0, run.stderr
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("best: ")]
    serve = parse(shlex.split(line.removeprefix("best: jaxserve ")))
    assert serve.prefill_replicas in (1, 3)
    assert serve.num_replicas == 4
    # The page shows all engines, with their drafts.
    assert "<h2>The best, at the load" in (tmp_path / "report.html").read_text()
    _, deployment, _ = yaml.safe_load_all(manifest.read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    of_pod = parse(container["args"])
    assert of_pod.engine == serve.engine
    roles = of_pod.prefill_replicas, of_pod.decode_replicas
    assert roles == (serve.prefill_replicas, serve.decode_replicas)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_the_grid_has_every_mesh():
    """Sizes are combined with each other, and with experts that are split or spread."""
    space = Space(
        tensor_parallel_size=(1, 2, 4),
        pipeline_parallel_size=(1, 2),
        context_parallel_size=(1, 2),
        scheduler=("sarathi",),
        max_num_batched_tokens=(576,),
        max_num_seqs=(64,),
    )
    choices = list(space.choices(["h200"], [8], experts=True))
    meshes = {choice.mesh for choice in choices}
    assert len(meshes) == len(choices)
    assert meshes == {
        "DP8",
        *("TP2 DP4", "TP2 EP DP4", "TP4 DP2", "TP4 EP DP2"),
        *("PP2 DP4", "CP2 DP4", "CP2 EP DP4", "PP2 CP2 DP2", "PP2 EP CP2 DP2"),
        *("TP2 PP2 DP2", "TP2 EP PP2 DP2", "TP4 PP2", "TP4 EP PP2"),
        *("TP2 CP2 DP2", "TP2 EP CP2 DP2", "TP4 CP2", "TP4 EP CP2"),
        *("TP2 PP2 CP2", "TP2 EP PP2 CP2"),
    }
    assert all(8 % choice.replicas == 0 for choice in choices)
