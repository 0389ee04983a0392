"""Latents on pages: the oracle's tokens, and the bytes of the formula."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import pytest
from exhaustive import combinations_of, exhaustive
from kv_engines import Preempter, bytes_of, count, evict_all, prefilled
from published_configs import DEEPSEEK_V3
from quantized_checkpoints import write
from tiny_engines import LONGEST, PAGE_SIZE, Arrival, TinyModel, drive, generate, wider_member

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.program_kinds import ProgramKinds
from jaxserve.runtime.programs.forward.step_work import step_work
from jaxserve.runtime.startup import engine_plan
from jaxserve.scheduler.policies import POLICIES
from pallas_kernels.paged_attention.xla import PREFILL_BLOCK
from pallas_kernels.quantized_matmul import QuantizedWeight

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
LAYERS, LATENT = 3, 20 + 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of three layers, the first of which has a plain MLP."""
    return TinyModel.write_member(tmp_path_factory.mktemp("mla"), "deepseek_v3")


def load(model, **changes):
    """An engine that swaps, checks its pages, and poisons what it frees."""
    settings = {"preemption": "swap", "host_kv_bytes": bytes_of(model, 64), "debug_kv": True}
    few_programs = {"max_num_seqs": 2, "max_num_batched_tokens": 2 + 16}
    return model.load(**settings | few_programs | changes)


@pytest.fixture(scope="module")
def llm(model, tmp_path_factory):
    with load(model, trace_file=tmp_path_factory.mktemp("trace") / "trace.json") as llm:
        yield llm


def check_crowd(model, llm):
    """Chunks, hits, and pages that leave for the host and come back."""
    prompts = [*model.prompts, model.prompts[-1], model.prompts[-2]]
    arrivals = [Arrival(prompt, GREEDY, 2 * step) for step, prompt in enumerate(prompts)]
    preempter = Preempter(llm.engine, seed=1, evicts=True, share=0.5)
    for output in drive(llm.engine, arrivals, preempter):
        model.check_greedy(output)
    assert preempter.count > 10
    assert count(llm.engine, "kv_fetched_pages_total", "host") > 0


def test_prefill_chunks_beside_decodes(model, llm):
    assert llm.engine.plan.config.scheduler == "sarathi"
    check_crowd(model, llm)


def test_prefill_steps_of_their_own(model):
    with load(model, scheduler="vllm") as llm:
        check_crowd(model, llm)


WIDE = {"max_num_seqs": 2, "max_num_batched_tokens": 2 + 64}
"""Chunks of enough tokens to attend to each other by keys and values of heads."""


@pytest.mark.parametrize(
    "scheduler", combinations_of(POLICIES, "static", "orca", "splitfuse", "medha", "vllm")
)
def test_wide_chunks_in_every_scheduler(model, scheduler):
    """Of one prompt the second chunk, of two prompts in a step, and after a hit."""
    assert model.config.mla.uncompressed_from <= 64
    with model.load(scheduler=scheduler, **WIDE) as llm:
        first = [Arrival(model.prompts[place], GREEDY) for place in (-1, 4)]
        for output in drive(llm.engine, first):
            model.check_greedy(output)
        longer = model.prompts[-1][:40] + model.prompts[-2]
        arrivals = [Arrival(prompt, GREEDY) for prompt in (longer, model.prompts[-1])]
        for output in drive(llm.engine, arrivals):
            model.check_greedy(output)
            assert output.metrics.cached_tokens > 0


@exhaustive
def test_wide_chunks_beside_drafts(model):
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    with model.load(speculative_config=drafts, **WIDE) as llm:
        arrivals = [
            Arrival(model.prompts[place], GREEDY, step) for place, step in ((4, 0), (-1, 6))
        ]
        outputs = drive(llm.engine, arrivals)
    for output in outputs:
        model.check_greedy(output)
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0


@pytest.mark.parametrize("settings", [{}, {"batch_invariant": True}])
def test_products_of_a_prefill_program(tmp_path, settings):
    """Counted in programs of a published layer, of a query and a key in a head: 192 + 128 where
    both are of the chunk, if it has 342 tokens or more, and 576 + 512 over latents."""
    raw = DEEPSEEK_V3 | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": None}))
    config = EngineConfig(
        model=tmp_path / "config.json",
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=1024,
        max_num_batched_tokens=1 + 512,
        max_num_seqs=1,
        program_scope="step",
        **settings,
    )
    shapes = engine_plan.decide(config).shapes
    chunks = step_work(shapes).chunks
    assert (chunks and chunks.least) == (None if settings else 342)
    programs = {spec.name: spec for spec in ProgramKinds(shapes).specs()}
    latents = [512, 576]
    cases = [(512, latents)] if settings else [(512, [128, 192, *latents]), (128, latents)]
    for tokens, expected in cases:
        text = programs[f"forward-0-{tokens}"].lower().as_text()
        assert sorted(products_of_a_pair(text)) == expected
    if chunks:
        assert 2 * chunks.query_size == 128 * (192 + 128)
        pairs = 512 * 513 // 2
        step = step_work(shapes).prefill_attention(512, 0, 512, None)
        assert step == 2 * 128 * (320 * pairs + 512 * 256 * 512)


def products_of_a_pair(text):
    """The size that each product of queries and a block of keys contracts, and that of each result
    for which a product contracts the block, in the text of a program."""
    pattern = r"contracting_dims = \[(\d+)\] x .*\(tensor<([\dx]+)x\w+>, .*-> tensor<([\dx]+)x"
    for dim, left, result in re.findall(pattern, text):
        contracted = int(left.split("x")[int(dim)])
        last = int(result.split("x")[-1])
        if PREFILL_BLOCK in (contracted, last):
            yield last if contracted == PREFILL_BLOCK else contracted


def test_a_token_keeps_its_latent_alone(model, llm):
    memory, page_bytes = llm.plan().memory, PAGE_SIZE * LAYERS * LATENT * 4
    assert memory.page_bytes == page_bytes
    held = jax.tree.leaves(llm.engine._runner._state.kv)
    assert len(held) == LAYERS
    assert sum(array.nbytes for array in held) == memory.kv_bytes == memory.num_pages * page_bytes
    assert {array.shape[1:] for array in held} == {(1, LATENT, PAGE_SIZE)}


def test_tokens_do_not_depend_on_the_batch_or_the_cache(model, llm):
    prompt = model.prompts[-1]
    alone = generate(llm, prompt, SEEDED).outputs[0].token_ids
    arrivals = [Arrival(other, SEEDED, step) for step, other in enumerate(model.prompts[:-1])]
    *_, together = drive(llm.engine, [*arrivals, Arrival(prompt, SEEDED, 4)])
    llm.reset_prefix_cache()
    generate(llm, prompt[:50], GREEDY)  # Another cut between chunks.
    chunked = generate(llm, prompt, SEEDED)
    evict_all(llm.engine)
    fetched = generate(llm, prompt, SEEDED)
    assert fetched.metrics.cached_tokens >= 96 > chunked.metrics.cached_tokens >= 48
    for other in (together, chunked, fetched):
        assert other.outputs[0].token_ids == alone


@exhaustive
def test_batch_invariance_is_exact(model):
    """To the bit, with drafts of several tokens too."""
    scored = dataclasses.replace(GREEDY, logprobs=1)
    with model.load(
        batch_invariant=True,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        max_num_seqs=2,
        max_num_batched_tokens=2 * 3 + 16,
    ) as llm:
        places = (3, 6, 9)
        arrivals = [Arrival(model.prompts[place], scored) for place in places]
        for place, crowded in zip(places, drive(llm.engine, arrivals), strict=True):
            llm.reset_prefix_cache()
            alone = generate(llm, model.prompts[place], scored)
            assert alone.outputs[0].logprobs == crowded.outputs[0].logprobs
            model.check_greedy(alone)


def test_a_snapshot_holds_latents(model, llm, tmp_path):
    prompt = model.prompts[-1]
    expected = generate(llm, prompt, SEEDED).outputs[0].token_ids
    stream = llm.stream({"prompt_token_ids": prompt}, SEEDED)
    for _ in range(9):
        llm.engine.step()
    llm.snapshot(tmp_path)
    stream.close()
    llm.reset_prefix_cache()
    (again,) = llm.restore(tmp_path)
    computed, output = prefilled(llm.engine, again.result)
    assert 0 < computed <= 2 and output.outputs[0].token_ids == expected


def test_what_latents_do_not_do_is_refused_by_name(model):
    with pytest.raises(ConfigError, match="is 'int8', but DeepseekV3ForCausalLM keeps latents"):
        model.load(kv_cache_dtype="int8", kv_cache_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"'pallas'.* kernel of latent_attention cannot be used"):
        model.load(attention_backend="pallas")


@exhaustive
def test_quantized_projections(model):
    """Those of latents, queries and outputs; what is applied to queries and results stays."""
    rounded = model.rounded("int8")
    with model.load(quantization="int8", max_num_seqs=1, max_num_batched_tokens=1 + 16) as llm:
        layer = llm.engine._runner._state.params["layers"][1]
        packed = {name for name, p in layer.items() if isinstance(p, QuantizedWeight)}
        assert {"latents", "queries", "attn_out", "shared_down"} < packed
        assert not packed & {"keys", "values", "router"}
        rounded.check_greedy(generate(llm, model.prompts[-1], GREEDY))


WIDER = 4
"""Times as wide as the member: its blocks of 128 are several, the last of a matrix smaller."""


def test_a_checkpoint_in_fp8_as_it_is_published(tmp_path):
    """In blocks of 128 x 128, as V3 and R1: the tokens of the floats that it stands for. Only what
    is applied to queries and results is dequantized."""
    raw, tensors = wider_member("deepseek_v3", WIDER)
    # The layer that predicts further tokens is in the files and is not loaded.
    last, further = "model.layers.2.", "model.layers.3."
    tensors |= {further + name[len(last) :]: tensors[name] for name in tensors if last in name}
    published = DEEPSEEK_V3["quantization_config"]
    path, plain = write(tmp_path, raw, tensors, "fp8 in blocks", **published)
    model = TinyModel.open(plain)
    model = dataclasses.replace(model, path=path)
    with model.load(max_num_seqs=1, max_num_batched_tokens=1 + 16) as llm:
        assert llm.plan().config.quantization == "fp8"
        for layer in llm.engine._runner._state.params["layers"]:
            packed = {name for name, p in layer.items() if isinstance(p, QuantizedWeight)}
            mixture = {"experts_gate_up", "experts_down", "shared_gate_up", "shared_down"}
            mlp = mixture if "router" in layer else {"gate_up", "down"}
            assert packed == {"latents", "queries", "attn_out"} | mlp
        model.check_greedy(generate(llm, model.prompts[-1], GREEDY))
