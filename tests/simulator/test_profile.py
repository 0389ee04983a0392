"""Measured step times: fitted, written, read, and refused for another engine."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from jaxserve.core.devices import DeviceSpec
from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import ModelConfig, RopeConfig
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets, ProgramKey
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.simulator.deployments.bounds import LoadTokens, least_seconds
from jaxserve.simulator.profile import HeldOut, Profile, ProgramTime, StepSample, fitted
from jaxserve.simulator.simulation import Arrival

MIXED = ProgramKey(4, 32)
MODEL = ModelConfig("LlamaForCausalLM", 256, 64, 128, 2, 4, 2, 16, 1024, RopeConfig())
CONFIG = EngineConfig("tiny", max_num_seqs=4).resolve(MODEL, "cpu")
SIZES = {"architecture": "LlamaForCausalLM", "num_layers": 2}
PROFILE = Profile(
    settings=CONFIG.of_programs(),
    model=SIZES,
    device={"platform": "cpu", "kind": "cpu", "memory_bytes": 1 << 30},
    host_bytes_per_s=None,
    page_copy_s=1e-5,
    programs={MIXED: ProgramTime(1e-3, 1e-6, 1e-8)},
    held_out=HeldOut(1, 0.01, 0.02),
)


def samples(noise: float, base_s=5e-3, context_s=2e-6, pair_s=1e-7) -> list[StepSample]:
    draw = random.Random(0)
    points = [(0, 500), (4000, 500), (0, 30_000), (8000, 60_000), (1000, 7000)]
    return [
        StepSample(
            MIXED,
            context,
            pairs,
            (base_s + context_s * context + pair_s * pairs) * draw.uniform(1 - noise, 1 + noise),
            held_out=(context, pairs) == points[-1],
        )
        for context, pairs in points
    ]


def test_exact_measurements_give_their_costs():
    programs, held_out = fitted(samples(noise=0.0))
    assert programs[MIXED] == pytest.approx((5e-3, 2e-6, 1e-7))
    assert held_out.samples == 1
    assert held_out.most < 1e-6


def test_no_cost_is_negative():
    """Although steps with more context are measured as faster."""
    programs, held_out = fitted(samples(noise=0.02, context_s=-1e-7))
    assert programs[MIXED].context_s == 0.0
    assert min(programs[MIXED]) == 0.0
    assert 0 < held_out.median < 0.2


def test_a_program_measured_once_costs_that():
    programs, held_out = fitted([StepSample(ProgramKey(1, 0), 10, 0, 2e-3)])
    assert programs[ProgramKey(1, 0)].of(10, 0) == pytest.approx(2e-3)
    assert held_out.samples == 0


def test_a_step_costs_its_program_and_its_attention():
    seq = Sequence(0, "0", 0, [0], SamplingParams(), arrival_us=0)
    decode = ScheduledChunk(seq, 99, 1, True, 0, 0)
    prefill = ScheduledChunk(seq, 0, 10, True, 0, 1)
    plan = StepPlan(decodes=(decode,), prefills=(prefill,))
    assert PROFILE.step(MIXED, [plan]) == pytest.approx(1e-3 + 100e-6 + 55e-8)
    assert PROFILE.copy(3) == pytest.approx(3e-5)


def test_a_profile_bounds_what_a_load_takes():
    """As every other source of step times: of chunks that are of no sequence, too."""
    buckets = Buckets.from_config(4, 4 + 32)
    programs = {key: ProgramTime(1e-3, 1e-6, 1e-8) for key in buckets.keys()}  # noqa: SIM118
    arrivals = [Arrival(0, [*range(40)], SamplingParams(max_tokens=3))]
    tokens = LoadTokens.of(arrivals, CONFIG)
    times = dataclasses.replace(PROFILE, programs=programs)
    # Two steps of prefill at least; its pairs, and the context of two decodes.
    attention_s = 1e-8 * 40 * 41 // 2 + 1e-6 * (41 + 42)
    assert least_seconds(times, buckets, tokens, CONFIG) > 1e-3 * 40 / 32 + attention_s


def test_a_device_whose_name_begins_like_anothers_is_another():
    measured = dataclasses.replace(PROFILE, device={"platform": "tpu", "kind": "TPU v5 lite"})
    assert measured.is_of(DeviceSpec.of("v5e")) and not measured.is_of(DeviceSpec.of("v5p"))


def test_a_profile_is_read_as_it_was_written(tmp_path):
    PROFILE.write(tmp_path / "profile.json")
    found = Profile.read(tmp_path / "profile.json")
    assert found.programs == PROFILE.programs
    assert (found.model, found.device, found.held_out) == (SIZES, PROFILE.device, PROFILE.held_out)
    found.check(CONFIG, SIZES)
    with pytest.raises(ConfigError, match="max_num_seqs is 8, but the profile was measured with 4"):
        found.check(dataclasses.replace(CONFIG, max_num_seqs=8), SIZES)
    with pytest.raises(ConfigError, match=r"num_layers 2, and this one has .*num_layers 3"):
        found.check(CONFIG, SIZES | {"num_layers": 3})
    # What changes no program may differ.
    found.check(dataclasses.replace(CONFIG, scheduler="vllm"), SIZES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.pop("programs"), "has no 'programs'"),
        (lambda document: document.update(format=0), "another version"),
        (lambda document: document["programs"][0].update(base_s="x"), "base_s is 'x'"),
        (lambda document: document["programs"][0].update(pair_s=-1), "pair_s is -1"),
        (lambda document: document["programs"][0].update(rows="4"), "is no program"),
        (lambda document: document.update(programs=[]), "no programs"),
        (lambda document: document.update(model=["Llama"]), "model is .*an object"),
        (lambda document: document.update(settings=[["a", 1]]), "settings is .*an object"),
        (lambda document: document["device"].update(kind=7), "no device of JAX"),
        (lambda document: document["device"].update(memory_bytes="1GiB"), "memory_bytes is '1GiB'"),
        (lambda document: document.update(page_copy_s=None), "page_copy_s is None"),
        (lambda document: document.update(host_bytes_per_s=0), "host_bytes_per_s is 0"),
        (lambda document: document.update(more=1), "more"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path, change, message):
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=message):
        Profile.read(path)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        Profile.read(tmp_path / "missing.json")
    for text in ("", "[]", "7", "[" * 100_000, "\0"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"profile\.json' cannot be read"):
            Profile.read(path)
