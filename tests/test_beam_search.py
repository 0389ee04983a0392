"""Beam search against a dense one that recomputes every prefix with the oracle."""

from __future__ import annotations

import functools
import math

import pytest
from beam_reference import check_beams, dense_search
from tiny_engines import CONTEXT, EOS, LONGEST, PROMPT_LENGTHS, assert_idle, generate

from jaxserve.core.errors import PromptTooLongError, RequestError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.beam_search import BeamSearchParams

MAX_TOKENS = 8
LENGTHS = (1, 5, 15, 17, 100)


@pytest.fixture(scope="module")
def next_logprobs(llama):
    """Oracle log probabilities float64 [vocab] of what follows a prefix."""
    return functools.cache(lambda tokens: llama.logprobs(tokens)[-1])


@pytest.fixture(scope="module")
def prompts(llama):
    return [llama.prompts[PROMPT_LENGTHS.index(length)] for length in LENGTHS]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_it_finds_what_a_dense_search_finds(
    llm, next_logprobs, prompts, width, penalty, ignore_eos
):
    params = BeamSearchParams(width, MAX_TOKENS, length_penalty=penalty, ignore_eos=ignore_eos)
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = dense_search(next_logprobs, prompt, params)
        assert output.error is None
        check_beams(output.sequences, expected, penalty, len(prompt))


def test_ends_and_penalties_make_a_difference(llm, prompts):
    """Or else the test above would prove less than it says."""
    found = {}
    for penalty in (0.5, 2.0):
        params = BeamSearchParams(4, MAX_TOKENS, length_penalty=penalty)
        outputs = llm.beam_search(prompts, params, use_tqdm=False)
        found[penalty] = [sequence for output in outputs for sequence in output.sequences]
        assert {sequence.finish_reason for sequence in found[penalty]} == {"stop", "length"}
    assert found[0.5] != found[2.0]
    params = BeamSearchParams(4, MAX_TOKENS, ignore_eos=True)
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    whole = [sequence for output in outputs for sequence in output.sequences]
    assert {sequence.finish_reason for sequence in whole} == {"length"}
    assert any(EOS in sequence.tokens for sequence in whole)


def test_more_prompts_than_fit_at_once_find_what_each_finds_alone(llama, llm):
    params = BeamSearchParams(3, 4)
    together = llm.beam_search(llama.prompts, params, use_tqdm=False)
    alone = [llm.beam_search(prompt, params, use_tqdm=False)[0] for prompt in llama.prompts]
    tokens = [[each.tokens for each in output.sequences] for output in together]
    assert tokens == [[each.tokens for each in output.sequences] for output in alone]
    assert [found[0][: len(prompt)] for prompt, found in zip(llama.prompts, tokens)] == [
        tuple(prompt) for prompt in llama.prompts
    ]


def test_the_one_beam_of_width_one_is_the_greedy_answer(llama, llm):
    params = BeamSearchParams(1, LONGEST, ignore_eos=True)
    outputs = llm.beam_search(llama.prompts, params, use_tqdm=False)
    greedy = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
    for prompt, output in zip(llama.prompts, outputs):
        (sequence,) = output.sequences
        answer = generate(llm, prompt, greedy).outputs[0].token_ids
        assert sequence.tokens == (*prompt, *answer)


def test_text_prompts_and_texts(llm, prompts):
    tokenizer = llm.get_tokenizer()
    (output,) = llm.beam_search("hello", BeamSearchParams(2, 3, ignore_eos=True), use_tqdm=False)
    for sequence in output.sequences:
        assert sequence.text == tokenizer.decode(sequence.tokens)
        assert sequence.text.startswith("hello")
    outputs = llm.beam_search(prompts, BeamSearchParams(4, MAX_TOKENS), use_tqdm=False)
    ended = [s for output in outputs for s in output.sequences if s.finish_reason == "stop"]
    assert ended
    for sequence in ended:
        assert sequence.tokens[-1] == EOS
        assert sequence.text == tokenizer.decode(sequence.tokens[:-1])


def test_it_ends_with_the_context(llama, llm):
    prompt = [*llama.prompts[-1], *llama.answers[-1][:24]]
    (output,) = llm.beam_search(prompt, BeamSearchParams(2, 50, ignore_eos=True), use_tqdm=False)
    assert [len(sequence.tokens) for sequence in output.sequences] == [CONTEXT] * 2
    assert [sequence.finish_reason for sequence in output.sequences] == ["length"] * 2


def test_a_stream_goes_on_beside_it(llama, llm):
    greedy = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
    stream = llm.stream(llama.prompts[4], greedy)
    tokens = list(next(stream).token_ids)
    llm.beam_search(llama.prompts[5], BeamSearchParams(2, 4), use_tqdm=False)
    tokens += [token for delta in stream for token in delta.token_ids]
    assert tokens == llama.answers[4]


# Refusals and interruptions


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("beam_width", [0, 11, 2.0, True, None, "4"]),
        ("max_tokens", [0, -1, 1.5, True, None]),
        ("ignore_eos", [0, None, "yes"]),
        ("length_penalty", [math.nan, math.inf, 10.5, -11, None, "1", True]),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(RequestError, match=field):
            BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | {field: value}))


def test_the_limit_of_the_width_is_named():
    with pytest.raises(RequestError, match=r"1\.\.10, got 11"):
        BeamSearchParams(11, 4)


def test_the_widest_search_runs(llama, llm):
    (output,) = llm.beam_search(llama.prompts[4], BeamSearchParams(10, 2), use_tqdm=False)
    scores = [sequence.score for sequence in output.sequences]
    assert len(scores) == 10
    assert scores == sorted(scores, reverse=True)


def test_sampling_params_are_refused(llama, llm):
    with pytest.raises(RequestError, match="must be a BeamSearchParams"):
        llm.beam_search(llama.prompts[4], SamplingParams(), use_tqdm=False)


def test_of_several_prompts_a_bad_one_fails_alone(llama, llm, next_logprobs):
    params = BeamSearchParams(2, 3)
    expected = dense_search(next_logprobs, llama.prompts[5], params)
    mixed = [[999], llama.prompts[5], [], llama.prompts[5], [3] * 500]
    outputs = llm.beam_search(mixed, params, use_tqdm=False)
    assert [output.sequences for output in outputs[::2]] == [[], [], []]
    for part, output in zip(("999", "no tokens", "500"), outputs[::2]):
        assert part in output.error
    for output in outputs[1::2]:
        assert output.error is None
        check_beams(output.sequences, expected, params.length_penalty, len(llama.prompts[5]))
    with pytest.raises(PromptTooLongError, match="500 tokens"):
        llm.beam_search([3] * 500, params, use_tqdm=False)


def refuse_after(llm, monkeypatch, count, error):
    """Let the engine refuse every request after the first `count`."""
    add, calls = llm.engine.add, []

    def refusing(*args, **options):
        calls.append(args)
        if len(calls) > count:
            raise error
        return add(*args, **options)

    monkeypatch.setattr(llm.engine, "add", refusing)


def test_a_search_refused_midway_leaves_nothing(llama, llm, monkeypatch):
    batch = [llama.prompts[4]]
    refuse_after(llm, monkeypatch, 2, RequestError("no more"))
    (output,) = llm.beam_search(batch, BeamSearchParams(2, 3), use_tqdm=False)
    assert (output.sequences, output.error) == ([], "no more")
    assert_idle(llm.engine)


def test_a_search_that_loses_a_beam_fails_alone(llama, llm, next_logprobs, monkeypatch):
    add, added = llm.engine.add, []

    def aborting(request_id, *args, **options):
        request = add(request_id, *args, **options)
        added.append(request_id)
        if len(added) == 4:  # One of two beams; the other prompt's search goes on.
            assert llm.abort(request_id)
        return request

    params = BeamSearchParams(2, 3)
    expected = dense_search(next_logprobs, llama.prompts[5], params)
    monkeypatch.setattr(llm.engine, "add", aborting)
    outputs = llm.beam_search([llama.prompts[5]] * 2, params, use_tqdm=False)
    whole, lost = sorted(outputs, key=lambda output: output.error or "")
    assert (whole.error, lost.error) == (None, "the search was aborted")
    check_beams(whole.sequences, expected, params.length_penalty, len(llama.prompts[5]))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_an_interrupted_search_leaves_nothing(llama, llm, monkeypatch, count):
    refuse_after(llm, monkeypatch, count, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search(llama.prompts[:3], BeamSearchParams(2, 6), use_tqdm=False)
    assert_idle(llm.engine)
