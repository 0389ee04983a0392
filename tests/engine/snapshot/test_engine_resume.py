"""Requests of a lost engine, resumed from what their clients have received: nothing twice, nothing
missing, the same tokens."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from routed_requests import routed, run
from test_engine_export import KINDS
from tiny_engines import PAGE_SIZE, assert_idle

from jaxserve.core.errors import SnapshotError
from jaxserve.core.requests.outputs import Delta
from jaxserve.engine.output_queue import merge


@pytest.fixture(scope="module")
def engines(llm_for, llama):
    """Where a request begins and where it goes on: alike but for the page size."""
    other = llama.load(page_size=2 * PAGE_SIZE, kv_cache_memory_bytes=None)
    yield llm_for().engine, other.engine
    other.close()


def streamed(received):
    """All that was streamed of each sequence; logprobs, which may differ by rounding, apart."""
    whole = sorted(merge(received), key=lambda delta: delta.index)
    return [each._replace(logprobs=None) for each in whole], [
        [entry[token].logprob for entry, token in zip(each.logprobs or (), each.token_ids)]
        for each in whole
    ]


@settings(max_examples=12, deadline=None)
@example(kind="scored", length=2, losses=[(8, 1), (20, 1)])  # Lost when it had ended.
@given(
    kind=st.sampled_from(list(KINDS)),
    length=st.integers(1, 40),
    losses=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3)), max_size=3),
)
def test_any_number_of_losses_at_any_moment(engines, llama, kind, length, losses):
    params, prompt = KINDS[kind], [3 + 7 * i % 250 for i in range(length)]
    wanted, whole = run(engines[0], routed(prompt, params))
    request, received, had_finished = routed(prompt, params), [], False
    for (steps, every), engine in zip(losses, itertools.cycle(engines)):
        new, ended = run(engine, request, steps, every)
        received += new
        had_finished |= ended is not None
        request.lose()
    rest, output = run(engines[1], request)
    (seen, scores), (due, due_scores) = streamed(received + rest), streamed(wanted)
    assert seen == due
    for ours, theirs in zip(scores, due_scores, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
        assert len(ours) == (0 if params.logprobs is None else len(due[0].token_ids))
    for ours, theirs in zip(output.outputs, whole.outputs, strict=True):
        assert (
            dataclasses.replace(
                ours, logprobs=theirs.logprobs, cumulative_logprob=theirs.cumulative_logprob
            )
            == theirs
        )
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    assert (output.prompt_logprobs is None) == (whole.prompt_logprobs is None)
    if not had_finished:  # Else nothing was computed again: its scores came with its first output.
        assert None not in (output.prompt_logprobs or [{}])[1:]
    for engine in engines:
        assert_idle(engine)


def test_what_had_finished_is_not_streamed_again():
    request = routed([5, 6], dataclasses.replace(KINDS["several"], n=2, logprobs=None))
    ended = Delta(0, "ab", (7, 8), None, "stop", 8)
    assert request.receive([ended]) == [ended]
    request.lose()
    assert request.receive([ended, Delta(1, "c", (9,))]) == [Delta(1, "c", (9,))]


def test_a_request_that_does_not_fit_is_refused(engines):
    request = routed([5] * 20, KINDS["greedy"])
    request.receive([Delta(0, "", (7,) * 200)])
    with pytest.raises(SnapshotError, match="unfinished with 220 tokens"):
        engines[0].migration.resume_request(request.to_send("too long"))
    assert_idle(engines[0])
