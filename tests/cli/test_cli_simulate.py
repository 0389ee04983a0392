"""`simulate`, `profile`, and `plan` for target devices."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_command import LLAMA_70B

from jaxserve.cli.planning.described import Described
from jaxserve.cli.planning.plan_tables import turn_lengths
from jaxserve.core import devices
from jaxserve.core.devices import DeviceSpec
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.plan import StepPlan
from jaxserve.simulator.simulation import Arrival

ON_EIGHT = ("--device=h200", "--devices=8")
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,400,20\n0.1,40,40\n0.3,80,1\n"
MACHINE = """
name = "two cores"
kind = "cpu"
platform = "cpu"
source = "a guess"
memory_bytes = 8_000_000_000
memory_bytes_per_s = 10e9
flops = {float32 = 50e9}
link_bytes_per_s = 1e9
"""
BLOCKS = [
    {"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [7, 8]},
    {"timestamp": 9000, "input_length": 1500, "output_length": 4, "hash_ids": [7, 8, 9]},
]


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def rows(stdout: str) -> dict[str, str]:
    found = (re.split(r"  +", line) for line in stdout.splitlines() if "  " in line)
    return {parts[0]: parts[-1] for parts in found}


def test_a_plan_of_devices_that_are_not_here(run_here, config_70b, compiled):
    run = run_here("plan", config_70b, *ON_EIGHT)
    assert run.status == 0, run.stderr
    assert not [event for event in compiled if "backend_compile" in event], "which takes minutes"
    told = rows(run.stdout)
    assert "on 8 x H200 SXM 141 GB" in run.stdout
    assert "ONE USER'S TURN, MODELLED (ROOFLINE)" in run.stdout
    document = json.loads(run_here("plan", config_70b, *ON_EIGHT, "--json").stdout)
    weights = 80 * (8192 * (8192 + 2 * 1024 + 8192) + 3 * 8192 * 28_672) + 2 * 128_256 * 8192
    norms = (2 * 80 + 1) * 8192  # Which every device has.
    assert document["memory_bytes"]["weights"] == 2 * (weights // 8 + norms)
    assert document["num_devices"] == 8
    at_once = document["requests_at_once"][0]
    assert told["users of 8,192 tokens at once"] == f"{at_once['requests']:,}"
    session = document["session"]
    # No faster than arithmetic and memory allow.
    assert session["prefill_s"] > 2 * weights * 7942 / (8 * 989e12)
    assert session["decode_s"] > 249 * 2 * weights / (8 * 4.8e12)
    assert session["switch_s"] > 2 * 8191 * 80 * 2 * 1024 * 2 / (8 * 64e9)
    # As modelled, they are within a small factor of that.
    assert session["prefill_s"] < 4 * 2 * weights * 7942 / (8 * 989e12)
    assert session["decode_s"] < 4 * 249 * 2 * weights / (8 * 4.8e12)


def test_a_plan_whose_pool_holds_no_request_as_long_as_the_context(run_here, config_70b):
    run = run_here("plan", config_70b, *ON_EIGHT, "--kv-cache-memory-bytes=64MiB", "--json")
    document = json.loads(run.stdout)
    session, tokens = document["session"], document["kv_pool"]["tokens"]
    assert tokens < 8192
    # The KV of the last token is never needed.
    assert (session["prompt_tokens"], session["output_tokens"]) == (tokens + 1 - 250, 250)
    assert session["decode_s"] > 0


@pytest.mark.parametrize("scheduler", ["sarathi", "orca"])
def test_as_many_requests_run_as_a_plan_says(config_70b, scheduler):
    """On two devices there is room for few. Steps are so large that all prefill before one ends."""
    config = EngineConfig(
        config_70b,
        tensor_parallel_size=2,
        max_num_seqs=64,
        max_num_batched_tokens=64 + 65_536,
        scheduler=scheduler,
    )
    described = Described.of(config, "h200", None)
    promised = described.plan.admission.num_at_once(8192)
    assert 1 < promised < 60
    prompt = 127 * 64 + 1  # The last page has room for the output.
    params = SamplingParams(temperature=0.0, max_tokens=63, ignore_eos=True)
    simulation = described.deployment.simulation(described.times)
    running = []
    schedule = simulation.core.scheduler.schedule

    def watched(now_us: int) -> StepPlan:
        plan = schedule(now_us)
        running.append(simulation.core.scheduler.num_running)
        return plan

    simulation.core.scheduler.schedule = watched
    simulation.run([Arrival(0, [number] * prompt, params) for number in range(promised + 4)])
    assert max(running) == promised


def test_a_simulation_is_reproducible_to_the_byte(run_here, config_70b, trace, tmp_path):
    files = [tmp_path / name for name in ("report.html", "steps.json", "again.html")]
    options = (*ON_EIGHT, "--trace", trace, "--json")
    first = run_here(
        "simulate", config_70b, *options, "--report", files[0], "--trace-file", files[1]
    )
    again = run_here("simulate", config_70b, *options, "--report", files[2])
    assert first.status == again.status == 0, first.stderr
    document, other = json.loads(first.stdout), json.loads(again.stdout)
    for found in (document, other):
        found["settings"]["report"] = found["settings"]["trace_file"] = None
    assert document == other
    summary, engines = document["summary"], document["engines"]
    assert (summary["completed"], summary["prompt_tokens"], summary["output_tokens"]) == (
        3,
        520,
        61,
    )
    assert engines["scheduled_tokens"] == 520 + 61 - 3
    assert 0 < engines["mfu"] < 1
    assert 0 < engines["mbu"] < 1
    assert re.search(r"simulated 578 tokens in [\d.]+ s, [\d,]+ tokens/s", first.stderr)
    page = files[0].read_text()
    assert page == files[2].read_text()
    assert "KV pool in use" in page
    assert "MFU" in page
    assert json.loads(files[1].read_text())["traceEvents"]


def test_steps_read_what_is_below_the_device(config_70b):
    """A decode waits for all layers, and for the KV of all pages on the host."""
    link, disk, layers = 0.8 * 64e9, 2e9, 80
    of_layers = 2 * layers * (8192 * (8192 + 2 * 1024 + 8192) + 3 * 8192 * 28_672 + 2 * 8192)
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 513, "weights_on": "host"}
    times = {"host": of_layers / link + layers * 20e-6}
    times["disk"] = times["host"] + of_layers / disk + layers * 20e-6
    for tier, read_s in times.items():
        described = Described.of(
            EngineConfig(config_70b, **settings | {"weights_on": tier}), "h100", None
        )
        memory, deployment = described.plan.memory, described.deployment
        assert memory.weights_bytes < of_layers / 10
        session = deployment.session(described.times, 400, 11)
        assert session.decode_s == pytest.approx(10 * read_s, rel=1e-6)
        assert session.prefill_s == pytest.approx(read_s, rel=1e-6)
    # Four steps to a read, of one row each: every second token of two requests that share it.
    of_block = {"steps_per_weight_read": 2, "max_num_seqs": 2, "max_num_batched_tokens": 514}
    block = Described.of(EngineConfig(config_70b, **settings | of_block), "h100", None)
    params = SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True)
    simulation = block.deployment.simulation(block.times)
    simulation.run([Arrival(0, [number] * 400, params) for number in range(2)])
    assert simulation.clock.now() / 1e6 == pytest.approx(11 * times["host"], rel=0.1)
    page_bytes = 64 * 2 * 1024 * layers * 2
    kept = {"kv_on": "host", "kv_cache_memory_bytes": 41 * page_bytes}
    described = Described.of(EngineConfig(config_70b, **settings | kept), "h100", None)
    session = described.deployment.session(described.times, 6400 - 11, 11)
    resident = described.plan.memory.host_kv.resident_pages
    groups = -(-(100 - resident) // resident)
    read_s = times["host"] + groups * (resident * page_bytes / link + layers * 20e-6)
    assert session.decode_s == pytest.approx(10 * read_s, rel=0.01)
    most = described.plan.config.max_model_len
    assert sum(turn_lengths(described.plan)) == min(
        described.plan.memory.host_kv.longest(most) + 1, most
    )


def test_a_mesh_of_several_hosts_needs_their_network(run_here, config_70b, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text((Path(devices.__file__).parent / "h100.toml").read_text())
    decode_s = []
    for network in ("50e9", "5e9"):
        own.write_text(
            own.read_text().replace(
                "network_bytes_per_s = 50e9", f"network_bytes_per_s = {network}"
            )
        )
        run = run_here("plan", config_70b, "--device", own, "--devices=16", "--json")
        assert run.status == 0, run.stderr
        document = json.loads(run.stdout)
        decode_s.append(document["session"]["decode_s"])
        assert document["memory_bytes"]["host"] == 0  # Several hosts offload no KV.
    # Sums over 16 devices, two in each layer, of the smallest program, which has two rows.
    row_s = 249 * 2 * 160 * 2 * 15 / 16 * 8192 * 2 / 0.8 * (1 / (8 * 5e9) - 1 / (8 * 50e9))
    assert decode_s[1] - decode_s[0] == pytest.approx(row_s, rel=0.02)
    own.write_text(own.read_text().replace("network_bytes_per_s = 5e9", ""))
    run = run_here("plan", config_70b, "--device", own, "--devices=16")
    run.assert_error("several hosts of 8", "network_bytes_per_s")
    assert run_here("plan", config_70b, "--device", own, "--devices=8").status == 0


def test_what_is_printed(run_here, config_70b, trace):
    run = run_here("simulate", config_70b, *ON_EIGHT, "--trace", trace, "--slo-ttft-ms=500")
    told = rows(run.stdout)
    assert {
        "devices",
        "step times",
        "time to first token",
        "between tokens",
        "whole answer",
        "goodput",
        "fluidity index, mean",
        "scheduling delay p50",
        "preemptions",
        "prefix cache hit rate",
        "KV pool in use, peak",
        "MFU",
        "MBU",
    } <= told.keys()
    assert told["step times"] == "modelled (roofline)"
    assert told["completed"] == "3"
    assert "sent late by" not in told


def test_prompts_share_the_blocks_of_a_trace(run_here, config_70b, tmp_path):
    path = tmp_path / "blocks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in BLOCKS))
    options = (*ON_EIGHT, "--trace", path, "--json")
    summary = json.loads(run_here("simulate", config_70b, *options).stdout)["summary"]
    assert summary["cached_tokens"] == 1024
    # Round robin sends the second elsewhere.
    run = run_here("simulate", config_70b, *options, "--replicas=2")
    assert json.loads(run.stdout)["summary"]["cached_tokens"] == 0


def test_a_router_finds_cached_prefixes_and_adds_replicas(run_here, config_70b, tmp_path):
    path = tmp_path / "blocks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in BLOCKS))
    options = (*ON_EIGHT, "--trace", path, "--json", "--routing=freeness")
    found = json.loads(run_here("simulate", config_70b, *options, "--replicas=2").stdout)
    assert found["summary"]["cached_tokens"] == 1024
    assert found["engines"]["mean_replicas"] == 2 and found["engines"]["moved"] == 0
    alone = json.loads(run_here("simulate", config_70b, *options).stdout)["engines"]
    assert alone["mean_replicas"] == 1
    # Both replicas count from the first arrival to the last answer, busy or not.
    assert found["engines"]["kv_pool_mean"] < found["engines"]["kv_pool_peak"] / 20
    # 140 GB from a disk take 70 s.
    load = ("--request-rate=6", "--input-len=400", "--output-len=60", "--num-requests=120")
    small = ("--max-num-seqs=2", "--max-num-batched-tokens=130", "--min-replicas=1")
    run = run_here("simulate", config_70b, *ON_EIGHT, *load, *small, "--max-replicas=3")
    told = rows(run.stdout)
    assert int(told["engines added, removed"].split(", ")[0]) >= 1
    assert 1 < float(told["engines, mean"]) <= 3
    assert "1 to 3 engines" in told["devices"]


def test_prefill_and_decode_apart(run_here, config_70b):
    load = ("--request-rate=2", "--input-len=400", "--output-len=20", "--num-requests=12")
    apart = ("--prefill-replicas=1", "--decode-replicas=2")
    told = rows(run_here("simulate", config_70b, *ON_EIGHT, *load, *apart).stdout)
    assert "1 prefill and 2 decode engines" in told["devices"]
    assert told["requests moved"] == "12"


@pytest.mark.parametrize("scheduler", ["static", "orca", "vllm", "splitfuse", "medha"])
def test_every_scheduler_and_drawn_loads(run_here, config_70b, scheduler):
    load = ("--request-rate=inf", "--input-len=300", "--output-len=5", "--num-requests=6")
    more = ("--random-range-ratio=0.5", f"--scheduler={scheduler}", "--json")
    run = run_here("simulate", config_70b, *ON_EIGHT, *load, *more)
    summary = json.loads(run.stdout)["summary"]
    assert summary["completed"] == 6
    assert summary["output_tokens"] == summary["asked_output_tokens"] != 30


def test_speculation_and_other_meshes(run_here, config_70b):
    """Drafts that are accepted save decodes; of eight devices, four are left to split a layer."""
    load = ("--request-rate=1", "--input-len=64", "--output-len=40", "--num-requests=4", "--json")
    drafts = '--speculative-config={"num_speculative_tokens": 3}'
    gap_us = {}
    for rate in ("0", "0.9,0.8"):
        options = (*ON_EIGHT, "--context-parallel-size=2", drafts, f"--draft-acceptance={rate}")
        run = run_here("simulate", config_70b, *options, *load)
        assert run.status == 0, run.stderr
        document = json.loads(run.stdout)
        assert document["settings"]["engine"]["tensor_parallel_size"] == 4
        assert document["summary"]["output_tokens"] == 160
        gap_us[rate] = document["summary"]["tpot_us"][0]
    assert gap_us["0.9,0.8"] < gap_us["0"] / 2


def test_a_plan_with_a_draft_model_that_is_not_here(run_here, config_70b, tmp_path):
    small = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8}
    small.write_text(json.dumps(LLAMA_70B | sizes | {"intermediate_size": 2048}))
    drafts = json.dumps({"model": str(small), "num_speculative_tokens": 3})
    plans = {}
    for option in ((), (f"--speculative-config={drafts}",)):
        run = run_here("plan", config_70b, *ON_EIGHT, "--json", *option)
        assert run.status == 0, run.stderr
        plans[bool(option)] = json.loads(run.stdout)
    layers = 2 * (1024 * (1024 + 2 * 1024 + 1024) + 3 * 1024 * 2048) + 2 * 128_256 * 1024
    weights = plans[True]["memory_bytes"]["weights"] - plans[False]["memory_bytes"]["weights"]
    assert weights == 2 * (layers // 8 + (2 * 2 + 1) * 1024)
    assert plans[True]["session"]["decode_s"] == plans[False]["session"]["decode_s"]
    run = run_here("plan", config_70b, *ON_EIGHT, f"--speculative-config={drafts}")
    assert "decode of 250 tokens, without drafts" in run.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ["--device", "--profile", "h200"]),
        (("--device=h20",), ["'h20'", "h100, h200"]),
        (("--device=h200", "--profile=x.json"), ["x.json"]),
        (("--device=h200",), ["--tensor-parallel-size"]),
        (("--device=h200", "--devices=8", "--input-len=9000"), ["9000 tokens", "8192"]),
        (("--device=v5p", "--pipeline-parallel-size=7"), ["80 layers", "choose one of 1, 2, 4"]),
        (("--device=v5p", "--devices=8", "--dtype=float32"), ["no FLOP/s", "bfloat16"]),
        ((*ON_EIGHT, '--speculative-config={"num_speculative_tokens": 2}'), ["--draft-acceptance"]),
        ((*ON_EIGHT, "--draft-acceptance=0.7"), ["needs --speculative-config"]),
        ((*ON_EIGHT, "--pipeline-parallel-size=3"), ["--devices is 8", "3"]),
        (("--device=h200", "--devices=8,9"), ["--devices"]),
        ((*ON_EIGHT, "--request-rate=0"), ["--request-rate is 0"]),
        ((*ON_EIGHT, "--random-range-ratio=2"), ["from 0 to 1"]),
        ((*ON_EIGHT, "--zipf-theta=0.6"), ["--zipf-theta is 0.6", "--random-range-ratio"]),
        ((*ON_EIGHT, "--input-len=99", "--input-len-p90=9"), ["less than the median", "99"]),
        (
            (*ON_EIGHT, "--output-len-p90=99", "--random-range-ratio=0.5"),
            ["--output-len-p90 is 99", "log-normal"],
        ),
        (("--device=h200", "--devices=16", "--weights-on=host"), ["on each of 2 hosts"]),
        (("--device=h200", "--devices=16", "--host-kv-bytes=1GiB"), ["2 hosts cannot offload"]),
        (
            ("--device=h200", "--kv-on=host", "--host-attention=enabled"),
            ["--host-attention is 'enabled'", "unknown"],
        ),
        (("--device=h200", "--kv-on=host", "--kv-compression=sparf"), ["--kv-compression"]),
        (("--profile=missing.json",), ["missing.json"]),
        ((*ON_EIGHT, "--trace=x.csv", "--burstiness=2"), ["--burstiness has no", "--request-rate"]),
        ((*ON_EIGHT, "--replicas=0"), ["--replicas is 0"]),
        ((*ON_EIGHT, "--prefill-replicas=2"), ["--prefill-replicas is 2", "one of each"]),
        (
            (*ON_EIGHT, "--prefill-replicas=1", "--decode-replicas=1", "--replicas=2"),
            ["--replicas is 2", "how many replicas"],
        ),
        ((*ON_EIGHT, "--min-replicas=2"), ["--max-replicas is missing"]),
        ((*ON_EIGHT, "--min-replicas=3", "--max-replicas=2"), ["--max-replicas 2", "no smaller"]),
        ((*ON_EIGHT, "--replicas=2", "--max-replicas=4"), ["--replicas is 2", "fixed number"]),
        ((*ON_EIGHT, "--max-replicas=4", "--routing=round_robin"), ["--routing is round_robin"]),
        ((*ON_EIGHT, "--report=x.pdf"), [".html"]),
    ],
)
def test_bad_input(run_here, config_70b, capsys, options, words):
    try:
        run = run_here("simulate", config_70b, *options)
    except SystemExit as stop:  # While arguments are parsed.
        assert stop.code == 2
        stderr = capsys.readouterr().err
    else:
        assert run.status == 1
        stderr = run.stderr
    (error,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (TRACE.replace("0.1", "-0.1"), ["line 3", "'-0.1'", "0 or more"]),
        (TRACE.replace("0.1", "nan"), ["line 3", "'nan'"]),
        (TRACE.replace("num_decode_tokens", "tokens"), ["no column 'num_decode_tokens'"]),
        (TRACE.replace("400", "9000"), ["9000 tokens", "--max-input-tokens"]),
    ],
)
def test_bad_traces(run_here, config_70b, tmp_path, trace, words):
    path = tmp_path / "bad.csv"
    path.write_text(trace)
    run_here("simulate", config_70b, *ON_EIGHT, "--trace", path).assert_error(*words)


def test_a_device_of_ones_own(run_here, config_70b, trace, tmp_path):
    """Half the rates take twice the time, where nothing else does."""
    spec = DeviceSpec.of("h200")
    text = "\n".join(
        f"{name} = {json.dumps(value)}" for name, value in vars(spec).items() if name != "flops"
    )
    decode_s = []
    for factor in (1, 2):
        own = tmp_path / f"own{factor}.toml"
        slower = text.replace(
            f"memory_bytes_per_s = {spec.memory_bytes_per_s}",
            f"memory_bytes_per_s = {spec.memory_bytes_per_s / factor}",
        ).replace(f"launch_s = {spec.launch_s}", "launch_s = 1e-12")
        flops = f"flops = {{bfloat16 = {spec.flops_of('bfloat16') / factor}}}"
        own.write_text(
            f"{slower}\n{flops}\n".replace("hop_latency_s = 1e-05", "hop_latency_s = 1e-12")
        )
        run = run_here("plan", config_70b, "--device", own, "--devices=8", "--json")
        decode_s.append(json.loads(run.stdout)["session"]["decode_s"])
    assert decode_s[1] == pytest.approx(2 * decode_s[0], rel=0.05)


def test_a_profile_of_this_machine_is_simulated(run_here, tiny_model, tmp_path):
    out = tmp_path / "profile.json"
    settings = ("--max-num-seqs=2", "--max-num-batched-tokens=34", "--max-model-len=256")
    run = run_here("profile", tiny_model, *settings, "--out", out)
    assert run.status == 0, run.stderr
    assert re.search(r"\d+ held-out steps are predicted with a median error of [\d.]+%", run.stdout)
    assert {"1-0", "2-0", "0-32", "2-32"} <= rows(run.stdout).keys()
    load = ("--input-len=100", "--output-len=9", "--num-requests=5", "--request-rate=50")
    config = tmp_path / "config.json"
    config.write_text((tiny_model / "config.json").read_text())
    run = run_here("simulate", config, *settings, "--profile", out, *load, "--json")
    assert run.status == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["step_times"] == "measured (profile)"
    assert document["summary"]["completed"] == 5
    assert document["summary"]["ttft_us"][0] > 0
    # The pool is that of the machine, which is the same here.
    planned = json.loads(run_here("plan", config, *settings, "--profile", out, "--json").stdout)
    assert planned["session"]["decode_s"] > 0
    assert [*planned["sessions"]] == ["measured (profile)"]
    run = run_here("plan", config, *settings, "--profile", out, "--device", "h200")
    run.assert_error("the profile was measured on cpu")
    machine = tmp_path / "machine.toml"
    machine.write_text(MACHINE)
    run = run_here("plan", config, *settings, "--profile", out, "--device", machine)
    assert rows(run.stdout)["ONE USER'S TURN"] == "MODELLED (ROOFLINE)"
    both = json.loads(
        run_here("plan", config, *settings, "--profile", out, "--device", machine, "--json").stdout
    )
    assert [*both["sessions"]] == ["measured (profile)", "modelled (roofline)"]
    measured, modelled = both["sessions"].values()
    assert measured["decode_s"] == planned["session"]["decode_s"] != modelled["decode_s"] > 0
    run = run_here("simulate", config, "--profile", out, *load)
    run.assert_error("but the profile was measured with")
