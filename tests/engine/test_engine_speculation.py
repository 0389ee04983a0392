"""Speculative decoding changes no token: right and wrong drafts, preemptions, swaps, arrivals."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_engines import Preempter
from tiny_engines import LONGEST, MAX_SEQS, Arrival, drive, generate, preemptions

from jaxserve.core.errors import ConfigError
from jaxserve.core.outputs import RequestOutput
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.llm import LLM

DRAFTS = 3
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
SETTINGS: dict[str, Any] = {
    "speculative_config": NGRAM,
    "max_num_batched_tokens": MAX_SEQS * (1 + DRAFTS) + 32,
}
POOLS = {
    "recomputed": {},
    "swapped": {"preemption": "swap", "host": 64},
    "uncached": {"preemption": "swap", "host": 64, "enable_prefix_caching": False},
}

LETTERS = tuple(ord(letter) for letter in "abc")
PLAIN = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
FEW = dataclasses.replace(PLAIN, temperature=1.0, seed=3, allowed_token_ids=LETTERS)
"""Random tokens of which many are guessed right, and many wrong."""
ONE = dataclasses.replace(PLAIN, allowed_token_ids=LETTERS[:1])
"""The same token for ever, so that every draft is right."""
OPTIONS = {
    "greedy": PLAIN,
    "sampled": dataclasses.replace(PLAIN, temperature=0.8, top_p=0.9, seed=5),
    "one token": ONE,
    "few tokens": FEW,
    "likely token": dataclasses.replace(PLAIN, temperature=1.0, seed=4, logit_bias={97: 9.0}),
    "eos": dataclasses.replace(FEW, allowed_token_ids=(*LETTERS, 2), ignore_eos=False),
    "stop token": dataclasses.replace(FEW, stop_token_ids=LETTERS[:1]),
    "stop token later": dataclasses.replace(FEW, stop_token_ids=LETTERS[:1], min_tokens=6),
    "no token": dataclasses.replace(ONE, stop_token_ids=LETTERS[:1], min_tokens=6),
    "stop string": dataclasses.replace(FEW, stop=("abc", "bb")),
    "stop inside": dataclasses.replace(ONE, stop=("a" * 11,)),
    "logprobs": dataclasses.replace(FEW, logprobs=3, prompt_logprobs=1),
    "samples": dataclasses.replace(FEW, n=4),
    "penalties": dataclasses.replace(FEW, frequency_penalty=0.7, repetition_penalty=1.3),
    "bad words": dataclasses.replace(FEW, bad_words=("ab", "ca")),
    "grammar": dataclasses.replace(PLAIN, structured_outputs={"regex": "(ab|c){3,9}"}),
}


@pytest.fixture(scope="module")
def prompts(llama):
    """Random prompts, and ones that repeat themselves."""
    rng = np.random.RandomState(5)
    copies = [rng.randint(3, 256, size).tolist() * times for size, times in ((3, 9), (5, 6))]
    return [*llama.prompts, *copies]


@pytest.fixture(scope="module")
def expected(llama, prompts):
    """What a request answers without speculation, alone."""
    known: dict[Any, RequestOutput] = {}
    with llama.load(debug_kv=True, enable_prefix_caching=False) as llm:

        def get(index: int, option: str, max_tokens: int) -> RequestOutput:
            key = index, option, max_tokens
            if key not in known:
                known[key] = generate(llm, prompts[index], limited(option, max_tokens))
            return known[key]

        yield get


def limited(option: str, max_tokens: int) -> SamplingParams:
    params = OPTIONS[option]
    least = min(params.min_tokens, max_tokens)
    return dataclasses.replace(params, max_tokens=max_tokens, min_tokens=least)


def counted(llm: LLM, name: str) -> int:
    return int(llm.get_metrics()[f"vllm:spec_decode_num_{name}_total"].value)


def steps(llm: LLM) -> int:
    return int(llm.get_metrics()["jaxserve:steps_total"].value)


def check(found: RequestOutput, expected: RequestOutput) -> None:
    for mine, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids
        ends = [(one.text, one.finish_reason, one.stop_reason) for one in (mine, theirs)]
        assert ends[0] == ends[1]
        for entry, same in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert entry.keys() == same.keys()
            for token in entry:
                assert entry[token].logprob == pytest.approx(same[token].logprob, abs=1e-4)


@pytest.mark.parametrize("option", OPTIONS)
def test_answers_are_those_without_drafts(kv_llm_for, prompts, expected, option):
    llm = kv_llm_for(**SETTINGS)
    params, before = limited(option, LONGEST), counted(llm, "accepted_tokens")
    arrivals = [Arrival(prompt, params, 2 * i) for i, prompt in enumerate(prompts)]
    for index, output in enumerate(drive(llm.engine, arrivals)):
        check(output, expected(index, option, LONGEST))
    if option not in ("greedy", "sampled", "stop token", "no token"):
        assert (counted(llm, "accepted_tokens") > before) == params.speculative


requests = st.tuples(
    st.integers(0, 13),
    st.sampled_from(list(OPTIONS)),
    st.integers(1, LONGEST),
    st.integers(0, 20),
    st.integers(-1, 1),
)


@pytest.mark.parametrize("pool", POOLS)
@settings(max_examples=8, deadline=None)
@given(
    workload=st.lists(requests, min_size=1, max_size=8),
    seed=st.integers(0, 999),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_workload(kv_llm_for, prompts, expected, pool, workload, seed, share):
    """Sequences lose their pages after any step, and come back from a lower tier or none."""
    engine = kv_llm_for(**SETTINGS, **POOLS[pool]).engine
    arrivals = [
        Arrival(prompts[index], limited(option, max_tokens), step, priority)
        for index, option, max_tokens, step, priority in workload
    ]
    outputs = drive(engine, arrivals, Preempter(engine, seed, evicts=share > 0, share=share))
    for (index, option, max_tokens, *_), output in zip(workload, outputs):
        check(output, expected(index, option, max_tokens))


def test_a_right_guess_of_every_draft_is_one_step_for_all_of_them(kv_llm_for, prompts):
    llm = kv_llm_for(**SETTINGS)
    before, names = steps(llm), ("drafts", "draft_tokens", "accepted_tokens")
    counts = [counted(llm, name) for name in names]
    params = dataclasses.replace(ONE, max_tokens=42)
    assert len(generate(llm, prompts[2], params).outputs[0].token_ids) == 42
    drafts, draft_tokens, accepted = (counted(llm, n) - c for n, c in zip(names, counts))
    assert (drafts, draft_tokens, accepted) == (10, 10 * DRAFTS, 10 * DRAFTS)
    # The prefill, a step without a repetition, ten of four tokens, and those dispatched before the
    # last one was read.
    assert steps(llm) - before <= 1 + 1 + 10 + 2


def test_cached_pages_hold_accepted_tokens(kv_llm_for, prompts, expected):
    """The answer is continued from the pages that its steps filled several tokens at a time."""
    llm = kv_llm_for(**SETTINGS)
    for option in ("one token", "few tokens"):
        first = generate(llm, prompts[5], limited(option, LONGEST))
        longer = prompts[5] + list(first.outputs[0].token_ids)
        hits = llm.get_metrics()["vllm:prefix_cache_hits_total"].value
        again = generate(llm, longer, PLAIN)
        assert llm.get_metrics()["vllm:prefix_cache_hits_total"].value - hits >= len(longer) - 8
        llm.reset_prefix_cache()
        check(generate(llm, longer, PLAIN), again)


@pytest.mark.parametrize(
    "settings",
    [
        {"program_scope": "step", "scheduler": "medha"},
        {"batch_invariant": True, "scheduler": "vllm"},
    ],
    ids=lambda settings: settings["scheduler"],
)
def test_other_engines(llama, prompts, expected, settings):
    few = {"max_num_seqs": 2, "max_num_batched_tokens": 2 * (1 + DRAFTS) + 16}
    cases = [(i, option) for i in (3, 8, 13) for option in ("greedy", "few tokens", "one token")]
    arrivals = [
        Arrival(prompts[i], limited(option, LONGEST), step)
        for step, (i, option) in enumerate(cases)
    ]
    with llama.load(**SETTINGS | few | settings) as llm:
        for (index, option), output in zip(cases, drive(llm.engine, arrivals)):
            check(output, expected(index, option, LONGEST))
        assert counted(llm, "accepted_tokens") > 0


def test_nothing_is_compiled_once_the_engine_is_ready(llama, prompts, compiled):
    arrivals = [
        Arrival(prompts[i % len(prompts)], params, i) for i, params in enumerate(OPTIONS.values())
    ]
    jax.clear_caches()
    with llama.load(**SETTINGS) as llm:
        compiled.clear()
        drive(llm.engine, arrivals)
        assert preemptions(llm.engine) > 0
    assert compiled == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_speculative_tokens": 3, "method": "medusa"}, "'medusa'; it must be one of ngram"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens .* is 0; .* integer in 1..15"),
        ({"num_speculative_tokens": 3, "prompt_lookup_min": 9}, "prompt_lookup_min .* is 9"),
        ({"num_speculative_tokens": 3, "model": "x"}, "has 'model'; its keys are"),
        ({"method": "ngram"}, "has no num_speculative_tokens"),
        ("{", "which is not JSON"),
        (3, "it must be a dict"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(llama, config, message):
    with pytest.raises(ConfigError, match=message):
        llama.load(speculative_config=config)


def test_a_pipeline_is_refused(llama):
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2, set it to 1"):
        llama.load(speculative_config=NGRAM, pipeline_parallel_size=2)
