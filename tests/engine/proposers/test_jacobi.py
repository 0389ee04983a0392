"""Drafts of the model's own samples change no token, and take as few steps as they should."""

from __future__ import annotations

import dataclasses

import pytest
from exhaustive import combination
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_engines import Preempter, token_ids
from tiny_engines import LONGEST, Arrival, drive, generate

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.speculative import SpeculativeConfig
from jaxserve.llm import LLM

DRAFTS = 3
JACOBI = {"method": "jacobi", "num_speculative_tokens": DRAFTS}
LOOKAHEAD = {"method": "lookahead", "num_speculative_tokens": DRAFTS, "max_ngram_size": 3}
FEW_ROWS = {"max_num_seqs": 2, "max_num_batched_tokens": 2 * (1 + DRAFTS) + 16}
PLAIN = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
FEW = dataclasses.replace(
    PLAIN, temperature=1.0, seed=3, allowed_token_ids=tuple(ord(letter) for letter in "abc")
)
"""Random tokens of which many are guessed right, and many wrong."""
OPTIONS = {
    "greedy": PLAIN,
    "sampled": dataclasses.replace(PLAIN, temperature=0.8, top_p=0.9, seed=5),
    "few tokens": FEW,
    "eos": dataclasses.replace(FEW, allowed_token_ids=(97, 98, 2), ignore_eos=False),
    "stop string": dataclasses.replace(FEW, stop=("abc", "bb")),
    "samples": dataclasses.replace(FEW, n=4),
    "penalties": dataclasses.replace(FEW, frequency_penalty=0.7, repetition_penalty=1.3),
    "grammar": dataclasses.replace(PLAIN, structured_outputs={"regex": "(ab|c){1,4} the end"}),
}


def limited(option: str, max_tokens: int) -> SamplingParams:
    return dataclasses.replace(OPTIONS[option], max_tokens=max_tokens)


def counted(llm: LLM, name: str) -> int:
    return int(llm.get_metrics()[f"vllm:spec_decode_num_{name}_total"].value)


@pytest.mark.parametrize(
    "config", [combination(JACOBI), LOOKAHEAD], ids=lambda config: config["method"]
)
@settings(max_examples=4, deadline=None)
@given(
    workload=st.lists(
        st.tuples(
            st.integers(0, 11),
            st.sampled_from(list(OPTIONS)),
            st.integers(1, LONGEST),
            st.integers(0, 20),
            st.integers(-1, 1),
        ),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 999),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_workload(kv_llm_for, llama, alone, config, workload, seed, share):
    """A sequence that comes back to another slot finds the guesses of the one before gone."""
    engine = kv_llm_for(host=64, speculative_config=config, preemption="swap", **FEW_ROWS).engine
    arrivals = [
        Arrival(llama.prompts[index], limited(option, max_tokens), step, priority)
        for index, option, max_tokens, step, priority in workload
    ]
    outputs = drive(engine, arrivals, Preempter(engine, seed, evicts=share > 0, share=share))
    for arrival, output in zip(arrivals, outputs):
        assert token_ids(output) == alone.tokens(arrival.prompt, arrival.params)


def test_guesses_that_no_draft_changes_are_right(kv_llm_for, llama):
    """Of one token, what is sampled after wrong drafts is right: one step in two gains all."""
    llm = kv_llm_for(host=64, speculative_config=JACOBI, preemption="swap", **FEW_ROWS)
    before = counted(llm, "accepted_tokens")
    params = dataclasses.replace(PLAIN, allowed_token_ids=(97,), max_tokens=41)
    assert generate(llm, llama.prompts[2], params).outputs[0].token_ids == (97,) * 41
    assert counted(llm, "accepted_tokens") - before >= 8 * DRAFTS


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (JACOBI | {"num_speculative_tokens": 16}, "is 16; it must be an integer in 1..15"),
        (JACOBI | {"max_ngram_size": 3}, "the method is 'jacobi'; it is a key of 'lookahead' only"),
        (LOOKAHEAD | {"window_size": 3}, "has 'window_size'; its keys are .*max_ngram_size"),
        (LOOKAHEAD | {"max_ngram_size": 1}, r"is 1; it must be an integer in 2\.\.4"),
        (LOOKAHEAD | {"max_ngram_size": 5}, r"is 5; it must be an integer in 2\.\.4"),
        (LOOKAHEAD | {"num_speculative_tokens": "auto", "max_ngram_size": 9}, r"in 2\.\.8"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.of(config)


def test_an_ngram_is_no_longer_than_its_drafts():
    for num_drafts, size in ((1, 2), (2, 3), (3, 4), (9, 4), ("auto", 4)):
        config = {"method": "lookahead", "num_speculative_tokens": num_drafts}
        assert SpeculativeConfig.of(config).max_ngram_size == size
