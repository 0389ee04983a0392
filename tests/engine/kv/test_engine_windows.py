"""Attention windows: pages are given back, found again and moved; the tokens are the oracle's."""

from __future__ import annotations

import dataclasses
import re

import pytest
from exhaustive import combinations_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_engines import Preempter, bytes_of, count, evict_all
from tiny_engines import (
    CONTEXT,
    LONGEST,
    MAX_SEQS,
    PAGE_SIZE,
    PROMPT_LENGTHS,
    Arrival,
    TinyModel,
    drive,
    generate,
)

from jaxserve.cli.planning.plan_tables import capacity
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.beam_search import BeamSearchParams

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
WINDOW, CHUNK = 9, 32
OF_WINDOW = -(-(WINDOW - 1) // PAGE_SIZE)
MOST = OF_WINDOW + -(-(CHUNK - 1) // PAGE_SIZE) + 1
"""Pages of a window and a chunk, wherever it begins."""
MEMBERS = {
    # One group, with a window; layers that are compiled apart.
    "mistral": {"pages": MOST + 8, "full": 0},
    # A full layer and one with a window: two groups, whose layers share an array of pages.
    "qwen2": {"pages": CONTEXT // PAGE_SIZE + MOST + 8, "full": 1},
}


@pytest.fixture(scope="module", params=combinations_of(MEMBERS, "mistral"))
def member(request):
    return request.param


@pytest.fixture(scope="module")
def model(member, tmp_path_factory):
    return TinyModel.write_member(tmp_path_factory.mktemp(member), member)


@pytest.fixture(scope="module")
def windowed(model, member):
    """An LLM with few more pages than the longest sequence needs, and a tier below them."""
    pages = MEMBERS[member]["pages"]
    of_one_layer = bytes_of(model, 1) // 2
    layers = 1 if MEMBERS[member]["full"] else 2
    llm = model.load(
        debug_kv=True,
        preemption="swap",
        kv_cache_memory_bytes=(pages + 1) * layers * of_one_layer,
        host_kv_bytes=64 * layers * of_one_layer,
    )
    with llm:
        assert llm.engine.kv.pool.capacity == pages
        yield llm


def check(model, arrivals, outputs):
    for arrival, output in zip(arrivals, outputs, strict=True):
        expected = model.answers[model.prompts.index(arrival.prompt)][: arrival.params.max_tokens]
        for completion in output.outputs:
            assert list(completion.token_ids) == expected, len(arrival.prompt)


def test_the_plan_counts_a_window_and_a_chunk(model, member, windowed):
    full = MEMBERS[member]["full"]
    layout = windowed.engine.plan.memory.layout
    assert [group.window for group in layout.groups] == [None, WINDOW][1 - full :]
    of_one = full * CONTEXT // PAGE_SIZE + MOST
    assert layout.pages_for(CONTEXT) == of_one
    told = capacity(windowed.engine.plan)
    assert re.search(rf"longest request, \d layers? with a window of {WINDOW} +{MOST}\n", told)
    with model.load(kv_cache_memory_bytes=None) as roomy:
        memory = roomy.engine.plan.memory
        assert roomy.engine.plan.admission.num_at_once(CONTEXT) == MAX_SEQS
        free = roomy.engine.plan.admission.watermark_pages
        assert memory.num_pages == MAX_SEQS * of_one + free + 1
        page_bytes = bytes_of(model, 1) // 2 * (2 - full)
        assert memory.kv_bytes == memory.num_pages * page_bytes
        kv = roomy.engine._runner._state.kv
        assert sum(pages.k.nbytes + pages.v.nbytes for pages in kv) == memory.kv_bytes


def test_a_long_sequence_holds_its_window_and_no_more(model, member, windowed):
    engine, full, seen = windowed.engine, MEMBERS[member]["full"], []

    def watch():
        for seq in engine.scheduler.running:
            if seq.num_computed > seq.num_prompt:
                held = full * -(-seq.num_computed // PAGE_SIZE) + OF_WINDOW + 1
                assert engine.kv.pool.num_used == held
                seen.append(held)

    arrivals = [Arrival(model.prompts[-1], GREEDY)]
    check(model, arrivals, drive(engine, arrivals, watch))
    assert len(seen) > LONGEST // 2


def test_a_hit_needs_the_last_window_only(model, windowed):
    engine, prompt = windowed.engine, model.prompts[-1]
    windowed.reset_prefix_cache()
    for expected in (0, 96):
        output = generate(windowed, prompt, GREEDY)
        assert output.metrics.cached_tokens == expected
        check(model, [Arrival(prompt, GREEDY)], [output])
    evict_all(engine)
    output = generate(windowed, prompt, GREEDY)
    assert output.metrics.cached_tokens == 96 and count(engine, "kv_fetched_pages_total", "host")
    check(model, [Arrival(prompt, GREEDY)], [output])


def test_samples_and_beams(model, windowed):
    prompt = model.prompts[PROMPT_LENGTHS.index(33)]
    output = generate(windowed, prompt, dataclasses.replace(GREEDY, temperature=1, seed=3, n=4))
    alone = [
        generate(windowed, prompt, dataclasses.replace(GREEDY, temperature=1, seed=3, n=4))
        for _ in range(2)
    ]
    assert all(
        [c.token_ids for c in other.outputs] == [c.token_ids for c in output.outputs]
        for other in alone
    )
    check(model, [Arrival(prompt, GREEDY)], [generate(windowed, prompt, GREEDY)])
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (one,) = windowed.beam_search([{"prompt_token_ids": prompt}], params)
    windowed.reset_prefix_cache()
    (two,) = windowed.beam_search([{"prompt_token_ids": prompt}], params)
    assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in two.sequences]


def test_a_snapshot_has_the_requests_and_their_kv_is_recomputed(model, windowed, tmp_path):
    prompt = model.prompts[-1]
    stream = windowed.stream({"prompt_token_ids": prompt}, GREEDY)
    for _ in range(9):
        windowed.engine.step()
    windowed.snapshot(tmp_path)
    windowed.abort(stream.request.request_id)
    (restored,) = windowed.restore(tmp_path)
    check(model, [Arrival(prompt, GREEDY)], [restored.result()])


@settings(max_examples=6, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, len(PROMPT_LENGTHS) - 1), st.integers(1, LONGEST)),
        min_size=1,
        max_size=7,
    ),
    gap=st.integers(0, 3),
    share=st.sampled_from([0.0, 0.2, 1.0]),
    evicts=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_same_tokens_whatever_is_preempted(model, windowed, requests, gap, share, evicts, seed):
    arrivals = [
        Arrival(model.prompts[index], dataclasses.replace(GREEDY, max_tokens=most), gap * place)
        for place, (index, most) in enumerate(requests)
    ]
    preempter = Preempter(windowed.engine, seed, evicts, share)
    check(model, arrivals, drive(windowed.engine, arrivals, preempter))


def test_a_crowd_that_outgrows_the_pool(model, windowed):
    arrivals = [Arrival(prompt, GREEDY) for prompt in model.prompts[-4:] * 2]
    check(model, arrivals, drive(windowed.engine, arrivals))
