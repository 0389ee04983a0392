"""Seeded sampling and everything a request may ask of it, through the whole engine."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sampling_reference import processed
from tiny_engines import FULL, LONGEST, Arrival, drive, generate, preemptions

from jaxserve.core.requests.sampling_params import SamplingParams, sequence_seed
from jaxserve.scheduler.policies import POLICIES

PLAIN = SamplingParams(temperature=1.0, seed=7, max_tokens=LONGEST, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)


def tokens(output):
    return [list(completion.token_ids) for completion in output.outputs]


@pytest.fixture(scope="module")
def prompt(llama):
    return llama.prompts[9]


@pytest.fixture(scope="module")
def alone(llm_for, prompt):
    """What FULL and PLAIN sample after `prompt` with the engine to themselves."""
    return [tokens(generate(llm_for(), prompt, params)) for params in (FULL, PLAIN)]


# Seeds


@pytest.mark.parametrize("scheduler", POLICIES)
def test_the_same_seed_gives_the_same_tokens_in_any_batch(llama, llm_for, prompt, alone, scheduler):
    full, plain, greedy = Arrival(prompt, FULL, 3), Arrival(prompt, PLAIN, 4), GREEDY
    others = [Arrival(p, greedy, step) for step, p in enumerate(llama.prompts)]
    outputs = drive(llm_for(scheduler).engine, [full, plain, *others])
    assert [tokens(output) for output in outputs[:2]] == alone


def test_the_same_seed_gives_the_same_tokens_after_a_preemption(llm_for, prompt, alone):
    engine = llm_for().engine
    before = preemptions(engine)
    arrivals = [Arrival(prompt, params, priority=-1) for params in (GREEDY, GREEDY)]
    arrivals += [Arrival(prompt, params) for params in (FULL, PLAIN)]
    arrivals = [dataclasses.replace(a, tenant=f"tenant {i}") for i, a in enumerate(arrivals)]
    outputs = drive(engine, arrivals)
    assert preemptions(engine) > before
    assert [tokens(output) for output in outputs[2:]] == alone


def test_n_sequences_are_n_requests_with_seeds_of_their_own(llm, prompt):
    (several,) = drive(llm.engine, [Arrival(prompt, dataclasses.replace(PLAIN, n=4))])
    assert [completion.index for completion in several.outputs] == [0, 1, 2, 3]
    each = [
        generate(llm, prompt, dataclasses.replace(PLAIN, seed=sequence_seed(PLAIN.seed, index)))
        for index in range(4)
    ]
    assert tokens(several) == [tokens(output)[0] for output in each]
    assert len({tuple(sampled) for sampled in tokens(several)}) == 4


def test_without_a_seed_the_engine_draws_one(llama, llm, prompt):
    unseeded = dataclasses.replace(PLAIN, seed=None)
    first, second = (tokens(generate(llm, prompt, unseeded)) for _ in range(2))
    assert first != second
    with llama.load(seed=5) as one, llama.load(seed=5) as other:
        assert tokens(generate(one, prompt, unseeded)) == tokens(generate(other, prompt, unseeded))


# What a request may ask for


def follow(llama, prompt, output, params, **more):
    """Checks a greedy output against the reference's processing of the oracle's logits."""
    sampled = list(output.outputs[0].token_ids)
    raw = llama.logits([*prompt, *sampled])[len(prompt) - 1 :]
    for place, token in enumerate(sampled):
        past = {"prompt": prompt, "output": sampled[:place]}
        expected = processed(raw[place], params, **past, **more)
        second, best = np.sort(expected)[-2:]
        assert best - second > 1e-4, "a tie that rounding could decide"
        assert token == np.argmax(expected)
    return sampled


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7, "presence_penalty": -0.5},
        {"logit_bias": {7: 2.0, 9: 1.5, 200: -3.0}},
        {"allowed_token_ids": (3, 5, 8, 13, 21, 34, 55)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_parameter_changes_greedy_tokens_as_the_reference_does(llama, llm, prompt, options):
    params = dataclasses.replace(GREEDY, **options)
    other = Arrival(llama.prompts[5], GREEDY, step=2)
    output, untouched = drive(llm.engine, [Arrival(prompt, params), other])
    assert follow(llama, prompt, output, params) != llama.answers[9]
    assert tokens(untouched) == [llama.answers[5]]


def test_bad_words_of_one_and_of_several_tokens(llama, llm, prompt):
    """The words are what the model would have said: its fourth token, and the next two."""
    tokenizer = llm.get_tokenizer()
    letters = tuple(tokenizer.encode("abcdefgh"))
    free = dataclasses.replace(GREEDY, allowed_token_ids=letters)
    text = generate(llm, prompt, free).outputs[0].text
    words = (text[3], text[5:7])
    spelled = [tokenizer.encode(space + word) for word in words for space in ("", " ")]
    params = dataclasses.replace(free, bad_words=words)
    output = generate(llm, prompt, params)
    follow(llama, prompt, output, params, bad_words=spelled)
    assert not any(word in output.outputs[0].text for word in words)


def test_when_nothing_is_left_to_sample_the_request_alone_fails(llama, llm, prompt):
    only = llm.get_tokenizer().encode("x")
    impossible = dataclasses.replace(GREEDY, allowed_token_ids=tuple(only), bad_words=("x",))
    failed, fine = drive(llm.engine, [Arrival(prompt, impossible), Arrival(prompt, GREEDY)])
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].token_ids == ()
    assert "no token to sample" in failed.error
    assert tokens(fine) == [llama.answers[9]]
    assert fine.error is None
