"""A draft layer that follows the model's hidden states changes no token, and keeps up with them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from draft_layers import Layer, Reference, check_moved, slots
from exhaustive import exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_engines import Preempter, bytes_of
from tiny_checkpoints import CONFIG, random_tensors, write_hf
from tiny_engines import CONTEXT, LONGEST, Arrival, TinyModel, drive, generate

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.models.drafters import eagle, eagle3
from jaxserve.models.drafters.eagle3 import Eagle3Config
from jaxserve.models.family import Params
from jaxserve.models.loading.drafters.eagle import save_layer
from jaxserve.models.loading.drafters.eagle3 import save_layer as save_layer3

DRAFTS = 3
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
    "logprobs": dataclasses.replace(FEW, logprobs=3, prompt_logprobs=1),
    "samples": dataclasses.replace(FEW, n=4),
    "penalties": dataclasses.replace(FEW, frequency_penalty=0.7, repetition_penalty=1.3),
    "grammar": dataclasses.replace(PLAIN, structured_outputs={"regex": "(ab|c){1,4} the end"}),
}


@pytest.fixture(scope="module")
def layers(llama, tmp_path_factory) -> dict[str, Layer]:
    """Random ones by method, whose drafts are seldom right. That of EAGLE-3 guesses a part of the
    vocabulary, with the tokens of FEW in it."""
    rng, directory = np.random.default_rng(6), tmp_path_factory.mktemp("layers")

    def params(specs: Params) -> Params:
        return jax.tree.map(lambda spec: rng.normal(0, 0.2, spec.shape).astype(np.float32), specs)

    config = eagle.layer_for(llama.config)
    random = params(eagle.param_specs(config, biased=True))
    save_layer(directory / "eagle", config, random)
    own = Eagle3Config(aux_layers=(0, 1), draft_vocab_size=200)
    random3 = params(eagle3.param_specs(config, own))
    others = rng.choice(np.delete(np.arange(256), [97, 98, 99]), 197, replace=False)
    guessable = np.sort([97, 98, 99, *others])
    random3["d2t"] = (guessable - np.arange(len(guessable))).astype(np.int32)
    save_layer3(directory / "eagle3", config, own, random3)
    made = {
        "eagle": (random, eagle.FEATURE_LAYER),
        "eagle3": (random3, eagle3.feature_layer(config, own)),
    }
    return {
        method: Layer(
            {
                "method": method,
                "model": str(directory / method),
                "num_speculative_tokens": DRAFTS,
            },
            config,
            *parts,
        )
        for method, parts in made.items()
    }


TREE = {"num_speculative_tokens": 8, "top_k": 3, "depth": DRAFTS}
SHAPES: dict[str, dict[str, int]] = {"chain": {}, "tree": TREE}

DRAFTERS = [
    pytest.param(("eagle", "chain"), id="eagle-chain", marks=exhaustive),
    pytest.param(("eagle3", "tree"), id="eagle3-tree"),
]


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request) -> tuple[str, str]:
    """A method and the shape of its drafts."""
    return request.param


@pytest.fixture(scope="module")
def layer(drafter, layers) -> Layer:
    return layers[drafter[0]]


@pytest.fixture(scope="module")
def drafting(drafter, kv_llm_for, llama, layer):
    pool = {"kv_cache_memory_bytes": bytes_of(llama, 54)}  # A page has room for three layers.
    common = FEW_ROWS | pool | {"preemption": "swap", "max_num_batched_tokens": 2 * 9 + 16}
    shape = layer.drafts | SHAPES[drafter[1]]
    return lambda: kv_llm_for(host=96, **common, speculative_config=shape)


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
    return dataclasses.replace(OPTIONS[option], max_tokens=max_tokens)


def check(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids
        ends = [(one.text, one.finish_reason, one.stop_reason) for one in (mine, theirs)]
        assert ends[0] == ends[1]
        for entry, same in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert entry.keys() == same.keys()
            for token in entry:
                assert entry[token].logprob == pytest.approx(same[token].logprob, abs=1e-4)


def counted(llm, name: str) -> int:
    return int(llm.get_metrics()[f"vllm:spec_decode_num_{name}_total"].value)


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
def test_any_workload(drafting, llama, expected, workload, seed, share):
    """The layer's pages go where those of its target go."""
    engine = drafting().engine
    arrivals = [
        Arrival(llama.prompts[index], limited(option, max_tokens), step, priority)
        for index, option, max_tokens, step, priority in workload
    ]
    outputs = drive(engine, arrivals, Preempter(engine, seed, evicts=share > 0, share=share))
    for (index, option, max_tokens, *_), output in zip(workload, outputs):
        check(output, expected(index, option, max_tokens))


@pytest.mark.parametrize("option", ["greedy", "few tokens"])
@pytest.mark.parametrize("share", [0.0, 0.4], ids=["running on", "swapped"])
def test_drafts_are_of_the_hidden_states_of_the_tokens_accepted(
    drafting, llama, layer, expected, option, share
):
    """With prompts of several chunks, some drafts accepted, and their own cached pages."""
    llm = drafting()
    llm.reset_prefix_cache()  # What followed a page may have been another token.
    index = max(range(12), key=lambda place: len(llama.prompts[place]))
    prompt, seen, before = llama.prompts[index], [], counted(llm, "draft_tokens")
    preempt = Preempter(llm.engine, 2, share=share)

    def look():
        seen.extend(slots(llm.engine))
        preempt()

    arrivals = [Arrival(prompt, limited(option, LONGEST), step) for step in (0, 30)]
    for output in drive(llm.engine, arrivals, look):
        check(output, expected(index, option))
    assert counted(llm, "draft_tokens") > before
    tokens = [*prompt, *output.outputs[0].token_ids]
    reference = Reference(llama, layer, tokens)
    of_drafts = option == "greedy" and not share
    assert reference.check(seen, len(prompt), of_drafts) >= LONGEST // (1 + DRAFTS)


def test_a_layer_goes_on_where_its_request_does(drafting, llama, layer):
    prompt = max(llama.prompts, key=len)
    check_moved(drafting(), llama, layer, prompt, PLAIN)


@pytest.fixture(scope="module")
def bigrams(tmp_path_factory):
    """A model whose next token depends on the newest alone, and a layer that computes the same."""
    raw = CONFIG | {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
    tensors = random_tensors(raw)
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.norm.weight"):
        tensors[name] = np.full_like(tensors[name], float("norm" in name))
    directory = tmp_path_factory.mktemp("bigrams")
    model = TinyModel.open(write_hf(directory / "model", raw, tensors))
    own = {name: np.asarray(array) for name, array in model.params["layers"][0].items()}
    del own["attn_norm"]
    size = raw["hidden_size"]
    fc = np.concatenate([np.eye(size), np.zeros((size, size))], axis=1, dtype=np.float32)
    layer = eagle.layer_for(model.config)
    save_layer(directory / "layer", layer, {"fc": fc, "layers": [own]})
    return model, str(directory / "layer")


def test_a_perfect_layer_gains_every_draft_of_every_step(bigrams):
    """Also where the model is one program, in tiles."""
    model, directory = bigrams
    whole = {"program_scope": "step", "batch_invariant": True, "scheduler": "medha"}
    drafts = {"method": "eagle", "model": directory, "num_speculative_tokens": DRAFTS}
    with model.load(speculative_config=drafts, **FEW_ROWS, **whole) as llm:
        prompt, params = model.prompts[2], dataclasses.replace(PLAIN, max_tokens=41)
        tokens = generate(llm, prompt, params).outputs[0].token_ids
        assert counted(llm, "drafts") == 40 // (1 + DRAFTS)
        assert counted(llm, "accepted_tokens") == counted(llm, "draft_tokens") == 30
        # The prefill, ten of four tokens, and those dispatched before the last one was read.
        assert llm.get_metrics()["jaxserve:steps_total"].value <= 1 + 10 + 2
    with model.load() as llm:
        assert tokens == generate(llm, prompt, params).outputs[0].token_ids


def test_a_perfect_layer_gains_the_longest_path_of_every_tree(bigrams):
    """Ten drafts are all guesses of two after each of the two best, up to the third. Towards the
    last token there is room for three of them."""
    model, directory = bigrams
    drafts = {"method": "eagle", "model": directory, "num_speculative_tokens": 10}
    drafts |= {"top_k": 2, "depth": DRAFTS}
    one = {"max_num_seqs": 1, "max_num_batched_tokens": 11 + 32}
    with model.load(speculative_config=drafts, **one) as llm:
        params = dataclasses.replace(PLAIN, max_tokens=41)
        model.check_greedy(generate(llm, model.prompts[2], params))
        assert counted(llm, "drafts") == 9 + 1
        assert counted(llm, "accepted_tokens") == 9 * DRAFTS + 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"top_k": 0}, "top_k .* is 0; with a tree of drafts .* in 1..10"),
        ({"top_k": 11}, "is 11; .* in 1..10"),
        ({"depth": 3}, "top_k .* is None"),
        ({"top_k": 2, "depth": 16}, "depth .* is 16; .* in 1..15"),
        ({"top_k": 2, "num_speculative_tokens": "auto"}, "is 'auto'; with a tree"),
        ({"top_k": 2, "num_speculative_tokens": 64}, "is 64; with a tree .* in 1..63"),
        ({"top_k": 2, "depth": 2, "num_speculative_tokens": 7}, "is 7; .* has 2 to 6 drafts"),
        ({"top_k": 2, "depth": 4, "num_speculative_tokens": 3}, "is 3; .* has 4 to 14 drafts"),
        ({"speculative_token_tree": [2]}, "it is a key of 'medusa' only"),
    ],
    ids=str,
)
def test_what_is_no_tree_is_refused(llama, layers, keys, message):
    with pytest.raises(ConfigError, match=message):
        llama.load(speculative_config=layers["eagle"].drafts | keys)
