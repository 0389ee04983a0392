"""Requests taken up by another engine: the same tokens, from any moment, into any pool."""

from __future__ import annotations

import dataclasses
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_engines import Preempter, bytes_of, count, preemptible, prefilled, token_ids
from tiny_engines import LONGEST, PAGE_SIZE, PROMPT_LENGTHS, assert_idle, generate

from jaxserve.core.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
PENALIZED = dataclasses.replace(SEEDED, presence_penalty=1.0, repetition_penalty=1.5, seed=9)
SCORED = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)
SEVERAL = dataclasses.replace(SEEDED, n=3, max_tokens=9)
STOPPED = dataclasses.replace(SEEDED, stop=("a", "e"), ignore_eos=False)
SWAPPING = {"preemption": "swap", "host": 64}


@pytest.fixture
def source(kv_llm_for):
    """Where requests begin; they are ended there when the test is over."""
    llm = kv_llm_for(**SWAPPING)
    yield llm
    for request_id in list(llm.engine._requests):
        llm.abort(request_id)


@pytest.fixture
def target(kv_llm_for):
    """Where they go on: pages are twice as large, and there is no lower tier."""
    llm = kv_llm_for(page_size=2 * PAGE_SIZE)
    yield llm
    assert_idle(llm.engine)


def workload(llama):
    prompts, lengths = llama.prompts, PROMPT_LENGTHS
    kinds = [GREEDY, SEEDED, SEVERAL, SCORED, PENALIZED, STOPPED]
    return [
        (prompts[lengths.index(length)], params)
        for length, params in zip((100, 15, 32, 33, 17, 60), kinds)
    ]


def add(llm, work):
    return [llm.stream({"prompt_token_ids": prompt}, params) for prompt, params in work]


def step(llm, count):
    for _ in range(count):
        llm.engine.step()


def move(source, target, directory, **how):
    """The outputs of the streams of `source`, from `target`, and what that prefilled."""
    source.snapshot(directory, **how)
    streams = target.restore(directory)
    return prefilled(target.engine, lambda: [stream.result() for stream in streams])


def check(alone, work, outputs):
    for (prompt, params), output in zip(work, outputs, strict=True):
        assert output.finished
        assert token_ids(output) == alone.tokens(prompt, params), params


# The same tokens


@settings(max_examples=6, deadline=None)
@given(steps=st.integers(0, 45), with_kv=st.booleans(), disturbed=st.booleans())
def test_a_snapshot_after_any_step(llama, alone, kv_llm_for, steps, with_kv, disturbed):
    source, target = kv_llm_for(**SWAPPING), kv_llm_for(page_size=2 * PAGE_SIZE)
    work = workload(llama)
    streams = add(source, work)
    preempter = Preempter(source.engine, seed=steps, evicts=True)
    for _ in range(steps):
        source.engine.step()
        if disturbed:
            preempter()
    with tempfile.TemporaryDirectory() as directory:
        _, outputs = move(source, target, directory, with_kv=with_kv)
    check(alone, work, outputs)
    # The requests of the snapshot can also go on in this engine, with the same tokens.
    for stream, output in zip(streams, outputs):
        here = stream.result()
        assert [c.text for c in here.outputs] == [c.text for c in output.outputs]
        assert [c.finish_reason for c in here.outputs] == [c.finish_reason for c in output.outputs]
        assert [c.stop_reason for c in here.outputs] == [c.stop_reason for c in output.outputs]


def test_what_was_scored_stays_scored(llama, source, target, tmp_path):
    work = [(llama.prompts[-1], SCORED)]
    (stream,) = add(source, work)
    step(source, 9)
    assert 0 < len(stream.request.sequence_outputs[0].seq.output_token_ids) < LONGEST
    computed, (output,) = move(source, target, tmp_path)
    assert computed <= 2
    expected = stream.result()
    ours = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    theirs = [*expected.prompt_logprobs[1:], *expected.outputs[0].logprobs]
    assert len(ours) == len(theirs) == PROMPT_LENGTHS[-1] - 1 + LONGEST
    for entry, other in zip(ours, theirs):
        assert {t: (s.rank, s.decoded_token) for t, s in entry.items()} == {
            t: (s.rank, s.decoded_token) for t, s in other.items()
        }
        for token, scored in entry.items():
            assert scored.logprob == pytest.approx(other[token].logprob, abs=1e-4)
    assert output.outputs[0].cumulative_logprob == pytest.approx(
        expected.outputs[0].cumulative_logprob, abs=1e-3
    )


def test_a_stream_begins_with_what_was_generated_before(llama, source, target, tmp_path):
    (stream,) = add(source, [(llama.prompts[5], SEEDED)])
    seen = [next(stream) for _ in range(6)]
    source.snapshot(tmp_path)
    (again,) = target.restore(tmp_path)
    deltas = list(again)
    assert [d.token_ids for d in deltas[:6]] == [d.token_ids for d in seen]
    assert "".join(d.text for d in deltas) == "".join(d.text for d in [*seen, *stream])


def test_unclaimed_outputs_are_not_lost(llama, alone, source, target, tmp_path):
    short = dataclasses.replace(SEEDED, max_tokens=2)
    work = [(llama.prompts[4], short), (llama.prompts[6], SEEDED)]
    streams = add(source, work)
    while not streams[0].request.finished:
        source.engine.step()
    aborted = add(source, [(llama.prompts[5], SEEDED)])[0]
    step(source, 3)
    source.abort(aborted.request_id)
    computed, outputs = move(source, target, tmp_path)
    check(alone, work, outputs[:2])
    assert outputs[2].outputs[0].finish_reason == "abort"
    assert outputs[2].outputs[0].text == aborted.result().outputs[0].text
    assert computed <= 2


def test_restored_requests_and_new_ones_have_ids_of_their_own(llama, source, target, tmp_path):
    streams = add(source, workload(llama)[:2])
    source.snapshot(tmp_path)
    restored = target.restore(tmp_path)
    assert [s.request_id for s in restored] == [s.request_id for s in streams]
    outputs = target.generate(llama.prompts[:3], GREEDY, use_tqdm=False)
    ids = {output.request_id for output in outputs} | {s.request_id for s in restored}
    assert len(ids) == 5
    for stream in restored:
        stream.close()


def test_whose_turn_it_is_does_not_change(llama, source, target, tmp_path):
    """All wait behind one who has every slot; the last is the most urgent."""
    crowd = [source.engine.add(f"r{i}", llama.prompts[4], GREEDY, priority=-i) for i in range(6)]
    source.engine.snapshots.write(tmp_path)
    requests = target.engine.snapshots.restore(tmp_path)
    order = [seq.request_id for seq in target.engine.scheduler.waiting]
    assert order == [request.request_id for request in reversed(crowd)]
    for request in requests:
        target.engine.abort(request.request_id)


# What is computed again


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize("steps", [2, 12])
def test_with_kv_only_the_newest_token_is_computed_again(
    llama, alone, source, target, tmp_path, steps, with_kv
):
    work = [(llama.prompts[-1], SEEDED)]
    (stream,) = add(source, work)
    step(source, steps)
    seq = stream.request.sequence_outputs[0].seq
    known, written = len(llama.prompts[-1]) + len(seq.output_token_ids), seq.num_written
    assert (steps == 2) == (written < len(llama.prompts[-1]))
    computed, outputs = move(source, target, tmp_path, with_kv=with_kv)
    check(alone, work, outputs)
    # Of a token beside full pages, the pages of 8 tokens have use for one or more.
    assert computed == (known - min(written, known - 1) if with_kv else known)


def test_pages_that_were_swapped_out_come_along(llama, alone, source, target, tmp_path):
    work = [(llama.prompts[-1], SEEDED)]
    streams = add(source, work)
    step(source, 14)
    (seq,) = preemptible(source.engine)
    source.engine.scheduler.preempt(seq)
    source.engine.kv.evict(source.engine.kv.pool.capacity)
    assert count(source.engine, "kv_pages", "cached") == 0
    computed, outputs = move(source, target, tmp_path)
    check(alone, work, outputs)
    check(alone, work, [stream.result() for stream in streams])
    assert computed == 1


def test_a_pool_too_small_for_all_takes_the_running_ones(
    llama, alone, source, kv_llm_for, tmp_path
):
    work = [(llama.prompts[-1], SEEDED), (llama.prompts[-2], GREEDY)]
    streams = add(source, work)
    step(source, 14)
    small = kv_llm_for(kv_cache_memory_bytes=bytes_of(llama, 33))
    computed, outputs = move(source, small, tmp_path)
    check(alone, work, outputs)
    check(alone, work, [stream.result() for stream in streams])
    assert computed < PROMPT_LENGTHS[-1]
    assert_idle(small.engine)


def test_the_prefix_cache_comes_along(llama, source, target, tmp_path):
    prompt = llama.prompts[-2]
    generate(source, prompt, GREEDY)
    source.snapshot(tmp_path / "cached")
    target.restore(tmp_path / "cached")
    assert generate(target, prompt, GREEDY).metrics.cached_tokens >= len(prompt) - 1
    target.reset_prefix_cache()
    source.engine.add("a", prompt, GREEDY, tenant="a")
    step(source, 6)
    source.abort("a")
    source.snapshot(tmp_path / "a")
    target.restore(tmp_path / "a")
    (theirs,) = target.generate(prompt, GREEDY, use_tqdm=False, tenant="a")
    (others,) = target.generate(prompt, GREEDY, use_tqdm=False, tenant="b")
    assert theirs.metrics.cached_tokens >= len(prompt) - PAGE_SIZE
    assert others.metrics.cached_tokens == 0


def test_when_there_is_no_time_the_requests_are_written_and_nothing_else(
    llama, alone, source, target, tmp_path
):
    work = workload(llama)[:2]
    streams = add(source, work)
    step(source, 12)
    _, outputs = move(source, target, tmp_path, deadline_s=0.0)
    check(alone, work, outputs)
    assert len(streams) == len(work)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_pool_without_a_cache_still_finds_what_is_its_own(llama, alone, kv_llm_for, tmp_path):
    uncached = kv_llm_for(enable_prefix_caching=False)
    work = [(llama.prompts[-2], SEEDED), (llama.prompts[7], SEVERAL)]
    streams = add(uncached, work)
    step(uncached, 10)
    uncached.snapshot(tmp_path)
    for stream in streams:
        stream.close()
    step(uncached, 2)
    again = uncached.restore(tmp_path)
    computed, outputs = prefilled(uncached.engine, lambda: [s.result() for s in again])
    check(alone, work, outputs)
    assert computed <= 8
    assert_idle(uncached.engine)
    assert count(uncached.engine, "kv_pages", "cached") == 0
