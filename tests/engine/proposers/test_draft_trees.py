"""Trees of drafts change no token, and every path that is accepted is where a chain's would be."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from exhaustive import combination, exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_engines import Preempter, bytes_of, first_path
from tiny_engines import (
    LONGEST,
    MIN_MARGIN,
    QUANTIZED_MARGIN,
    Arrival,
    TinyModel,
    drive,
    generate,
)

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.loading.drafters.medusa import save_heads

HEADS = 3
LETTERS = tuple(ord(letter) for letter in "abc")
TREE = str([*itertools.product(range(3)), *itertools.product(range(3), repeat=2), (0, 0, 0)])
"""Every two of three letters, so that two drafts are always right, and one more."""
PLAIN = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
FEW = dataclasses.replace(PLAIN, temperature=1.0, seed=3, allowed_token_ids=LETTERS)
OPTIONS = {
    "greedy": PLAIN,
    "sampled": dataclasses.replace(PLAIN, temperature=0.8, top_p=0.9, seed=5),
    "few tokens": FEW,
    "greedy letters": dataclasses.replace(PLAIN, allowed_token_ids=LETTERS),
    "eos": dataclasses.replace(FEW, allowed_token_ids=(97, 98, 2), ignore_eos=False),
    "stop token later": dataclasses.replace(FEW, stop_token_ids=LETTERS[:1], min_tokens=6),
    "stop string": dataclasses.replace(FEW, stop=("abc", "bb")),
    "logprobs": dataclasses.replace(FEW, logprobs=3, prompt_logprobs=1),
    "samples": dataclasses.replace(FEW, n=4),
    "penalties": dataclasses.replace(FEW, frequency_penalty=0.7, repetition_penalty=1.3),
    "bad words": dataclasses.replace(FEW, bad_words=("ab", "ca")),
    "grammar": dataclasses.replace(PLAIN, structured_outputs={"regex": "(ab|c){1,4} the end"}),
}
PAGES = 54


@pytest.fixture(scope="module")
def heads(llama, tmp_path_factory) -> str:
    """Random heads, whose drafts are seldom right but where few tokens are allowed."""
    return written(tmp_path_factory.mktemp("heads"), llama.config)


def written(directory: Any, model: Any) -> str:
    config = MedusaConfig(HEADS, 1, model.hidden_size, model.vocab_size)
    blocks = np.random.default_rng(6).normal(0, 0.2, (HEADS, *[config.hidden_size] * 2))
    save_heads(directory, config, blocks.astype(np.float32))
    return str(directory)


def drafted(heads: str, **keys: Any) -> dict[str, Any]:
    """Settings of an engine of two rows with these drafts."""
    drafts = {"method": "medusa", "model": heads} | keys
    return {"max_num_seqs": 2, "max_num_batched_tokens": 2 * 14 + 16, "speculative_config": drafts}


@pytest.fixture(scope="module")
def trees(kv_llm_for, llama, heads):
    """An LLM with trees of drafts that moves pages to the host."""
    pool = {"kv_cache_memory_bytes": bytes_of(llama, PAGES), "preemption": "swap"}

    def get():
        return kv_llm_for(host=96, **drafted(heads, speculative_token_tree=TREE), **pool)

    return get


@pytest.fixture(scope="module")
def expected(llama):
    """What a request answers without speculation, alone."""
    known: dict[Any, Any] = {}
    with llama.load(debug_kv=True, enable_prefix_caching=False) as llm:

        def get(index: int, option: str, max_tokens: int = LONGEST):
            key = index, option, max_tokens
            if key not in known:
                known[key] = generate(llm, llama.prompts[index], limited(option, max_tokens))
            return known[key]

        yield get


def limited(option: str, max_tokens: int) -> SamplingParams:
    params = OPTIONS[option]
    least = min(params.min_tokens, max_tokens)
    return dataclasses.replace(params, max_tokens=max_tokens, min_tokens=least)


def check(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids
        ends = [(one.text, one.finish_reason, one.stop_reason) for one in (mine, theirs)]
        assert ends[0] == ends[1]
        for entry, same in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert entry.keys() == same.keys()
            for token in entry:
                assert entry[token].logprob == pytest.approx(same[token].logprob, abs=1e-4)


def counted(llm: Any) -> np.ndarray:
    """Drafts, their tokens, and those accepted."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    metrics = llm.get_metrics()
    return np.array([metrics[f"vllm:spec_decode_num_{name}_total"].value for name in names])


@pytest.mark.parametrize("option", OPTIONS)
def test_answers_are_those_without_drafts(trees, llama, expected, option):
    llm = trees()
    before = counted(llm)
    arrivals = [
        Arrival(prompt, limited(option, LONGEST), 2 * i) for i, prompt in enumerate(llama.prompts)
    ]
    for index, output in enumerate(drive(llm.engine, arrivals)):
        check(output, expected(index, option))
    drafts, _, accepted = counted(llm) - before
    if option in ("few tokens", "greedy letters", "logprobs", "samples", "penalties"):
        assert accepted >= 1.5 * drafts > 0


@settings(max_examples=5, deadline=None)
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
def test_any_workload(trees, llama, expected, workload, seed, share):
    """Sequences lose their pages after any step, those that a tree was just compacted in too."""
    engine = trees().engine
    arrivals = [
        Arrival(llama.prompts[index], limited(option, max_tokens), step, priority)
        for index, option, max_tokens, step, priority in workload
    ]
    outputs = drive(engine, arrivals, Preempter(engine, seed, evicts=share > 0, share=share))
    for (index, option, max_tokens, *_), output in zip(workload, outputs):
        check(output, expected(index, option, max_tokens))


def test_a_right_path_is_kept_to_its_end_in_every_step(trees, llama):
    """Only one token is allowed, so the others of a tree are no drafts. Towards the last token a
    step has room for fewer."""
    llm = trees()
    before = counted(llm)
    params = dataclasses.replace(PLAIN, allowed_token_ids=LETTERS[:1], max_tokens=42)
    output = generate(llm, llama.prompts[2], params).outputs[0]
    assert output.token_ids == LETTERS[:1] * 42
    assert (counted(llm) - before).tolist() == [7 + 3 + 2, 7 * 3 + 3 * 2 + 2, 7 * 3 + 3 * 2 + 2]
    by_position = llm.get_metrics()["vllm:spec_decode_num_accepted_tokens_per_pos_total"].value
    assert sum(by_position.values()) == counted(llm)[2]


@pytest.mark.parametrize("option", ["few tokens", "greedy letters", "greedy"])
def test_a_tree_keeps_at_least_its_best_guesses(trees, llama, option):
    """Those after one another, which the heads would have drafted without a tree."""
    llm, seen, prompt = trees(), [], llama.prompts[5]

    def look():
        state = llm.engine._runner._state.speculation
        seen.append([*map(np.asarray, (state.lengths, state.drafts, state.parents))])

    (output,) = drive(llm.engine, [Arrival(prompt, limited(option, LONGEST))], look)
    tokens, kept = [*prompt, *output.outputs[0].token_ids], [0, 0]
    for (before, *_), (lengths, drafts, parents) in itertools.pairwise(seen):
        for slot in np.flatnonzero((lengths > before) & (before > len(prompt))):
            following = tokens[before[slot] :]
            alone = first_path(drafts[slot], parents[slot])
            wrong = [mine != theirs for mine, theirs in zip(alone, following)]
            kept[0] += wrong.index(True) if True in wrong else len(wrong)
            kept[1] += min(lengths[slot] - before[slot] - 1, len(following))
    assert kept[1] >= kept[0]
    if option != "greedy":  # Two are always right.
        assert kept[1] > kept[0] and kept[1] >= LONGEST // 2


def test_cached_pages_hold_the_tokens_that_were_accepted(trees, llama):
    """The answer is continued from pages of tokens of which most were not next to each other."""
    llm = trees()
    prompt = llama.prompts[5]
    first = generate(llm, prompt, FEW).outputs[0]
    longer = [*prompt, *first.token_ids]
    params = dataclasses.replace(PLAIN, logprobs=3)
    hits = llm.get_metrics()["vllm:prefix_cache_hits_total"].value
    again = generate(llm, longer, params)
    assert llm.get_metrics()["vllm:prefix_cache_hits_total"].value - hits >= len(longer) - 8
    llm.reset_prefix_cache()
    check(generate(llm, longer, params), again)


@pytest.mark.parametrize("name", [combination("qwen2"), combination("deepseek_v3")])
def test_other_pages(tmp_path, name):
    """Quantized ones of a layer with a window beside one without, and latents."""
    model = TinyModel.write_member(tmp_path, name)
    model, margin = (
        (model.with_kv("int8"), QUANTIZED_MARGIN) if name == "qwen2" else (model, MIN_MARGIN)
    )
    allowed = [40, 41, 42]
    params = dataclasses.replace(PLAIN, allowed_token_ids=tuple(allowed))
    arrivals = [Arrival(model.prompts[index], params, index) for index in (3, 8, 11)]
    settings = drafted(written(tmp_path / "heads", model.config), speculative_token_tree=[3, 3])
    with model.load(debug_kv=True, program_scope="step", **settings) as llm:
        outputs = drive(llm.engine, arrivals, Preempter(llm.engine, 1, share=0.1))
        drafts, _, accepted = counted(llm)
    assert accepted > 1.4 * drafts
    for output in outputs:
        (completion,) = output.outputs
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        logits = model.logits(tokens)[len(output.prompt_token_ids) - 1 : -1]
        chosen = logits[np.arange(LONGEST), list(completion.token_ids)]
        assert (logits[:, allowed].max(axis=1) - chosen < margin).all()


def test_nothing_is_compiled_once_the_engine_is_ready(trees, llama, compiled):
    llm = trees()
    arrivals = [
        Arrival(llama.prompts[index % 12], params, index)
        for index, params in enumerate(OPTIONS.values())
    ]
    jax.clear_caches()
    compiled.clear()
    drive(llm.engine, arrivals)
    assert compiled == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"speculative_token_tree": []}, r"is \[\]; give the paths of its drafts"),
        ({"speculative_token_tree": "[(0,"}, "which is no list"),
        ({"speculative_token_tree": [[0], 1]}, "give the paths of its drafts"),
        ({"speculative_token_tree": [[0], ["a"]]}, "give the paths of its drafts"),
        ({"speculative_token_tree": [2, 0]}, "give the paths of its drafts"),
        ({"speculative_token_tree": [[0], []]}, r"has the path \[\], which is no draft"),
        ({"speculative_token_tree": [[0], [1, 0]]}, r"path \[1, 0\] and not \[1\]"),
        ({"speculative_token_tree": [[0], [0]]}, r"path \[0\] twice"),
        ({"speculative_token_tree": [[99]]}, "a guess of rank 99"),
        ({"speculative_token_tree": [4, 4, 4]}, "more than 63 drafts"),
        ({"speculative_token_tree": [10**12]}, "more than 63 drafts"),
        ({"speculative_token_tree": [1, 1, 1, 1]}, "paths of 4 drafts, but there are 3 heads"),
        (
            {"speculative_token_tree": [2, 1], "num_speculative_tokens": 3},
            "is 3, but speculative_token_tree has 4 drafts; set it to 4",
        ),
        (
            {"speculative_token_tree": [2, 1], "num_speculative_tokens": "auto"},
            "is 'auto', but speculative_token_tree has 4 drafts",
        ),
        ({}, "has no num_speculative_tokens"),
    ],
    ids=str,
)
def test_what_is_no_tree_for_the_heads_is_refused(llama, heads, keys, message):
    with pytest.raises(ConfigError, match=message):
        llama.load(**drafted(heads, **keys))


def test_other_methods_have_no_tree(llama):
    keys = {"num_speculative_tokens": 2, "speculative_token_tree": [2]}
    with pytest.raises(ConfigError, match="it is a key of 'medusa' only"):
        llama.load(speculative_config=keys)


def test_what_would_cut_a_tree_is_refused(llama, heads):
    trees = drafted(heads, speculative_token_tree=[2])
    with pytest.raises(ConfigError, match="trees of drafts, but context_parallel_size is"):
        llama.load(**trees, context_parallel_size=2)
    with pytest.raises(ConfigError, match="'pallas', but no kernel attends along the paths"):
        llama.load(**trees, batch_invariant=True, attention_backend="pallas")


@exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_tiles_log_probabilities_are_bit_for_bit_those_without_drafts(llama, heads, dtype):
    """A tree of 14 tokens is in two tiles or more."""
    settings = {"dtype": dtype, "batch_invariant": True, "max_num_seqs": 2}
    names = ("few tokens", "greedy letters", "logprobs", "penalties")
    params = [dataclasses.replace(OPTIONS[name], logprobs=3) for name in names]
    arrivals = [Arrival(llama.prompts[i], own, 2 * i) for i, own in enumerate(params)]
    with (
        llama.load(**settings) as plain,
        llama.load(**settings | drafted(heads, speculative_token_tree=TREE)) as llm,
    ):
        found = drive(llm.engine, arrivals)
        drafts, _, accepted = counted(llm)
        assert accepted > drafts
        for arrival, output in zip(arrivals, found):
            alone = generate(plain, arrival.prompt, arrival.params).outputs[0]
            assert output.outputs[0].token_ids == alone.token_ids
            assert output.outputs[0].logprobs == alone.logprobs


def test_a_tree_needs_room_in_a_step(llama, heads):
    settings = drafted(heads, speculative_token_tree=[3, 3])
    with pytest.raises(ConfigError, match="with 12 drafts each"):
        llama.load(**settings | {"max_num_batched_tokens": 32})


def test_no_room_for_drafts_is_no_nan(trees, llama, caplog):
    """A step planned before the host knows that the one before it accepted drafts up to the last
    token but one finds no room for its own."""
    for count in range(2, 12):
        generate(trees(), llama.prompts[0], dataclasses.replace(FEW, max_tokens=count))
    assert not [record for record in caplog.records if "NaN" in record.getMessage()]


@exhaustive
@pytest.mark.parametrize(
    "keys",
    [
        {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0), (1,)]"},
        {"num_speculative_tokens": HEADS},
    ],
    ids=["tree", "chain"],
)
def test_rejection_keeps_what_was_drawn_from_the_same_distribution(llama, heads, expected, keys):
    """At a high temperature the heads and the model are almost equally unsure among three tokens:
    most first drafts are accepted, and by chance a third. Greedy answers are as ever."""
    unsure = dataclasses.replace(FEW, temperature=2.0)
    with llama.load(**drafted(heads, acceptance="rejection", **keys)) as llm:
        before = counted(llm)
        output = generate(llm, llama.prompts[8], unsure).outputs[0]
        drafts, _, accepted = counted(llm) - before
        assert set(output.token_ids) == set(LETTERS)
        assert accepted > 1.5 * drafts > 0  # By chance 1/3 + 1/9 + 1/27.
        for option in ("greedy", "greedy letters", "grammar"):
            check(generate(llm, llama.prompts[8], limited(option, LONGEST)), expected(8, option))
