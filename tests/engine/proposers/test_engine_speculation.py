"""Speculative decoding changes no token: right and wrong drafts, preemptions, swaps, arrivals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from exhaustive import combination, exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_engines import Preempter, bytes_of
from tiny_checkpoints import CONFIG, hf_shapes, random_tensors, write_hf
from tiny_engines import CONTEXT, LONGEST, MAX_SEQS, Arrival, drive, generate, preemptions

from jaxserve.core.errors import ConfigError, ModelError, WeightsError
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.speculative import AUTO_LENGTHS
from jaxserve.llm import LLM
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.loading.drafters.medusa import save_heads
from jaxserve.training.dense import hidden_states

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
FEW_ROWS = {"max_num_seqs": 2, "max_num_batched_tokens": 2 * (1 + DRAFTS) + 16}
POOLS = {
    "recomputed": {},
    "swapped": {"preemption": "swap", "host": 64},
    "uncached": {"preemption": "swap", "host": 64, "enable_prefix_caching": False},
}

LETTERS = tuple(ord(letter) for letter in "abc")


def spelled(text: str) -> list[int]:
    """The tokens of ASCII text, a byte each."""
    return [byte - 33 for byte in text.encode()]


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
    "forced": dataclasses.replace(
        PLAIN,
        temperature=1.0,
        seed=2,
        ignore_eos=False,
        logprobs=1,
        structured_outputs={"regex": '[ab]{0,3}"size of it": [0-9]{1,2}, "name": "[ab]*"'},
    ),
    "budget": dataclasses.replace(
        FEW,
        thinking_token_budget=5,
        allowed_token_ids=None,
        logit_bias=dict.fromkeys(LETTERS, 12.0),
        structured_outputs={"regex": "the (answer|end)[abc]{4,9}"},
    ),
    "budget only": dataclasses.replace(
        FEW, thinking_token_budget=9, allowed_token_ids=(*LETTERS, *spelled("</think>"))
    ),
}


@pytest.fixture(scope="module")
def prompts(llama):
    """Random prompts, ones that repeat themselves, and one where reasoning has begun."""
    rng = np.random.RandomState(5)
    copies = [rng.randint(3, 256, size).tolist() * times for size, times in ((3, 9), (5, 6))]
    return [*llama.prompts, *copies, [*LETTERS, *spelled("<think>")]]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """A smaller random model, whose drafts are seldom right."""
    raw = CONFIG | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    raw |= {"hidden_size": 32, "max_position_embeddings": CONTEXT}
    tensors = random_tensors(raw)
    assert set(tensors) == set(hf_shapes(raw))
    return str(write_hf(tmp_path_factory.mktemp("drafter") / "model", raw, tensors))


@pytest.fixture(scope="module")
def heads(tmp_path_factory, llama):
    """Random heads, whose drafts are seldom right."""
    config = MedusaConfig(DRAFTS, 1, llama.config.hidden_size, llama.config.vocab_size)
    blocks = np.random.default_rng(6).normal(0, 0.2, (DRAFTS, *[config.hidden_size] * 2))
    directory = tmp_path_factory.mktemp("heads")
    save_heads(directory, config, blocks.astype(np.float32))
    return str(directory)


@pytest.fixture(scope="module")
def guessing(kv_llm_for, heads):
    drafts = {"method": "medusa", "model": heads, "num_speculative_tokens": DRAFTS}
    settings = FEW_ROWS | {"speculative_config": drafts, "preemption": "swap"}
    return lambda: kv_llm_for(host=64, **settings)


@pytest.fixture(scope="module")
def drafts_for_itself(llama):
    """Settings of an engine whose model drafts for itself, and that moves pages to the host."""
    return FEW_ROWS | {
        "speculative_config": {"model": str(llama.path), "num_speculative_tokens": DRAFTS},
        "kv_cache_memory_bytes": bytes_of(llama, 2 * 36),  # A page holds both models' layers.
        "preemption": "swap",
    }


@pytest.fixture(scope="module")
def perfect(kv_llm_for, drafts_for_itself):
    return lambda: kv_llm_for(host=128, **drafts_for_itself)


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
        assert counted(llm, "accepted_tokens") > before


requests = st.tuples(
    st.integers(0, 14),
    st.sampled_from(list(OPTIONS)),
    st.integers(1, LONGEST),
    st.integers(0, 20),
    st.integers(-1, 1),
)


@pytest.mark.parametrize("pool", POOLS)
@settings(max_examples=4, deadline=None)
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
    by_position = llm.get_metrics()["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert by_position.label == "position"
    assert list(by_position.value) == [str(place) for place in range(DRAFTS)]
    assert sum(by_position.value.values()) == counted(llm, "accepted_tokens")
    # The prefill, a step without a repetition, ten of four tokens, and those dispatched before the
    # last one was read.
    assert steps(llm) - before <= 1 + 1 + 10 + 2


def test_tokens_that_a_grammar_forces_are_drafts_that_are_right(kv_llm_for, prompts):
    """The grammar leaves no choice after the first token, and nothing in the prompt repeats."""
    llm = kv_llm_for(**SETTINGS)
    text = "bcdefghijklmnopqrstuvwxyz"
    form = {"regex": f"[a01]{text}"}
    params = dataclasses.replace(PLAIN, max_tokens=40, structured_outputs=form)
    before, accepted = steps(llm), counted(llm, "accepted_tokens")
    assert generate(llm, prompts[2], params).outputs[0].text[1:] == text
    # The prefill, a step before the host knows what it led to, six of four tokens, and one that was
    # dispatched before the last one was read.
    assert steps(llm) - before <= 1 + 1 + 6 + 2
    assert counted(llm, "accepted_tokens") - accepted == 6 * DRAFTS


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


@settings(max_examples=4, deadline=None)
@given(
    workload=st.lists(requests, min_size=1, max_size=8),
    seed=st.integers(0, 999),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_workload_with_a_draft_model(perfect, prompts, expected, workload, seed, share):
    """The draft model's pages go where those of its target go."""
    engine = perfect().engine
    arrivals = [
        Arrival(prompts[index], limited(option, max_tokens), step, priority)
        for index, option, max_tokens, step, priority in workload
    ]
    outputs = drive(engine, arrivals, Preempter(engine, seed, evicts=share > 0, share=share))
    for (index, option, max_tokens, *_), output in zip(workload, outputs):
        check(output, expected(index, option, max_tokens))


@exhaustive
@settings(max_examples=4, deadline=None)
@given(
    workload=st.lists(requests, min_size=1, max_size=8),
    seed=st.integers(0, 999),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_workload_with_heads(guessing, prompts, expected, workload, seed, share):
    """A sequence that comes back to another slot has the hidden state of the one before."""
    engine = guessing().engine
    arrivals = [
        Arrival(prompts[index], limited(option, max_tokens), step, priority)
        for index, option, max_tokens, step, priority in workload
    ]
    outputs = drive(engine, arrivals, Preempter(engine, seed, evicts=share > 0, share=share))
    for (index, option, max_tokens, *_), output in zip(workload, outputs):
        check(output, expected(index, option, max_tokens))


@pytest.mark.parametrize("option", ["greedy", "few tokens", "one token"])
def test_heads_guess_from_what_the_newest_token_was_sampled_from(guessing, llama, prompts, option):
    llm = guessing()
    counts = [counted(llm, name) for name in ("draft_tokens", "accepted_tokens")]
    seen = []

    def look():
        state = llm.engine._runner._state.speculation
        seen.extend(zip(*map(np.asarray, (state.lengths, state.history, state.hidden))))

    (output,) = drive(llm.engine, [Arrival(prompts[5], limited(option, LONGEST))], look)
    drafts, accepted = (
        counted(llm, n) - c for n, c in zip(("draft_tokens", "accepted_tokens"), counts)
    )
    assert drafts > 0 and (accepted == drafts) == (option == "one token")
    tokens = np.array([*prompts[5], *output.outputs[0].token_ids])
    hidden = np.asarray(hidden_states(llama.family, llama.config, llama.params, tokens[None])[0])
    checked = set()
    for length, history, own in seen:  # A step in flight may go beyond the last token.
        known = len(prompts[5]) < length <= len(tokens)
        if known and np.array_equal(history[:length], tokens[:length]):
            assert own == pytest.approx(hidden[length - 2], abs=1e-4)
            checked.add(int(length))
    assert len(checked) >= LONGEST // (1 + DRAFTS)


@pytest.mark.parametrize("share", [0.0, 0.3], ids=["running on", "swapped"])
@pytest.mark.parametrize("option", ["greedy", "sampled", "likely token", "eos", "stop inside"])
def test_every_draft_of_the_model_itself_is_right(perfect, prompts, expected, option, share):
    """Prompts of one chunk and of several, the second time from cached pages. A preemption may come
    before the last draft of a step has the draft model's KV."""
    llm = perfect()
    names, params = ("drafts", "draft_tokens", "accepted_tokens"), limited(option, LONGEST)
    counts = [counted(llm, name) for name in names]
    arrivals = [Arrival(prompts[i], params, i) for i in (0, 3, 8, 11)] * 2
    outputs = drive(llm.engine, arrivals, Preempter(llm.engine, 1, share=share))
    for arrival, output in zip(arrivals, outputs):
        check(output, expected(prompts.index(arrival.prompt), option, LONGEST))
    drafts, draft_tokens, accepted = (counted(llm, n) - c for n, c in zip(names, counts))
    assert drafts > 0
    assert draft_tokens >= accepted >= (0.8 if share else 1.0) * draft_tokens


@pytest.mark.parametrize("level", [1, 2])
def test_a_draft_model_sleeps_and_wakes_up_with_its_target(
    perfect, llama, prompts, expected, level
):
    llm = perfect()
    state = llm.engine._runner._state
    held = jax.tree.leaves(state.draft_params)
    llm.sleep(level)
    assert held and all(array.is_deleted() for array in held)
    if level == 1:
        llm.wake_up()
    else:  # New weights wake it up too.
        llm.update_weights(llama.params)
        llm.wake_up(["kv_cache"])
    counts = [counted(llm, name) for name in ("draft_tokens", "accepted_tokens")]
    check(generate(llm, prompts[3], PLAIN), expected(3, "greedy", LONGEST))
    drafts, accepted = (counted(llm, name) for name in ("draft_tokens", "accepted_tokens"))
    assert accepted - counts[1] == drafts - counts[0] > 0


@pytest.mark.parametrize(
    "settings",
    [
        combination({"program_scope": "step", "scheduler": "medha"}),
        combination({"batch_invariant": True, "scheduler": "vllm"}),
    ],
    ids=lambda settings: settings["scheduler"],
)
def test_other_engines(llama, drafter, prompts, expected, settings):
    """A small model drafts where the model is one program; the first layer drafts in tiles, as many
    tokens as pay."""
    drafts: dict[str, Any] = {"model": drafter, "num_speculative_tokens": DRAFTS}
    few = FEW_ROWS
    if "batch_invariant" in settings:
        drafts = {"method": "layer_skip", "num_layers": 1, "num_speculative_tokens": "auto"}
        few = FEW_ROWS | {"max_num_batched_tokens": 2 * (1 + AUTO_LENGTHS[-1]) + 16}
    few = few | {"speculative_config": drafts}
    cases = [(i, option) for i in (3, 8, 13) for option in ("greedy", "few tokens", "one token")]
    arrivals = [
        Arrival(prompts[i], limited(option, LONGEST), step)
        for step, (i, option) in enumerate(cases)
    ]
    with llama.load(**SETTINGS | few | settings) as llm:
        for (index, option), output in zip(cases, drive(llm.engine, arrivals)):
            check(output, expected(index, option, LONGEST))
        assert counted(llm, "accepted_tokens") > 0


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_other_rules_of_acceptance(llama, prompts, expected, acceptance):
    """All layers draft, so that p equals q; greedy answers are those without drafts."""
    drafts = {"method": "layer_skip", "num_layers": 2, "num_speculative_tokens": DRAFTS}
    drafts |= {"acceptance": acceptance}
    if acceptance == "typical":
        drafts |= {"posterior_threshold": 0.0, "posterior_alpha": 0.0}
    sampled = dataclasses.replace(OPTIONS["sampled"], logprobs=1)
    with llama.load(**SETTINGS | FEW_ROWS | {"speculative_config": drafts}) as llm:
        output = generate(llm, prompts[8], sampled).outputs[0]
        assert counted(llm, "accepted_tokens") == counted(llm, "draft_tokens") > 0
        # No draft is before these tokens: those of the request before in the same slot are old.
        for index in range(8):
            check(
                generate(llm, prompts[index], limited("few tokens", 1)),
                expected(index, "few tokens", 1),
            )
        for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
            assert token_id in entry
        for option in ("greedy", "grammar", "forced"):
            params = dataclasses.replace(limited(option, LONGEST), temperature=0.0, logprobs=None)
            if option != "forced":
                check(generate(llm, prompts[8], params), expected(8, option, LONGEST))
            else:
                assert generate(llm, prompts[8], params).outputs[0].text.lstrip("ab")[0] == '"'


def test_nothing_is_compiled_once_the_engine_is_ready(llama, prompts, compiled, drafts_for_itself):
    arrivals = [
        Arrival(prompts[i % len(prompts)], params, i) for i, params in enumerate(OPTIONS.values())
    ]
    jax.clear_caches()
    with llama.load(host_kv_bytes=bytes_of(llama, 128), **drafts_for_itself) as llm:
        compiled.clear()
        drive(llm.engine, arrivals)
        assert preemptions(llm.engine) > 0
    assert compiled == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_speculative_tokens": 3, "method": "mtq"}, "'mtq'; it must be one of ngram"),
        (
            {"num_speculative_tokens": 3, "method": "medusa"},
            "no model; give the directory of heads",
        ),
        ({"num_speculative_tokens": 0}, 'is 0; it must be an integer in 1..15, or "auto"'),
        ({"num_speculative_tokens": 3, "prompt_lookup_min": 9}, "prompt_lookup_min .* is 9"),
        ({"num_speculative_tokens": 3, "models": "x"}, "has 'models'; its keys are"),
        ({"num_speculative_tokens": 3, "method": "draft_model"}, "and no model; give the path"),
        ({"num_speculative_tokens": 3, "method": "layer_skip"}, "num_layers .* is None"),
        ({"num_speculative_tokens": 3, "num_layers": 1}, "'ngram'; it is a key of 'layer_skip'"),
        (
            {"num_speculative_tokens": 3, "method": "layer_skip", "num_layers": 3},
            "num_layers of speculative_config is 3, but the model has 2 layers",
        ),
        ({"method": "ngram"}, "has no num_speculative_tokens"),
        ({"num_speculative_tokens": 3, "acceptance": "greedy"}, "'greedy'; it must be exact"),
        (
            {"num_speculative_tokens": 3, "method": "jacobi", "acceptance": "rejection"},
            "there is none with the method 'jacobi'. Use ngram or draft_model",
        ),
        (
            {"method": "medusa", "model": "x", "speculative_token_tree": "[2]"}
            | {"acceptance": "typical"},
            "the drafts are a tree",
        ),
        (
            {"method": "medusa", "model": "x", "speculative_token_tree": [[0], [2]]}
            | {"acceptance": "rejection"},
            r"has the path \[2\] and not \[1\], the better guess",
        ),
        ({"num_speculative_tokens": 3, "posterior_alpha": 2}, "posterior_alpha .* in 0..1"),
        (
            {"num_speculative_tokens": 3, "posterior_alpha": 0.5, "acceptance": "rejection"},
            "posterior_alpha .* is 0.5, but acceptance is 'rejection'; set acceptance to",
        ),
        ("{", "which is not JSON"),
        (3, "it must be a dict"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(llama, config, message):
    with pytest.raises(ConfigError, match=message):
        llama.load(speculative_config=config)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": 250}, ConfigError, "250 tokens, and the model that it drafts for of 256"),
        ({"max_position_embeddings": 64}, ConfigError, "context .* is 64 tokens; set max_model"),
        ({"num_hidden_layers": 2}, WeightsError, "the model of speculative_config: "),
        (None, ModelError, "the model of speculative_config: there is no file or directory"),
    ],
    ids=["other vocabulary", "shorter context", "other weights", "missing files"],
)
def test_bad_draft_models_are_refused(llama, drafter, tmp_path, changes, error, message):
    path = tmp_path / "model"
    if changes is not None:
        shutil.copytree(drafter, path)
        raw = json.loads((path / "config.json").read_text()) | changes
        if error is ConfigError:
            write_hf(path, raw, random_tensors(raw))
        (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(error, match=message):
        llama.load(speculative_config={"model": str(path), "num_speculative_tokens": 3})


def test_layers_that_draft_are_refused_in_a_pipeline(llama):
    config = {"method": "layer_skip", "num_layers": 1, "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2, and no stage has all"):
        llama.load(speculative_config=config, pipeline_parallel_size=2)
