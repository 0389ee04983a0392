"""Prefixes that are computed once: who finds them, how much is computed, and what it changes."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_engines import count, evict_all, prefilled, token_ids
from tiny_engines import (
    LONGEST,
    NUM_PAGES,
    PAGE_SIZE,
    PROMPT_LENGTHS,
    Arrival,
    assert_idle,
    drive,
    generate,
)

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.sampling_params import SamplingParams, sequence_seed
from jaxserve.engine.beam_search import BeamSearchParams
from jaxserve.scheduler.policies import POLICIES

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=LONGEST, ignore_eos=True)
CHUNK = 32
"""The most prefill tokens of a step."""


@pytest.fixture
def cached(kv_llm_for):
    """An LLM with an empty prefix cache, and no other tier."""
    llm = kv_llm_for()
    yield llm
    assert_idle(llm.engine)


def cached_tokens(output):
    return output.metrics.cached_tokens


def differing(prompt, shared, length):
    """A prompt of `length` tokens that has exactly the first `shared` in common."""
    other = prompt[:shared] + [3 + (token - 2) % 250 for token in prompt[shared:length]]
    assert len(other) == length and all(a != b for a, b in zip(prompt[shared:], other[shared:]))
    return other


# How much is computed


@pytest.mark.parametrize("index", range(len(PROMPT_LENGTHS)), ids=map(str, PROMPT_LENGTHS))
def test_of_a_prompt_given_again_the_last_token_is_computed(llama, cached, index):
    prompt = llama.prompts[index]
    engine = cached.engine
    first, output = prefilled(engine, lambda: generate(cached, prompt, GREEDY))
    assert (first, cached_tokens(output)) == (len(prompt), 0)
    again, output = prefilled(engine, lambda: generate(cached, prompt, GREEDY))
    assert (again, cached_tokens(output)) == (1, len(prompt) - 1)
    assert list(output.outputs[0].token_ids) == llama.answer(index, 4, True)
    assert count(engine, "kv_copied_pages_total") >= (len(prompt) % PAGE_SIZE != 1)


BOUNDARIES = (0, 1, 3, 4, 5, 31, 32, 33, 63, 64, 65, 95, 96)


@pytest.mark.parametrize("shared", BOUNDARIES)
def test_only_what_differs_is_computed(llama, cached, shared):
    """Shared parts and whole prompts that end before, at and after those of pages and chunks."""
    (longest,) = (prompt for prompt in llama.prompts if len(prompt) == 100)
    engine = cached.engine
    generate(cached, longest, GREEDY)
    for length in (1, 2, 4, 5, 32, 33, 64, 65, 97, 100):
        if length < shared:
            continue
        prompt = differing(longest, shared, length)
        computed, output = prefilled(engine, lambda p=prompt: generate(cached, p, GREEDY))
        found = cached_tokens(output)
        assert computed == length - found
        # The prompts before this one, which have as much in common with it as with the first, may
        # help as well.
        assert min(shared, length - 1) <= found < length
        llama.check_greedy(output)


@pytest.mark.parametrize("shared", BOUNDARIES)
def test_exactly_the_shared_tokens_are_found(llama, cached, shared):
    (longest,) = (prompt for prompt in llama.prompts if len(prompt) == 100)
    generate(cached, longest, GREEDY)
    output = generate(cached, differing(longest, shared, 99), GREEDY)
    assert cached_tokens(output) == shared
    llama.check_greedy(output)


def test_chunks_that_start_anywhere_are_found_by_those_that_start_elsewhere(llama, cached):
    """Decodes of others take part of each step, so that chunks end within pages."""
    (longest,) = (prompt for prompt in llama.prompts if len(prompt) == 100)
    for others, shared in itertools.product((1, 2, 3), (30, 50, 70)):
        cached.reset_prefix_cache()
        arrivals = [
            Arrival([7 + i, 9], dataclasses.replace(GREEDY, max_tokens=20), i)
            for i in range(others)
        ]
        arrivals += [
            Arrival(longest, GREEDY, 4),
            Arrival(differing(longest, shared, 90), GREEDY, 9),
        ]
        outputs = drive(cached.engine, arrivals)
        for output in outputs:
            llama.check_greedy(output)
        assert cached_tokens(outputs[-1]) == shared


def test_a_page_is_found_as_soon_as_it_is_written(llama, cached):
    """While the first of two is still prefilling, the second finds what is done of it."""
    (longest,) = (prompt for prompt in llama.prompts if len(prompt) == 100)
    outputs = drive(cached.engine, [Arrival(longest, GREEDY, 0), Arrival(longest, GREEDY, 2)])
    # The second is admitted once the first leaves room in a step: its last chunk is not found yet.
    assert cached_tokens(outputs[1]) == len(longest) // CHUNK * CHUNK
    assert token_ids(outputs[0]) == token_ids(outputs[1])


def test_what_two_compute_at_once_is_kept_once(llama, cached):
    prompt = llama.prompts[PROMPT_LENGTHS.index(17)]
    one = dataclasses.replace(GREEDY, max_tokens=1)
    # Three at once, as many as a step has room for.
    arrivals = [Arrival(prompt[:9], one)] * 3
    outputs = drive(cached.engine, arrivals)
    assert [cached_tokens(output) for output in outputs] == [0, 0, 0]
    assert count(cached.engine, "kv_pages", "cached") == 3


def test_output_is_found_too(llama, cached):
    """The next turn of a conversation: all before it, and something new."""
    conversation = list(llama.prompts[PROMPT_LENGTHS.index(5)])
    params = dataclasses.replace(GREEDY, max_tokens=9)
    for turn in range(4):
        prompt = list(conversation)
        computed, output = prefilled(cached.engine, lambda p=prompt: generate(cached, p, params))
        llama.check_greedy(output)
        if turn:
            # All but the last token sampled, which was never fed back, and what was said since.
            assert cached_tokens(output) == len(conversation) - 4
            assert computed == 4
        conversation += [*output.outputs[0].token_ids, 70 + turn, 80, 90]


# Who finds it


def test_tenants_share_nothing_and_requests_without_one_share(llama, cached):
    prompt = llama.prompts[PROMPT_LENGTHS.index(33)]

    def run(tenant):
        (output,) = drive(cached.engine, [Arrival(prompt, GREEDY, tenant=tenant)])
        llama.check_greedy(output)
        return cached_tokens(output)

    tenants = ["a", "b", "aa", "\ud800", None]
    assert [run(tenant) for tenant in tenants] == [0] * 5
    assert [run(tenant) for tenant in tenants[-3:]] == [32] * 3


def test_salts_part_the_requests_of_a_tenant(llama, cached):
    prompt = llama.prompts[PROMPT_LENGTHS.index(33)]

    def run(tenant, salt):
        arrival = Arrival(prompt, GREEDY, tenant=tenant, cache_salt=salt)
        (output,) = drive(cached.engine, [arrival])
        return cached_tokens(output)

    apart = [("a", "b"), ("b", "a"), ("a", None), (None, "a"), ('a", "b', None), (None, None)]
    assert [run(*names) for names in apart] == [0] * len(apart)
    assert [run(*names) for names in apart[-2:]] == [32] * 2


@pytest.mark.parametrize("name", ["tenant", "cache_salt"])
@pytest.mark.parametrize("value", ["", 5, b"a"])
def test_what_is_no_tenant_and_no_salt_is_refused(llama, cached, name, value):
    with pytest.raises(RequestError, match=name):
        cached.engine.add("x", llama.prompts[0], GREEDY, **{name: value})


def test_without_caching_nothing_is_ever_found(llama, kv_llm_for):
    llm = kv_llm_for(enable_prefix_caching=False)
    for prompt in llama.prompts[3:9:2] * 2:
        computed, output = prefilled(llm.engine, lambda p=prompt: generate(llm, p, GREEDY))
        assert (computed, cached_tokens(output)) == (len(prompt), 0)
        assert count(llm.engine, "kv_pages", "cached") == 0
        assert count(llm.engine, "kv_nodes") == 0
    # But the samples of one request share its prompt all the same.
    prompt = llama.prompts[PROMPT_LENGTHS.index(33)]
    params = dataclasses.replace(SEEDED, n=4, max_tokens=4)
    computed, _ = prefilled(llm.engine, lambda: generate(llm, prompt, params))
    assert computed == len(prompt) + 3
    assert count(llm.engine, "kv_nodes") == 0


@pytest.mark.parametrize("scheduler", POLICIES)
def test_any_scheduler(llama, kv_llm_for, scheduler):
    llm = kv_llm_for(scheduler=scheduler)
    wanted = [PROMPT_LENGTHS.index(length) for length in (5, 16, 33, 60)]
    arrivals = [Arrival(llama.prompts[index], GREEDY) for index in wanted]
    drive(llm.engine, arrivals)
    computed, outputs = prefilled(llm.engine, lambda: drive(llm.engine, arrivals))
    assert computed == len(wanted)
    for index, output in zip(wanted, outputs):
        assert cached_tokens(output) == len(llama.prompts[index]) - 1
        assert list(output.outputs[0].token_ids) == llama.answer(index, 4, True)


# What it changes: nothing


def scores(output):
    return [
        [(token, pytest.approx(entry[token].logprob, abs=1e-4)) for token in sorted(entry)]
        for entry in output.outputs[0].logprobs
    ]


def test_log_probabilities_are_the_same_after_a_hit(llama, cached):
    prompt = llama.prompts[PROMPT_LENGTHS.index(60)]
    params = dataclasses.replace(GREEDY, logprobs=3)
    before, after = (generate(cached, prompt, params) for _ in range(2))
    assert cached_tokens(after) == 59
    assert scores(before) == scores(after)


@pytest.mark.parametrize("n", [1, 2])
def test_every_prompt_token_is_scored_though_it_is_cached(llama, cached, n):
    prompt = llama.prompts[PROMPT_LENGTHS.index(60)]
    generate(cached, prompt, GREEDY)
    params = dataclasses.replace(GREEDY, prompt_logprobs=2, n=n, temperature=0.8, seed=3)
    output = generate(cached, prompt, params)
    assert cached_tokens(output) == 0
    expected = llama.logprobs(prompt)
    assert output.prompt_logprobs[0] is None
    for position, entry in enumerate(output.prompt_logprobs[1:], 1):
        token = prompt[position]
        assert entry[token].logprob == pytest.approx(expected[position - 1, token], abs=1e-3)
        assert len(entry) >= 2


def test_penalties_and_stops_see_the_cached_part_too(llama, cached, alone):
    prompt = llama.prompts[PROMPT_LENGTHS.index(33)]
    params = dataclasses.replace(
        SEEDED, repetition_penalty=1.3, presence_penalty=0.4, logit_bias={40: 2.0}, min_tokens=3
    )
    for _ in range(2):
        assert token_ids(generate(cached, prompt, params)) == alone.tokens(prompt, params)


# Sharing


@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_samples_share_their_prompt_and_copy_a_page_each_at_most(llama, cached, alone, length):
    prompt = llama.prompts[PROMPT_LENGTHS.index(length)]
    params = dataclasses.replace(SEEDED, n=4, max_tokens=8)
    engine = cached.engine
    copied = count(engine, "kv_copied_pages_total")
    most_shared = []

    def look():
        pages = [set(engine.scheduler.tables[s.seq_id].pages) for s in engine.scheduler.running]
        if len(pages) == 4:
            shared = set.intersection(*pages)
            assert all(engine.kv.pool.refs(page) == 4 for page in shared)
            most_shared.append(len(shared))

    computed, (output,) = prefilled(engine, lambda: drive(engine, [Arrival(prompt, params)], look))
    # Each sample computes the last token, to go on from it.
    assert computed == length + 3
    assert max(most_shared) == length // PAGE_SIZE
    assert count(engine, "kv_copied_pages_total") - copied <= 4
    for index, sample in enumerate(token_ids(output)):
        single = dataclasses.replace(params, n=1, seed=sequence_seed(params.seed, index))
        assert [sample] == alone.tokens(prompt, single)


def test_beams_share_all_but_their_last_pages(llama, cached, kv_llm_for):
    prompt = llama.prompts[PROMPT_LENGTHS.index(33)]
    params = BeamSearchParams(4, 8, ignore_eos=True)
    without = kv_llm_for(enable_prefix_caching=False)
    results = []
    for llm in (cached, without):
        pages = []

        def search(llm=llm):
            return llm.beam_search(prompt, params, use_tqdm=False)

        first = len(llm.engine.log.records)
        computed, (output,) = prefilled(llm.engine, search)
        pages = [
            record.pages_used
            for record in llm.engine.log.records[first:]
            if hasattr(record, "pages_used")
        ]
        results.append((output, computed, max(pages)))
    (shared, shared_computed, shared_pages), (plain, plain_computed, plain_pages) = results
    assert [s.tokens for s in shared.sequences] == [s.tokens for s in plain.sequences]
    for ours, theirs in zip(shared.sequences, plain.sequences):
        assert ours.cum_logprob == pytest.approx(theirs.cum_logprob, abs=1e-4)
    # One token a beam and step; without the cache all of the prompt and what was found, each time.
    assert shared_computed == len(prompt) + 4 * 7
    assert plain_computed == len(prompt) + sum(4 * (len(prompt) + i) for i in range(1, 8))
    assert shared_pages <= len(prompt) // PAGE_SIZE + 4 * 2 < plain_pages


# Forgetting


def test_a_reset_while_requests_run_changes_no_token(llama, cached, alone):
    chance = random.Random(1)
    arrivals = [Arrival(prompt, SEEDED, step) for step, prompt in enumerate(llama.prompts)]
    arrivals += [Arrival(llama.prompts[8], dataclasses.replace(SEEDED, n=3), 5)]

    def between():
        if chance.random() < 0.4:
            cached.reset_prefix_cache()

    outputs = drive(cached.engine, arrivals, between)
    for arrival, output in zip(arrivals, outputs):
        assert token_ids(output) == alone.tokens(arrival.prompt, arrival.params)
    cached.reset_prefix_cache()
    assert count(cached.engine, "kv_pages", "free") == NUM_PAGES - 1
    assert count(cached.engine, "kv_nodes") == 0


def test_after_a_reset_nothing_is_found(llama, cached):
    prompt = llama.prompts[PROMPT_LENGTHS.index(33)]
    generate(cached, prompt, GREEDY)
    cached.reset_prefix_cache()
    assert cached_tokens(generate(cached, prompt, GREEDY)) == 0


def test_eviction_at_every_step_changes_no_token(llama, cached, alone):
    chance = random.Random(2)
    arrivals = [Arrival(prompt, SEEDED, step // 2) for step, prompt in enumerate(llama.prompts * 2)]
    outputs = drive(cached.engine, arrivals, lambda: cached.engine.kv.evict(chance.randint(0, 8)))
    for arrival, output in zip(arrivals, outputs):
        assert token_ids(output) == alone.tokens(arrival.prompt, arrival.params)
    evict_all(cached.engine)
    assert count(cached.engine, "kv_nodes") == 0


def test_tails_give_way_before_heads(llama, cached):
    """Of a long prompt that had to give way in part, the beginning is still known."""
    (longest,) = (prompt for prompt in llama.prompts if len(prompt) == 100)
    generate(cached, longest, GREEDY)
    cached.engine.kv.evict(13)
    # Twenty-six pages were written, the last of them in part.
    output = generate(cached, longest, GREEDY)
    assert cached_tokens(output) == 13 * PAGE_SIZE
    llama.check_greedy(output)


# Any mixture

pieces = st.tuples(
    st.integers(0, 2),  # the text that it begins like
    st.sampled_from([0, 1, 3, 4, 5, 8, 16, 31, 32, 33, 60]),  # for so long
    st.integers(1, 9),  # and so many tokens of its own
    st.integers(3, 6),  # which are all this
    st.integers(0, 12),  # when it comes
    st.sampled_from([None, None, "a"]),
    st.sampled_from([1, 1, 2, 3]),  # samples
    st.booleans(),  # seeded
)


@settings(max_examples=12, deadline=None)
@given(workload=st.lists(pieces, min_size=2, max_size=9), seed=st.integers(0, 99))
def test_any_prompts_that_begin_alike(llama, kv_llm_for, alone, workload, seed):
    engine = kv_llm_for().engine
    arrivals, chance = [], random.Random(seed)
    for text, shared, own, token, step, tenant, n, seeded in workload:
        prompt = llama.prompts[-1 - text][:shared] + [token] * own
        params = SamplingParams(
            temperature=0.8 if seeded or n > 1 else 0,
            seed=own,
            n=n,
            max_tokens=1 + own,
            ignore_eos=True,
        )
        arrivals.append(Arrival(prompt, params, step, tenant=tenant))

    def between():
        if chance.random() < 0.1:
            engine.kv.evict(chance.randint(1, 10))
        if chance.random() < 0.02:
            engine.reset_prefix_cache()

    for arrival, output in zip(arrivals, drive(engine, arrivals, between)):
        assert token_ids(output) == alone.tokens(arrival.prompt, arrival.params)
