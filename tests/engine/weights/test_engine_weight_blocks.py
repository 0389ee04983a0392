"""Engines whose steps share the reads of streamed weights: the same tokens, fewer bytes."""

from __future__ import annotations

import os
import time

import pytest
from exhaustive import combination, exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import LONGEST, NUM_PAGES, PROMPT_LENGTHS, Arrival, drive, preemptions

from jaxserve.core.errors import ConfigError, WeightsError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.startup import engine_plan

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
STEPS = 8
BLOCKS = {"weights_on": "disk", "steps_per_weight_read": 3, "max_num_seqs": 7}


@pytest.fixture(scope="module")
def checked(deep):
    """In debug mode: pages are checked after every step, and what the device holds in every
    block."""
    with deep.load(debug_kv=True, **BLOCKS) as llm:
        yield llm


@pytest.mark.parametrize(
    "scheduler", ["sarathi", *map(combination, ("static", "vllm", "orca", "splitfuse"))]
)
def test_every_scheduler(deep, scheduler):
    """Prompts of many lengths, some of which go on in the next step of a block, and preemptions."""
    arrivals = [Arrival(prompt, GREEDY, step // 2) for step, prompt in enumerate(deep.prompts * 2)]
    with deep.load(scheduler=scheduler, **BLOCKS) as llm:
        for output in drive(llm.engine, arrivals):
            deep.check_greedy(output)
        assert preemptions(llm.engine) > 0 or scheduler in ("static", "orca")


@settings(deadline=None, max_examples=4)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(PROMPT_LENGTHS) - 1),
            st.integers(1, LONGEST),
            st.integers(0, 12),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_arrivals(deep, checked, drawn):
    """Blocks are cut short by operations on pages, of which debug mode has one for every page that
    is freed; by sequences that end or arrive; and by their own numbers."""
    arrivals = [
        Arrival(
            deep.prompts[index],
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
            step,
            priority,
        )
        for index, count, step, priority in drawn
    ]
    for output, (index, count, *_) in zip(drive(checked.engine, arrivals), drawn):
        assert output.outputs[0].token_ids == tuple(deep.answer(index, count, True))


def test_reads_that_are_slow_and_short_change_nothing(deep, checked, monkeypatch):
    preadv = os.preadv

    def slow(file, views, offset):
        time.sleep(1e-4)
        return preadv(file, [views[0][:5000]], offset)

    monkeypatch.setattr(os, "preadv", slow)
    for output in drive(checked.engine, [Arrival(prompt, GREEDY) for prompt in deep.prompts[3:8]]):
        deep.check_greedy(output)


def test_a_block_of_eight_reads_an_eighth(deep):
    """To the byte: the same sequences, two to a step, in batches one after another and in a block
    of all of these. Each is a prompt that fills half a step, and its answer."""
    prompts = [[3 + number, *deep.prompts[6][1:]] for number in range(2 * STEPS)]
    assert len(prompts[0]) == 16
    found = {}
    for steps in (1, STEPS):
        with deep.load(
            weights_on="disk",
            steps_per_weight_read=steps,
            max_num_seqs=2 * steps,
            max_num_batched_tokens=2 + 32,
            kv_cache_memory_bytes=4 * NUM_PAGES * 4 * deep.token_bytes,
            scheduler="static",
        ) as llm:
            outputs = drive(llm.engine, [Arrival(prompt, GREEDY) for prompt in prompts])
            reads, placement = llm.engine.counters.weight_reads, llm.plan().shapes.placement
            assert reads.num_bytes == reads.num_passes * placement.streamed_bytes
            found[steps] = reads.num_passes, [output.outputs[0].token_ids for output in outputs]
            for output in outputs[:2]:
                deep.check_greedy(output)
    assert found[STEPS] == (LONGEST, found[1][1])
    assert found[1][0] == STEPS * LONGEST


def test_kv_of_all_sequences_on_the_host(deep):
    """Six at once have four times the KV that the pool holds, and none is preempted. Their
    pages leave the pool layer by layer, between the steps of a block."""
    prompts = [[3 + number, *deep.prompts[11][1:]] for number in range(9)]
    with deep.load(
        kv_on="host",
        resident_kv_tokens=16,
        max_num_batched_tokens=3 + 16,
        debug_kv=True,
        **BLOCKS,
    ) as llm:
        engine, most = llm.engine, [0, 0]

        def between():
            running = engine.scheduler.num_running
            most[:] = max(most[0], running), max(most[1], engine.kv.host_pages.num_used)

        outputs = drive(engine, [Arrival(prompt, GREEDY) for prompt in prompts], between)
        for output in outputs:
            deep.check_greedy(output)
        assert most == [6, 6 * (31 - 5)] and preemptions(engine) == 0
        assert engine.kv.host_pages.num_used == 0


@exhaustive
def test_drafts(deep):
    """Each step's are verified by itself."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    room = 3 * 3 + 32
    with deep.load(speculative_config=drafts, max_num_batched_tokens=room, **BLOCKS) as llm:
        repeating = [prompt * 2 for prompt in deep.prompts[2:8]]
        for output in drive(llm.engine, [Arrival(prompt, GREEDY) for prompt in repeating]):
            deep.check_greedy(output)
        assert llm.get_metrics()["vllm:spec_decode_num_accepted_tokens_total"].value > 0


def test_a_device_that_holds_more_than_was_planned_is_reported(deep, checked):
    """In debug mode, by a plan that has room for a layer less."""
    weights = checked.engine._runner._state.weights
    more = max(checked.plan().shapes.placement.layer_bytes)
    weights._kept_bytes += more
    try:
        with pytest.raises(WeightsError, match=r"weights hold \d+ bytes of the device"):
            drive(checked.engine, [Arrival(deep.prompts[2], GREEDY)])
    finally:
        weights._kept_bytes -= more


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_on": "device"}, "steps_per_weight_read is 2.*weights_on is 'device'"),
        ({"steps_per_weight_read": 0}, "steps_per_weight_read is 0.*1 or more"),
        ({"scheduler": "medha"}, "scheduler is 'medha'.*use the scheduler 'sarathi'"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": "auto"}},
            "speculative_config has chosen number of drafts",
        ),
        (
            {"kv_on": "host", "kv_compression": "shadow"},
            "kv_compression is 'shadow', and a step selects chunks",
        ),
    ],
)
def test_settings_that_are_refused(deep, changes, message):
    shared = {"weights_on": "disk", "steps_per_weight_read": 2}
    with pytest.raises(ConfigError, match=message):
        engine_plan.plan_engine(EngineConfig(deep.path, **(shared | changes)))
