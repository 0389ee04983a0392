"""How many steps a pipeline takes: chunks follow each other through the stages, and no stage waits
while there are sequences enough (Mnemosyne's SPP, 2409.17264)."""

from __future__ import annotations

from pathlib import Path

import pytest
from exhaustive import combination
from mesh_engines import degrees, load, on_mesh
from mesh_workload import GREEDY
from tiny_engines import PROMPT_LENGTHS, Arrival, TinyModel, drive

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.runtime.programs.device_step import BUBBLE

pytestmark = pytest.mark.meshes

CHUNK = 16


def entered(engine: Engine, arrivals: list[Arrival]) -> list[bool]:
    """Of each call of the devices, whether a step entered the first stage."""
    runner, calls = engine._runner, []
    dispatch = runner.dispatch

    def counted(packed, *begun_us):
        calls.append(packed is not BUBBLE)
        dispatch(packed, *begun_us)

    runner.dispatch = counted
    try:
        drive(engine, arrivals)
    finally:
        runner.dispatch = dispatch
    return calls


@pytest.mark.parametrize("mesh", [combination("PP2"), "PP4"])
def test_steps_of_a_pipeline(answered, mesh):
    on_mesh(mesh, check_steps, answered)


def check_steps(mesh: str, directory: Path) -> None:
    model = TinyModel.open(directory / "model")
    stages = degrees(mesh)["pipeline_parallel_size"]
    with load(
        model,
        mesh,
        max_num_seqs=4,
        max_num_batched_tokens=4 + CHUNK,
        pages=80,
        enable_prefix_caching=False,
    ) as llm:
        check_prompts(model, llm.engine, stages)
        check_decodes(model, llm.engine, stages)


def check_prompts(model: TinyModel, engine: Engine, stages: int) -> None:
    """m chunks take m + p - 1 calls, not m * p."""
    first = SamplingParams(temperature=0, max_tokens=1)
    for prompt, length in zip(model.prompts, PROMPT_LENGTHS):
        chunks = -(-length // CHUNK)
        calls = entered(engine, [Arrival(prompt, first)])
        assert calls == [True] * chunks + [False] * (stages - 1)


def check_decodes(model: TinyModel, engine: Engine, stages: int) -> None:
    """With a sequence for every stage, once they are full a step enters at every call, until the
    first sequence ends."""
    prompts = [model.prompts[index] for index in (5, 6, 4, 3)[:stages]]
    calls = entered(engine, [Arrival(prompt, GREEDY) for prompt in prompts])
    tokens = GREEDY.max_tokens
    assert False not in calls[stages : stages * (tokens - 1)]
    assert len(calls) <= stages * (tokens + 1)


def test_step_times_of_a_pipeline_are_those_of_the_programs_that_ran(answered):
    on_mesh("PP2", check_step_times, answered)


def check_step_times(mesh: str, directory: Path) -> None:
    """What medha learns a program by are dispatches of that program. A decode is often in one with
    the prefill of its successor."""
    model = TinyModel.open(directory / "model")
    with load(
        model,
        mesh,
        scheduler="medha",
        max_num_seqs=4,
        max_num_batched_tokens=4 + CHUNK,
        pages=80,
        enable_prefix_caching=False,
    ) as llm:
        runner, step_time = llm.engine._runner, llm.engine.scheduler.step_time
        forward, observe, ran, learnt = runner._forward, step_time.observe, [], []

        def noted(key):
            ran.append((runner.num_dispatches, key))
            return forward(key)

        def seen(load, us):
            learnt.append(step_time._buckets.program([load.shape]))
            observe(load, us)

        runner._forward, step_time.observe = noted, seen
        arrivals = [Arrival(prompt, GREEDY, 3 * i) for i, prompt in enumerate(model.prompts)]
        drive(llm.engine, arrivals)
        runner._forward, step_time.observe = forward, observe
        # A dispatch whose oldest step was none tells of nothing.
        programs = iter(key for _, key in ran)
        assert all(key in programs for key in learnt), "in the order they ran"
        assert len(learnt) > 100
        assert {key.prefill_tokens > 0 for key in learnt} == {True, False}
