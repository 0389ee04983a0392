"""Log probabilities of outputs and prompts against the oracle's logits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tiny_engines import LONGEST, PROMPT_LENGTHS, Arrival, drive, generate, preemptions

from jaxserve.core.requests.sampling_params import SamplingParams

SAMPLED = SamplingParams(temperature=0.6, seed=5, max_tokens=LONGEST, ignore_eos=True, logprobs=3)


def check_entry(entry, token, expected, count):
    """One position: the taken token and the `count` most likely, each with its place."""
    ranked = np.argsort(-expected, kind="stable")[:count].tolist()
    assert set(entry) == {token, *ranked}
    for place, likely in enumerate(ranked, 1):
        assert entry[likely].rank == place
    assert entry[token].rank == 1 + np.sum(expected > expected[token])
    for each, logprob in entry.items():
        assert logprob.logprob == pytest.approx(expected[each], abs=1e-4)


def check_outputs(llama, prompt, completion, count):
    sampled = list(completion.token_ids)
    expected = llama.logprobs([*prompt, *sampled])[len(prompt) - 1 : -1]
    assert len(completion.logprobs) == len(sampled)
    for entry, token, row in zip(completion.logprobs, sampled, expected):
        check_entry(entry, token, row, count)
    total = sum(row[token] for token, row in zip(sampled, expected))
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def check_prompt(llama, output, count):
    prompt = list(output.prompt_token_ids)
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    expected = llama.logprobs(prompt)
    for position, entry in enumerate(output.prompt_logprobs[1:], 1):
        check_entry(entry, prompt[position], expected[position - 1], count)


@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_logprobs_of_outputs(llama, llm, count):
    params = dataclasses.replace(SAMPLED, logprobs=count)
    prompt = llama.prompts[9]
    completion = generate(llm, prompt, params).outputs[0]
    check_outputs(llama, prompt, completion, count)
    sizes = {len(entry) for entry in completion.logprobs}
    assert sizes == {max(count, 1), count + 1}, "some tokens are outside the top, others not"


def test_they_are_of_the_raw_distribution(llama, llm):
    options = {"repetition_penalty": 1.5, "logit_bias": {9: 30.0}, "temperature": 0.5, "top_k": 2}
    prompt = llama.prompts[4]
    completion = generate(llm, prompt, dataclasses.replace(SAMPLED, **options)).outputs[0]
    assert 9 in completion.token_ids
    check_outputs(llama, prompt, completion, 3)


def test_those_of_given_tokens(llama, llm):
    """In the place of the most likely ones, beside requests that have those."""
    given = (7, 200, 0, 255)
    sampled = [
        SAMPLED,
        dataclasses.replace(SAMPLED, logprobs=None, logprob_token_ids=given),
        dataclasses.replace(SAMPLED, logprob_token_ids=given[:1], prompt_logprobs=2),
        dataclasses.replace(SAMPLED, logprobs=None),
    ]
    prompt = llama.prompts[9]
    outputs = drive(llm.engine, [Arrival(prompt, params) for params in sampled])
    completions = [output.outputs[0] for output in outputs]
    assert len({completion.token_ids for completion in completions}) == 1
    check_outputs(llama, prompt, completions[0], 3)
    check_prompt(llama, outputs[2], 2)
    assert completions[3].logprobs is None
    sampled = list(completions[0].token_ids)
    expected = llama.logprobs([*prompt, *sampled])[len(prompt) - 1 : -1]
    for completion, ids in ((completions[1], given), (completions[2], given[:1])):
        for entry, token, row in zip(completion.logprobs, sampled, expected, strict=True):
            assert list(entry) == list(dict.fromkeys([token, *ids]))
            for each, logprob in entry.items():
                assert logprob.logprob == pytest.approx(row[each], abs=1e-4)
                rank = 1 + np.sum(row > row[token])
                assert logprob.rank == (rank if each == token else None)


def test_only_requests_that_ask_get_them(llama, llm):
    silent = dataclasses.replace(SAMPLED, logprobs=None)
    asked, other = drive(llm.engine, [Arrival(llama.prompts[4], p) for p in (SAMPLED, silent)])
    check_outputs(llama, llama.prompts[4], asked.outputs[0], 3)
    assert other.outputs[0].logprobs is None
    assert other.outputs[0].cumulative_logprob is None
    assert other.prompt_logprobs is None
    assert other.outputs[0].token_ids == asked.outputs[0].token_ids


def test_decoded_tokens(llama, llm):
    completion = generate(llm, llama.prompts[4], SAMPLED).outputs[0]
    tokenizer = llm.get_tokenizer()
    for entry in completion.logprobs:
        for token, logprob in entry.items():
            assert logprob.decoded_token == tokenizer.token_text(token)


def test_nothing_is_decoded_that_is_not_asked_for(llama, llm, monkeypatch):
    params = dataclasses.replace(SAMPLED, detokenize=False, prompt_logprobs=2)
    for name in ("decode", "token_text", "token_bytes", "whole_text"):
        monkeypatch.setattr(llm.get_tokenizer(), name, None)
    output = generate(llm, llama.prompts[4], params)
    (completion,) = output.outputs
    assert completion.text == "" and len(completion.token_ids) == LONGEST
    entries = [*completion.logprobs, *output.prompt_logprobs[1:]]
    assert {logprob.decoded_token for entry in entries for logprob in entry.values()} == {None}


def test_streamed_logprobs_are_those_of_the_output(llama, llm):
    whole = generate(llm, llama.prompts[4], SAMPLED).outputs[0]
    deltas = list(llm.stream(llama.prompts[4], SAMPLED))
    streamed = [entry for delta in deltas for entry in delta.logprobs]
    assert [list(entry) for entry in streamed] == [list(entry) for entry in whole.logprobs]


# Prompts


@pytest.mark.parametrize("index", range(len(PROMPT_LENGTHS)))
def test_logprobs_of_a_prompt_across_chunks(llama, llm, index):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    check_prompt(llama, generate(llm, llama.prompts[index], params), 2)


def test_logprobs_of_prompts_side_by_side(llama, llm):
    """Chunks of several prompts share steps; each asks for another number, or for none."""
    arrivals = [
        Arrival(prompt, dataclasses.replace(SAMPLED, prompt_logprobs=count), step=step)
        for step, (prompt, count) in enumerate(zip(llama.prompts, [0, None, 1, 4] * 3))
    ]
    for output, arrival in zip(drive(llm.engine, arrivals), arrivals):
        check_outputs(llama, arrival.prompt, output.outputs[0], 3)
        if arrival.params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            check_prompt(llama, output, arrival.params.prompt_logprobs)


def test_logprobs_survive_a_preemption(llama, llm):
    before = preemptions(llm.engine)
    params = dataclasses.replace(SAMPLED, prompt_logprobs=2)
    arrivals = [Arrival(llama.prompts[9], params, tenant=f"tenant {i}") for i in range(4)]
    outputs = drive(llm.engine, arrivals)
    assert preemptions(llm.engine) > before
    for output in outputs:
        check_outputs(llama, llama.prompts[9], output.outputs[0], 3)
        check_prompt(llama, output, 2)


def test_several_sequences_share_the_prompts(llama, llm):
    params = dataclasses.replace(SAMPLED, n=2, prompt_logprobs=1)
    output = generate(llm, llama.prompts[10], params)
    check_prompt(llama, output, 1)
    for completion in output.outputs:
        check_outputs(llama, llama.prompts[10], completion, 3)
