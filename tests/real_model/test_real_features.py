"""SmolLM2 on one device through every scheduler, tier, kind of request and packed weight."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from beam_reference import check_beams, dense_search
from exhaustive import combination, combinations_but, exhaustive
from golden_prompts import (
    DECIDED,
    check_golden,
    check_tokens,
    golden_prompts,
    logits_before,
    shortfalls,
)
from kv_engines import count, evict_all
from real_engines import GREEDY, MESH_PROMPTS, load_alone, page_bytes
from tiny_engines import QUANTIZED_MARGIN, Arrival, drive, generate

from jaxserve.core.errors import MemoryPlanError
from jaxserve.core.requests.sampling_params import SamplingParams, sequence_seed
from jaxserve.engine.beam_search import BeamSearchParams
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.loading.drafters.medusa import save_heads
from jaxserve.offline import run_batch
from jaxserve.offline.run import BatchRun
from jaxserve.scheduler.policies import POLICIES

WHOLE = SamplingParams(temperature=0, max_tokens=48)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=100, seed=5, max_tokens=12)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}


pytestmark = pytest.mark.real_model


def tokens(output):
    return [completion.token_ids for completion in output.outputs]


# Greedy tokens, whatever the engine does on its way


def test_every_golden_prompt(llm):
    golden = golden_prompts()
    assert len(golden) >= 20
    prompts = [entry.prompt_token_ids for entry in golden]
    check_golden(golden, llm.generate(prompts, WHOLE, use_tqdm=False))


@pytest.mark.parametrize("scheduler", combinations_but(POLICIES, "static", "vllm", "medha"))
def test_every_scheduler(smollm2_path, scheduler):
    golden = golden_prompts(*MESH_PROMPTS)
    with load_alone(smollm2_path, scheduler=scheduler) as llm:
        arrivals = [
            Arrival(entry.prompt_token_ids, GREEDY, step=3 * index)
            for index, entry in enumerate(golden)
        ]
        check_golden(golden, drive(llm.engine, arrivals))


@pytest.mark.parametrize(
    "drafts",
    [
        {"method": "ngram"},
        combination({"method": "layer_skip", "num_layers": 24}),
        combination({"method": "lookahead"}),
    ],
    ids=lambda drafts: drafts["method"],
)
def test_speculation(smollm2_path, drafts):
    """The golden tokens, some of them from drafts."""
    golden, config = golden_prompts(*MESH_PROMPTS), drafts | {"num_speculative_tokens": 3}
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 4 + 64}
    with load_alone(smollm2_path, speculative_config=config, **sizes) as llm:
        arrivals = [Arrival(entry.prompt_token_ids, WHOLE) for entry in golden]
        check_golden(golden, drive(llm.engine, arrivals))
        assert llm.get_metrics()["vllm:spec_decode_num_accepted_tokens_total"].value > 0


@exhaustive
def test_trees_of_drafts(smollm2_path, tmp_path):
    """The golden tokens, by heads that are not trained."""
    config = MedusaConfig(num_heads=2, num_layers=1, hidden_size=576, vocab_size=49152)
    blocks = np.random.default_rng(0).normal(0, 0.01, (2, 576, 576))
    save_heads(tmp_path, config, blocks.astype(np.float32))
    tree = {"method": "medusa", "model": str(tmp_path), "speculative_token_tree": [4, 2]}
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 13 + 64}
    golden = golden_prompts(*MESH_PROMPTS)
    with load_alone(smollm2_path, speculative_config=tree, **sizes) as llm:
        arrivals = [Arrival(entry.prompt_token_ids, WHOLE) for entry in golden]
        check_golden(golden, drive(llm.engine, arrivals))
        assert llm.get_metrics()["vllm:spec_decode_num_accepted_tokens_total"].value > 0


@pytest.mark.parametrize("preemption", [combination("swap"), "recompute"])
def test_every_preemption(smollm2_path, preemption):
    """A prompt that takes most of the pool, and three that grow until it is full."""
    golden = golden_prompts("chat_long_story", "chat_poem", "chat_code", "chat_recipe")
    tiers = {"host_pages": 96, "debug_kv": True, "preemption": preemption}
    with load_alone(smollm2_path, **tiers) as llm:
        arrivals = [Arrival(entry.prompt_token_ids, WHOLE) for entry in golden]
        check_golden(golden, drive(llm.engine, arrivals))
        kinds = llm.get_metrics()["jaxserve:kv_preemptions_total"].value
        assert kinds[preemption] > 0 == sum(kinds.values()) - kinds[preemption]


def test_prefix_hits(llm):
    """Two chats begin alike, with a system message of 27 tokens."""
    golden = golden_prompts("chat_sky", "chat_german", "chat_sky")
    outputs = [generate(llm, entry.prompt_token_ids, WHOLE) for entry in golden]
    check_golden(golden, outputs)
    first, alike, again = (output.metrics.cached_tokens for output in outputs)
    assert first == 0
    assert alike >= 20
    assert again >= len(golden[-1].prompt_token_ids) - 1


@pytest.mark.parametrize("quantization", ["gguf", combination("int8"), "int4", combination("fp8")])
def test_packed_weights(smollm2, quantization):
    """Each token is the most likely by the dense model of the weights that the packed ones mean; of
    the GGUF file they mean what transformers reads."""
    golden = golden_prompts("chat_sky", "code_python", "french")
    small = {"max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 32}
    with load_alone(smollm2.path, quantization=quantization, **small) as llm:
        arrivals = [Arrival(entry.prompt_token_ids, GREEDY) for entry in golden]
        outputs = drive(llm.engine, arrivals)
    if quantization == "gguf":
        check_golden(golden, outputs)
        return
    model = smollm2.rounded(quantization)
    for output in outputs:
        token_ids = output.outputs[0].token_ids
        logits = logits_before(model, output.prompt_token_ids, token_ids)
        assert shortfalls(logits, token_ids).max() < DECIDED


def test_streamed_weights(smollm2_path):
    """All 30 layers through a window of two, from disk."""
    golden = golden_prompts("chat_sky", "code_python", "french")
    small = {"max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 32}
    with load_alone(smollm2_path, weights_on="disk", **small) as llm:
        arrivals = [Arrival(entry.prompt_token_ids, GREEDY) for entry in golden]
        check_golden(golden, drive(llm.engine, arrivals))
        placement, reads = llm.plan().shapes.placement, llm.engine.counters.weight_reads
        assert placement.streamed == (*range(30),)
        assert reads.num_bytes >= reads.num_passes * placement.streamed_bytes


@pytest.fixture
def long_prompt():
    return (golden_prompts("chat_sky")[0].prompt_token_ids * 40)[:620]


def load_on_host(path, **changes):
    """With a pool of 80 tokens."""
    settings = {"max_model_len": 656, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 32}
    settings |= {"host_pages": 40, "kv_cache_memory_bytes": 5 * page_bytes(path)}
    return load_alone(path, kv_on="host", **settings | changes)


def test_kv_on_the_host(smollm2_path, llm, long_prompt):
    """A context of ten times the pool, with the same tokens as in a pool that holds it."""
    whole = generate(llm, long_prompt, GREEDY)
    with load_on_host(smollm2_path) as on_host:
        parts = generate(on_host, long_prompt, GREEDY)
        assert len(long_prompt) > 9 * on_host.plan().memory.kv_tokens
    assert tokens(parts) == tokens(whole)


@exhaustive
def test_compressed_keys_of_full_rank(smollm2_path, llm, long_prompt):
    """Of all chunks: the same tokens."""
    whole = generate(llm, long_prompt, GREEDY)
    # Of the prompt, whose pages are copied.
    shadow = {"kv_compression": "shadow", "shadow_rank": 192, "host_attention": "disabled"}
    with load_on_host(smollm2_path, **shadow) as on_host:
        recalled = generate(on_host, long_prompt, GREEDY)
        sizes, counts = on_host.plan().memory.shadow, on_host.engine.counters.recall_counts
        assert sizes.rank == sizes.width
        assert 0 < counts.copied < counts.attended
    assert tokens(recalled) == tokens(whole)


def test_quantized_kv(smollm2):
    """Each token is the most likely by the dense model that rounds keys and values in the same way:
    in chunks beside decodes, again from cached pages, and from pages that came back."""
    golden = golden_prompts("chat_sky", "french")
    small = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 2 + 32}
    model = smollm2.with_kv("int8")
    with load_alone(smollm2.path, kv_cache_dtype="int8", host_pages=64, **small) as llm:
        arrivals = [Arrival(entry.prompt_token_ids, GREEDY) for entry in golden]
        outputs = drive(llm.engine, arrivals)
        outputs += drive(llm.engine, arrivals)
        evict_all(llm.engine)
        outputs += drive(llm.engine, arrivals)
        assert all(output.metrics.cached_tokens > 0 for output in outputs[len(golden) :])
        assert count(llm.engine, "kv_fetched_pages_total", "host") > 0
    answers = {((*o.prompt_token_ids,), (*o.outputs[0].token_ids,)) for o in outputs}
    for prompt, token_ids in answers:
        logits = logits_before(model, prompt, token_ids)
        assert shortfalls(logits, token_ids).max() < QUANTIZED_MARGIN


# Kinds of requests


def test_n_samples_are_n_requests_with_seeds_of_their_own(llm):
    prompt = golden_prompts("sentence")[0].prompt_token_ids
    several = generate(llm, prompt, dataclasses.replace(SAMPLED, n=4))
    assert len(set(tokens(several))) == 4
    alone = [
        generate(llm, prompt, dataclasses.replace(SAMPLED, seed=sequence_seed(SAMPLED.seed, index)))
        for index in range(4)
    ]
    assert tokens(several) == [tokens(output)[0] for output in alone]


def test_a_seed_gives_the_same_tokens_in_any_batch(llm):
    prompt = golden_prompts("code_c")[0].prompt_token_ids
    alone = generate(llm, prompt, SAMPLED)
    crowd = [Arrival(e.prompt_token_ids, GREEDY) for e in golden_prompts(*MESH_PROMPTS)]
    _, *others, among = drive(llm.engine, [*crowd, Arrival(prompt, SAMPLED, step=2)])
    assert tokens(among) == tokens(alone)
    check_golden(golden_prompts(*MESH_PROMPTS[1:]), others)


def test_beams_are_those_of_a_dense_search(smollm2, llm):
    prompt = golden_prompts("sentence")[0].prompt_token_ids
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    (output,) = llm.beam_search(prompt, params, use_tqdm=False)
    next_logprobs = functools.cache(lambda taken: smollm2.logprobs(taken)[-1])
    expected = dense_search(next_logprobs, prompt, params)
    check_beams(output.sequences, expected, params.length_penalty, len(prompt))


REGEX = r"[A-Z][a-z]{2,9}, \d{3}\."
CITIES = ["Osaka", "Tokyo", "東京"]
QUESTION = [{"role": "user", "content": "Which is the largest city of Japan?"}]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
        ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
        ({"choice": CITIES}, lambda text: text in CITIES),
    ],
    ids=["json", "regex", "choice"],
)
def test_grammars(llm, form, fits, temperature):
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=64, structured_outputs=form)
    (output,) = llm.chat(QUESTION, params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert fits(output.outputs[0].text)


def check_scored(entry, token, expected, count):
    """One position: the token and the `count` most likely; where two are equal to within rounding,
    either may come first."""
    assert token in entry and count <= len(entry) <= count + 1
    least = np.sort(expected)[-count]
    for each, scored in entry.items():
        assert scored.logprob == pytest.approx(expected[each], abs=DECIDED)
        assert each == token or expected[each] > least - DECIDED
        better, equal = expected > expected[each] + DECIDED, expected > expected[each] - DECIDED
        assert np.sum(better) < scored.rank <= np.sum(equal)


def test_log_probabilities_equal_the_reference(smollm2, llm):
    prompt = golden_prompts("code_python")[0].prompt_token_ids
    params = dataclasses.replace(SAMPLED, logprobs=5, prompt_logprobs=5)
    output = generate(llm, prompt, params)
    (completion,) = output.outputs
    whole = [*prompt, *completion.token_ids]
    scored = [*output.prompt_logprobs[1:], *completion.logprobs]
    expected = smollm2.logprobs(whole)
    assert len(scored) == len(whole) - 1
    for place, entry in enumerate(scored):
        check_scored(entry, whole[place + 1], expected[place], 5)


def test_a_chat(llm):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (golden,) = golden_prompts("chat_capital")
    assert llm.chat_prompt(question) == golden.prompt_token_ids
    outputs = llm.chat(question, WHOLE, use_tqdm=False)
    check_golden([golden], outputs)
    text = outputs[0].outputs[0].text
    assert "Paris" in text
    assert outputs[0].outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in text
    assert "".join(delta.text for delta in llm.stream_chat(question, WHOLE)) == text


def test_one_bad_conversation_fails_alone(llm):
    good = [{"role": "user", "content": "Hi!"}]
    params = SamplingParams(temperature=0, max_tokens=2)
    refused, served = llm.chat([[{"foo": "x"}], good], params, use_tqdm=False)
    assert refused.outputs[0].finish_reason == "error"
    assert "role" in refused.error
    assert len(served.outputs[0].token_ids) == 2


# Promises of an engine


def test_nothing_is_compiled_once_the_engine_is_ready(llm, compiled):
    prompts = [entry.prompt_token_ids for entry in golden_prompts(*MESH_PROMPTS)]
    scored = dataclasses.replace(SAMPLED, logprobs=2, prompt_logprobs=2, repetition_penalty=1.2)
    several = dataclasses.replace(SAMPLED, n=3, stop=("a",), logit_bias={5: 1.0})
    chosen = dataclasses.replace(GREEDY, structured_outputs={"choice": ["no", "yes"]})
    jax.clear_caches()  # What other tests ran must not hide what this one would compile.
    compiled.clear()
    options = itertools.cycle([GREEDY, scored, several, chosen])
    arrivals = [Arrival(*each, step=3 * i) for i, each in enumerate(zip(prompts, options))]
    drive(llm.engine, arrivals)
    assert compiled == []
    jax.jit(lambda x: x + 1)(jnp.zeros(3))
    assert compiled, "the events that should count nothing do count"


def test_a_pool_larger_than_the_memory_is_refused_with_what_fits(smollm2_path):
    with pytest.raises(MemoryPlanError, match=r"What fits: kv_cache_memory_bytes \d+"):
        load_alone(smollm2_path, kv_cache_memory_bytes=1 << 60)


def test_an_interrupted_batch_job_goes_on(llm, tmp_path):
    """Each line is answered once, by the golden tokens."""
    golden = golden_prompts(*MESH_PROMPTS)
    lines = [
        {
            "custom_id": entry.name,
            "prompt": entry.prompt_token_ids,
            "max_tokens": 4 + 2 * place,
            "temperature": 0,
            "return_token_ids": True,
        }
        for place, entry in enumerate(golden)
    ]
    questions, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def interrupt(run: BatchRun) -> None:
        if run.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(llm, questions, answers, interrupt)
    before = answers.read_text()
    num_answered = len(before.splitlines())
    assert 0 < num_answered < len(lines)
    run = run_batch(llm, questions, answers)
    assert run.complete and run.done == len(lines) - num_answered
    assert answers.read_text().startswith(before)
    answered = [json.loads(line) for line in answers.read_text().splitlines()]
    choices = {line["custom_id"]: line["response"]["body"]["choices"][0] for line in answered}
    assert len(answered) == len(choices) == len(lines)
    for entry in golden:
        choice = choices[entry.name]
        check_tokens(entry, choice["token_ids"], whole=choice["finish_reason"] == "stop")


def test_every_request_ends_once_and_an_abort_changes_no_other(llm):
    golden = golden_prompts(*MESH_PROMPTS)
    streams = [llm.stream({"prompt_token_ids": e.prompt_token_ids}, GREEDY) for e in golden]
    for step in range(5):
        llm.engine.step()
        if step == 3:
            assert llm.abort(streams[1].request_id)
            assert not llm.abort(streams[1].request_id)
    outputs = [stream.result() for stream in streams]
    aborted = outputs.pop(1)
    assert aborted.outputs[0].finish_reason == "abort"
    golden.pop(1)
    check_golden(golden, outputs)
