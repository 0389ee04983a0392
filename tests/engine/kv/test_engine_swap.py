"""Sequences that lose their pages, and page bytes that come and go: always the same tokens."""

from __future__ import annotations

import dataclasses
import random

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_engines import (
    Preempter,
    count,
    evict_all,
    preemptible,
    prefilled,
    settle,
    token_ids,
)
from tiny_engines import (
    LONGEST,
    MAX_SEQS,
    PROMPT_LENGTHS,
    Arrival,
    assert_idle,
    drive,
    generate,
)

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.beam_search import BeamSearchParams
from jaxserve.scheduler.policies import POLICIES

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
TIERS = {"host": {"host": 64}, "disk": {"disk": 64}, "both": {"host": 12, "disk": 64}}
ENGINES = {
    **{name: {"preemption": "swap", **tiers} for name, tiers in TIERS.items()},
    "auto": {"preemption": "auto", "host": 64},
    "recompute": {"preemption": "recompute", "host": 64},
    "no tier": {},
    "uncached": {"preemption": "swap", "host": 64, "enable_prefix_caching": False},
    "small": {"preemption": "swap", "host": 3, "disk": 2},
}


@pytest.fixture(scope="module", params=ENGINES)
def any_settings(request):
    """Of the module, so that the tests of one engine follow each other and find it there."""
    return ENGINES[request.param]


@pytest.fixture
def any_llm(any_settings, kv_llm_for):
    llm = kv_llm_for(**any_settings)
    yield llm
    assert_idle(llm.engine)


@pytest.fixture(scope="module", params=TIERS)
def tier_settings(request):
    return ENGINES[request.param]


@pytest.fixture
def swapping(tier_settings, kv_llm_for):
    """An LLM that always swaps, to each of the tiers."""
    llm = kv_llm_for(**tier_settings)
    yield llm
    assert_idle(llm.engine)


@pytest.fixture
def longest(llama):
    return llama.prompts[-1]


def mixture(llama):
    """Long and short, greedy and seeded, with several samples."""
    arrivals = []
    for step, prompt in enumerate(llama.prompts[2::2]):
        arrivals.append(Arrival(prompt, SEEDED if step % 2 else GREEDY, 2 * step))
    several = dataclasses.replace(SEEDED, n=MAX_SEQS, max_tokens=6)
    return [*arrivals, Arrival(llama.prompts[8], several, 4)]


def check(alone, arrivals, outputs):
    for arrival, output in zip(arrivals, outputs, strict=True):
        assert token_ids(output) == alone.tokens(arrival.prompt, arrival.params), arrival


# The same tokens


@pytest.mark.parametrize("evicts", [False, True])
def test_a_preemption_after_every_step(llama, alone, any_llm, evicts):
    engine = any_llm.engine
    preempter = Preempter(engine, seed=1, evicts=evicts)
    arrivals = mixture(llama)
    check(alone, arrivals, drive(engine, arrivals, preempter))
    assert preempter.count > 40
    kinds = engine.get_metrics()["jaxserve:kv_preemptions_total"].value
    if engine.plan.config.preemption == "swap":
        assert kinds["recompute"] == 0 < kinds["swap"]
        assert not evicts or sum(engine.kv.transfer_counters.fetched_pages.values()) > 0
    if engine.plan.config.preemption == "recompute":
        assert kinds["swap"] == 0 < kinds["recompute"]


@pytest.mark.parametrize("scheduler", POLICIES)
def test_a_preemption_after_every_step_under_any_scheduler(llama, alone, kv_llm_for, scheduler):
    engine = kv_llm_for(**ENGINES["both"], scheduler=scheduler).engine
    arrivals = mixture(llama)
    check(alone, arrivals, drive(engine, arrivals, Preempter(engine, seed=2, evicts=True)))


def test_a_crowd_that_outgrows_the_pool(llama, alone, any_llm):
    """Without injected preemptions: pages run out."""
    prompt = llama.prompts[PROMPT_LENGTHS.index(33)]
    arrivals = [
        Arrival([3 + i, *prompt[1:]], dataclasses.replace(SEEDED, seed=i)) for i in range(4)
    ]
    before = any_llm.engine.get_metrics()["vllm:num_preemptions_total"].value
    check(alone, arrivals, drive(any_llm.engine, arrivals))
    assert any_llm.engine.get_metrics()["vllm:num_preemptions_total"].value > before


def test_log_probabilities_survive_a_swap(llama, kv_llm_for):
    engine = kv_llm_for(**ENGINES["host"]).engine
    params = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    prompt = llama.prompts[PROMPT_LENGTHS.index(60)]
    (output,) = drive(engine, [Arrival(prompt, params)], Preempter(engine, evicts=True))
    tokens = prompt + list(output.outputs[0].token_ids)
    expected = llama.logprobs(tokens)
    scored = output.prompt_logprobs[1:] + output.outputs[0].logprobs
    assert len(scored) == len(tokens) - 1
    for position, entry in enumerate(scored):
        token = tokens[position + 1]
        assert entry[token].logprob == pytest.approx(expected[position, token], abs=1e-3)


options = st.tuples(
    st.integers(0, len(PROMPT_LENGTHS) - 1),
    st.integers(1, LONGEST),
    st.sampled_from([0.0, 0.8]),
    st.integers(0, 20),
    st.integers(-1, 1),
)


@pytest.mark.parametrize("name", ["both", "small", "uncached"])
@settings(max_examples=4, deadline=None)
@given(workload=st.lists(options, min_size=1, max_size=8), seed=st.integers(0, 999))
def test_any_workload(llama, alone, kv_llm_for, name, workload, seed):
    engine, chance = kv_llm_for(**ENGINES[name]).engine, random.Random(seed)
    preempter = Preempter(engine, seed, evicts=True)
    arrivals = [
        Arrival(
            llama.prompts[index],
            SamplingParams(temperature=heat, seed=7, max_tokens=max_tokens, ignore_eos=True),
            step,
            priority,
        )
        for index, max_tokens, heat, step, priority in workload
    ]

    def between():
        if chance.random() < 0.6:
            preempter()
        if chance.random() < 0.03:
            engine.reset_prefix_cache()

    check(alone, arrivals, drive(engine, arrivals, between))


# What is computed and moved


def once(engine, condition):
    """Preempts the only sequence, and takes its pages, when it first meets the condition."""
    done = []

    def between():
        running = [seq for seq in preemptible(engine) if condition(seq)]
        if running and not done:
            done.append(running[0])
            engine.scheduler.preempt(running[0])
            engine.kv.evict(engine.kv.pool.capacity)

    return done, between


def test_a_swap_in_the_midst_of_a_prefill_computes_nothing_twice(longest, alone, swapping):
    engine = swapping.engine
    done, between = once(engine, lambda seq: 0 < seq.num_computed < seq.prefill_end)
    work = [Arrival(longest, SEEDED)]
    computed, outputs = prefilled(engine, lambda: drive(engine, work, between))
    check(alone, work, outputs)
    assert done
    if not any(fallbacks(engine).values()):
        assert computed == len(longest)


def test_a_swap_in_the_midst_of_decoding_computes_one_token_again(longest, alone, swapping):
    engine = swapping.engine
    done, between = once(engine, lambda seq: seq.num_output == 10)
    work = [Arrival(longest, SEEDED)]
    computed, outputs = prefilled(engine, lambda: drive(engine, work, between))
    check(alone, work, outputs)
    assert done[0].num_preemptions == 1
    if not any(fallbacks(engine).values()):
        assert computed == len(longest) + 1


@pytest.mark.parametrize("name", ["recompute", "no tier"])
def test_recomputing_starts_from_nothing(longest, alone, kv_llm_for, name):
    engine = kv_llm_for(**ENGINES[name]).engine
    _, between = once(engine, lambda seq: seq.num_output == 10)
    work = [Arrival(longest, SEEDED)]
    saved = dict(engine.kv.transfer_counters.saved_pages)
    computed, outputs = prefilled(engine, lambda: drive(engine, work, between))
    check(alone, work, outputs)
    assert computed == 2 * len(longest) + 10
    assert engine.kv.transfer_counters.saved_pages == saved


def test_a_second_swap_out_saves_only_what_is_new(longest, alone, kv_llm_for):
    engine = kv_llm_for(**ENGINES["host"]).engine
    saved, at = [], []

    def between():
        for seq in preemptible(engine):
            if seq.num_output in (8, 14) and seq.num_output not in at:
                at.append(seq.num_output)
                engine.scheduler.preempt(seq)
                before = count(engine, "kv_evicted_pages_total")
                engine.kv.evict(engine.kv.pool.capacity)
                assert count(engine, "kv_evicted_pages_total") - before >= 26
                saved.append(sum(len(save.nodes) for save in engine.kv.transfers()))

    work = [Arrival(longest, SEEDED)]
    check(alone, work, drive(engine, work, between))
    # The host knows all but the token in flight: 107 tokens, then 113. Page 26 grew.
    assert at == [8, 14]
    assert saved[0] == 27
    assert saved[1] == 3


def fallbacks(engine):
    return engine.get_metrics()["jaxserve:kv_fallbacks_total"].value


def test_a_conversation_finds_its_pages_below(llama, alone, swapping):
    """Everything is evicted between turns, and all of it comes back."""
    conversation = list(llama.prompts[PROMPT_LENGTHS.index(17)])
    params = dataclasses.replace(SEEDED, max_tokens=9)
    before = dict(fallbacks(swapping.engine))
    for turn in range(4):
        prompt = list(conversation)
        computed, output = prefilled(
            swapping.engine, lambda p=prompt: generate(swapping, p, params)
        )
        assert token_ids(output) == alone.tokens(prompt, params)
        if turn and fallbacks(swapping.engine) == before:
            # What was said since, and the last token sampled, which was never fed back.
            assert output.metrics.cached_tokens == len(prompt) - 4
            assert computed == 4
        conversation += [*output.outputs[0].token_ids, 70 + turn, 80, 90]
        evict_all(swapping.engine)
        assert count(swapping.engine, "kv_pages", "cached") == 0
        assert sum(tier.num_used for tier in swapping.engine.kv.tiers.values()) > 0


def test_conversations_pushed_to_the_disk_by_others_come_back(llama, alone, kv_llm_for):
    """More of them than the device and the host have room for."""
    llm = kv_llm_for(**ENGINES["both"])
    talks = [[3 + i, *llama.prompts[PROMPT_LENGTHS.index(33)]] for i in range(4)]
    params = dataclasses.replace(SEEDED, max_tokens=5)
    found = 0
    for _ in range(3):
        for talk in talks:
            prompt = list(talk)
            output = generate(llm, prompt, params)
            assert token_ids(output) == alone.tokens(prompt, params)
            found += output.metrics.cached_tokens
            talk += [*output.outputs[0].token_ids, 70]
            settle(llm.engine)
    assert count(llm.engine, "kv_fetched_pages_total", "disk") > 0
    assert found > 0


def test_samples_share_their_prompt_after_it_came_back(llama, alone, swapping):
    prompt = llama.prompts[PROMPT_LENGTHS.index(33)]
    generate(swapping, prompt, dataclasses.replace(GREEDY, max_tokens=1))
    evict_all(swapping.engine)
    params = dataclasses.replace(SEEDED, n=4, max_tokens=6)
    copied = count(swapping.engine, "kv_copied_pages_total")
    output = generate(swapping, prompt, params)
    assert token_ids(output) == alone.tokens(prompt, params)
    assert count(swapping.engine, "kv_copied_pages_total") - copied <= 4


def test_beams_under_preemption(llama, kv_llm_for):
    prompt = llama.prompts[PROMPT_LENGTHS.index(33)]
    params = BeamSearchParams(4, 6, ignore_eos=True)
    (plain,) = kv_llm_for(enable_prefix_caching=False).beam_search(prompt, params, use_tqdm=False)
    llm = kv_llm_for(**ENGINES["both"])
    disturb, step = Preempter(llm.engine, evicts=True), llm.engine.step

    def disturbed():
        touched = step()
        disturb()
        return touched

    llm.engine.step = disturbed
    try:
        (output,) = llm.beam_search(prompt, params, use_tqdm=False)
    finally:
        del llm.engine.step
    assert [s.tokens for s in output.sequences] == [s.tokens for s in plain.sequences]


# Aborts


def test_aborts_at_any_moment_leave_nothing(llama, alone, any_llm):
    """Between steps, while pages are on their way in either direction."""
    engine, chance = any_llm.engine, random.Random(3)
    arrivals = [Arrival(prompt, SEEDED, step) for step, prompt in enumerate(llama.prompts)]
    preempter = Preempter(engine, seed=3, evicts=True)

    def between():
        preempter()
        if chance.random() < 0.15 and engine._requests:
            engine.abort(chance.choice(list(engine._requests)))

    outputs = drive(engine, arrivals, between)
    for arrival, output in zip(arrivals, outputs):
        (expected,) = alone.tokens(arrival.prompt, arrival.params)
        (tokens,) = token_ids(output)
        assert tokens == expected[: len(tokens)]
        assert output.outputs[0].finish_reason in ("length", "abort")
    settle(engine)
    assert_idle(engine)
    pinned = [node for node in engine.kv.tree if node.pins]
    assert not pinned


# Programs


def test_nothing_is_compiled_once_the_engine_is_ready(llama, kv_llm_for):
    events = []

    def listen(event, duration_s, **_):
        if event.startswith("/jax/core/compile"):
            events.append(event)

    llm = kv_llm_for(**ENGINES["both"])
    jax.clear_caches()  # What other tests ran must not hide what this one would compile.
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        drive(llm.engine, mixture(llama), Preempter(llm.engine, evicts=True))
        evict_all(llm.engine)
        drive(llm.engine, mixture(llama), Preempter(llm.engine, evicts=True))
        llm.beam_search(llama.prompts[6], BeamSearchParams(4, 3), use_tqdm=False)
        llm.reset_prefix_cache()
        assert events == []
        jax.jit(lambda x: x + 1)(1.0)
        assert events, "the events that should count nothing do count"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
