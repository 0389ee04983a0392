"""Engines whose layers pass through a window: tokens of resident weights, and what is refused."""

from __future__ import annotations

import json
import os
import re

import jax
import pytest
from exhaustive import combination, combinations_of, exhaustive
from lora_adapters import merged, write_adapter
from tiny_checkpoints import CONFIG
from tiny_engines import CONTEXT, LONGEST, Arrival, drive, generate, preemptions

from jaxserve import LoRARequest
from jaxserve.cli.terminal.text import summary
from jaxserve.core.errors import ConfigError, EngineClosedError, WeightsError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.hardware import device_memory
from jaxserve.runtime.startup import engine_plan
from jaxserve.runtime.startup.loading import layer_file
from jaxserve.scheduler.policies import POLICIES

FEW_PROGRAMS = {"max_num_seqs": 1, "max_num_batched_tokens": 1 + 16}
GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)


@pytest.fixture(scope="module")
def llm_for(deep):
    """Engines with streamed weights by scheduler, tier and budget, kept: leave them idle."""
    made = {}

    def get(scheduler="sarathi", tier="disk", layers_that_stay=0):
        key = scheduler, tier, layers_that_stay
        if key not in made:
            budget = None
            if layers_that_stay:
                placement = made["sarathi", "disk", 0].plan().shapes.placement
                budget = placement.device_bytes + layers_that_stay * max(placement.layer_bytes)
            made[key] = deep.load(
                weights_on=tier, resident_weight_bytes=budget, scheduler=scheduler
            )
        return made[key]

    get()
    yield get
    for llm in made.values():
        llm.close()


def arrivals(model, every=1):
    return [Arrival(prompt, GREEDY, step) for step, prompt in enumerate(model.prompts[::every])]


# The same tokens


@pytest.mark.parametrize("scheduler", combinations_of(POLICIES, "static", "orca", "vllm"))
def test_every_scheduler(deep, llm_for, scheduler):
    engine = llm_for(scheduler).engine
    before = preemptions(engine)
    for output in drive(engine, [Arrival(prompt, GREEDY) for prompt in deep.prompts]):
        deep.check_greedy(output)
    assert preemptions(engine) > before or scheduler in ("static", "orca")


@pytest.mark.parametrize(
    ("tier", "staying", "streamed"),
    [combination("host", 2, (0, 1, 3)), ("disk", 1, (0, 1, 2, 3)), combination("disk", 3, ())],
)
def test_every_tier_and_budget(deep, llm_for, tier, staying, streamed):
    """Twice, the second time with prefix hits."""
    llm = llm_for(tier=tier, layers_that_stay=staying)
    assert llm.plan().shapes.placement.streamed == streamed
    for _ in range(2):
        for output in drive(llm.engine, arrivals(deep)):
            deep.check_greedy(output)
    assert (llm.engine.counters.weight_reads is None) == (not streamed)


@pytest.mark.parametrize("dtype", [combination("float32"), "bfloat16"])
def test_logprobs_are_those_of_resident_weights(deep, dtype):
    """Bit for bit of prompts, whose steps run the programs that they run with resident weights.
    Layers of decodes share programs there and not here, which only the last bits of float32 may
    show: bfloat16 is rounded between them all the same."""
    few = FEW_PROGRAMS | {"dtype": dtype}
    scored = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=3, logprobs=3)
    with deep.load(weights_on="disk", **few) as llm:
        streamed = llm.generate(deep.prompts[::2], scored, use_tqdm=False)
    with deep.load(**few) as llm:
        resident = llm.generate(deep.prompts[::2], scored, use_tqdm=False)
    for ours, theirs in zip(streamed, resident):
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        (ours,), (theirs,) = ours.outputs, theirs.outputs
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs[0] == theirs.logprobs[0]
        assert ours.logprobs == theirs.logprobs or dtype == "float32"
        assert abs(ours.cumulative_logprob - theirs.cumulative_logprob) < 1e-4


def test_packed_weights(deep):
    model = deep.rounded("int4")
    with deep.load(quantization="int4", weights_on="disk", **FEW_PROGRAMS) as llm:
        for output in drive(llm.engine, arrivals(model, 3)):
            model.check_greedy(output)
        assert llm.plan().shapes.placement.streamed


def test_each_dtype_has_a_file(deep):
    plans = [
        engine_plan.plan_engine(EngineConfig(deep.path, weights_on="disk", **changes))
        for changes in ({}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"max_num_seqs": 2})
    ]
    files = [layer_file(plan.checkpoint, plan.shapes) for plan in plans]
    assert len({file.path for file in files[:3]}) == 3 and files[3].path == files[0].path
    assert files[0].num_bytes > 1.9 * files[1].num_bytes


@exhaustive
def test_adapters_and_drafts(deep, tmp_path):
    """Adapters and the model that drafts stay on the device."""
    path = write_adapter(tmp_path / "a", deep)
    adapted = merged(deep, path, tmp_path / "merged")
    features = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": (1 + 2) + 16,
        "enable_lora": True,
        "max_loras": 1,
        "speculative_config": {"model": deep.path, "num_speculative_tokens": 2},
    }
    with deep.load(weights_on="disk", **features) as llm:
        prompts = [deep.prompts[5]] * 2
        asked = [None, LoRARequest("a", path)]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=asked)
    for model, output in zip((deep, adapted), outputs):
        model.check_greedy(output)


# What is compiled, held and counted


def test_nothing_is_compiled_once_the_engine_is_ready(deep, llm_for, compiled):
    llm = llm_for()
    compiled.clear()
    drive(llm.engine, arrivals(deep))
    assert compiled == []


def test_the_plan_counts_the_window_and_not_the_model(deep, llm_for):
    shapes, planned = llm_for().plan().shapes, llm_for().plan().memory
    placement = shapes.placement
    sizes = [
        sum(array.nbytes for array in jax.tree.leaves(layer)) for layer in deep.params["layers"]
    ]
    outside = sum(array.nbytes for array in jax.tree.leaves(deep.params)) - sum(sizes)
    assert planned.weights_bytes == outside + 2 * max(sizes)
    assert planned.disk_weights_bytes == placement.streamed_bytes == sum(sizes)
    on_host = engine_plan.plan_engine(EngineConfig(deep.path, weights_on="host")).memory
    on_disk = engine_plan.plan_engine(EngineConfig(deep.path, weights_on="disk")).memory
    assert on_host.host_weights_bytes == sum(sizes)
    assert on_host.fixed_bytes == on_disk.fixed_bytes + sum(sizes)  # CPUs are their own hosts.


def test_a_step_reads_each_streamed_layer_once(deep, llm_for):
    """And no step runs only to be dropped: the one before it is read first."""
    llm = llm_for()
    before = llm.get_metrics()
    output = generate(llm, deep.prompts[4], GREEDY)
    after = llm.get_metrics()
    steps = after["jaxserve:steps_total"].value - before["jaxserve:steps_total"].value
    assert steps == len(output.outputs[0].token_ids)
    names = [f"jaxserve:weight_{name}_total" for name in ("read_bytes", "step_seconds")]
    read, step_s = (llm.get_metrics()[name].value - before[name].value for name in names)
    placement = llm.plan().shapes.placement
    # Up to a window of the next step may have been read ahead, then and now.
    assert abs(read - steps * placement.streamed_bytes) <= placement.window_bytes
    assert step_s > 0
    assert re.search(r"; [\d.]+ KiB of weights a pass from disk, \d+% of the time", summary(llm))


def test_the_file_is_made_once(deep, llm_for):
    plan = llm_for().plan()
    path = layer_file(plan.checkpoint, plan.shapes).path
    made = path.stat()
    with deep.load(weights_on="disk", **FEW_PROGRAMS) as llm:
        deep.check_greedy(generate(llm, deep.prompts[3], GREEDY))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


# What goes wrong, and what is refused


def test_a_disk_that_fails_ends_the_engine_which_says_so(deep, monkeypatch):
    llm = deep.load(weights_on="disk", **FEW_PROGRAMS)
    generate(llm, deep.prompts[2], GREEDY)
    monkeypatch.setattr(os, "preadv", lambda *args: 0)
    with pytest.raises(WeightsError, match=r"layer \d cannot be read .* \(the file ends at"):
        generate(llm, deep.prompts[3], GREEDY)
    with pytest.raises(EngineClosedError, match=r"WeightsError: layer \d cannot be read"):
        generate(llm, deep.prompts[3], GREEDY)
    llm.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resident_weight_bytes": 1000}, "resident_weight_bytes is 1000.*a window of 2 layers"),
        ({"resident_weight_bytes": 0}, "resident_weight_bytes is 0.*1 or more"),
        (
            {"weights_on": "device", "resident_weight_bytes": 9},
            "weights_on to 'host' or 'disk'",
        ),
        ({"weights_on": "tape"}, "weights_on is 'tape'.*device, host, disk"),
        ({"program_scope": "step"}, "program_scope is 'step', and it runs layer after layer"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2.*use tensor_parallel_size"),
        (
            {
                "speculative_config": {
                    "method": "layer_skip",
                    "num_layers": 1,
                    "num_speculative_tokens": 2,
                }
            },
            "'layer_skip'.*use 'ngram' or 'draft_model'",
        ),
    ],
)
def test_settings_that_are_refused(deep, changes, message):
    with pytest.raises(ConfigError, match=message):
        engine_plan.plan_engine(EngineConfig(deep.path, **({"weights_on": "disk"} | changes)))


def test_calls_that_are_refused(deep, llm_for):
    llm = llm_for()
    for call in (llm.sleep, lambda: llm.update_weights(deep.params)):
        with pytest.raises(ConfigError, match="weights_on is 'disk'; leave weights_on out"):
            call()
    deep.check_greedy(generate(llm, deep.prompts[3], GREEDY))


def test_a_model_too_large_for_the_device_is_offered_to_be_streamed(tmp_path, monkeypatch):
    """Where the disk has room, and only if nothing smaller fits."""
    raw = CONFIG | {"num_hidden_layers": 64, "max_position_embeddings": CONTEXT}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = EngineConfig(
        tmp_path / "config.json",
        load_format="dummy",
        max_num_seqs=1,
        page_size=16,
        kv_cache_memory_bytes=1 << 23,
    )
    small = engine_plan.decide(EngineConfig(**vars(config) | {"weights_on": "disk"})).memory
    monkeypatch.setattr(device_memory, "host_memory", lambda: int(small.total_bytes / 0.9) + 4096)
    with pytest.raises(engine_plan.MemoryPlanError) as refused:
        engine_plan.plan_engine(config)
    assert {"weights_on": "disk"} in refused.value.alternatives
    nearly = os.statvfs_result((1, 1, 9, 9, 9, *[0] * 5))
    monkeypatch.setattr(os, "statvfs", lambda path: nearly)
    with pytest.raises(engine_plan.MemoryPlanError) as refused:
        engine_plan.plan_engine(config)
    assert {"weights_on": "disk"} not in refused.value.alternatives
