"""Quantized KV: the tokens of the oracle that rounds keys and values in the same way."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from exhaustive import combinations_of, exhaustive
from kv_engines import Preempter, bytes_of, count, evict_all, prefilled
from tiny_engines import LONGEST, NUM_PAGES, PAGE_SIZE, Arrival, TinyModel, drive, generate

from jaxserve.cli.planning.plan_tables import memory_table
from jaxserve.core.errors import ConfigError, SnapshotError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.runtime.startup import engine_plan
from jaxserve.scheduler.policies import POLICIES

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
KINDS = ("int8", "fp8", "int4")
LONG = 5
"""The last of a crowd: prompts of several chunks, and two that come again."""


@pytest.fixture(scope="module", params=KINDS)
def model(request, llama) -> TinyModel:
    return llama.with_kv(request.param)


def load(model, **changes):
    """An engine that swaps, checks its pages, and poisons what it frees."""
    settings = {"preemption": "swap", "host_kv_bytes": bytes_of(model, 64), "debug_kv": True}
    return model.load(**settings | changes)


def crowd(model) -> list[Arrival]:
    """Requests of all lengths, which come while others run, and prefixes that come again."""
    prompts = [*model.prompts, model.prompts[-1], model.prompts[-2]]
    return [Arrival(prompt, GREEDY, 2 * step) for step, prompt in enumerate(prompts)]


def check(model, engine: Engine, between=lambda: None):
    for output in drive(engine, crowd(model), between):
        model.check_greedy(output)


@pytest.mark.parametrize(
    "scheduler", combinations_of(POLICIES, "static", "orca", "splitfuse", "medha", "vllm")
)
def test_every_scheduler_and_a_preemption_after_every_step(llama, scheduler):
    """Chunks, hits, pages that leave for the host and come back; fp8 and int4 under one of the
    schedulers each."""
    model = llama.with_kv({"vllm": "fp8", "orca": "int4"}.get(scheduler, "int8"))
    with load(model, scheduler=scheduler) as llm:
        preempter = Preempter(llm.engine, seed=1, evicts=True, share=0.5)
        check(model, llm.engine, preempter)
        assert preempter.count > 10
        assert count(llm.engine, "kv_fetched_pages_total", "host") > 0
        assert llm.engine.plan.memory.num_pages == NUM_PAGES


def test_tokens_do_not_depend_on_the_batch(model):
    """Nor on the cache, on any tier; nor do log probabilities, but for rounding. What lies on a
    page is never rescaled."""
    with load(model) as llm:
        scored = dataclasses.replace(SEEDED, logprobs=2)
        prompt = model.prompts[-1]
        alone = generate(llm, prompt, scored)
        arrivals = [Arrival(other, SEEDED, step) for step, other in enumerate(model.prompts[:-1])]
        *_, together = drive(llm.engine, [*arrivals, Arrival(prompt, scored, 4)])
        llm.reset_prefix_cache()
        generate(llm, prompt[:50], GREEDY)  # Another cut between chunks.
        chunked = generate(llm, prompt, scored)
        evict_all(llm.engine)
        fetched = generate(llm, prompt, scored)
        assert fetched.metrics.cached_tokens >= 96 > chunked.metrics.cached_tokens >= 48
        for other in (together, chunked, fetched):
            (ours,), (theirs,) = alone.outputs, other.outputs
            assert ours.token_ids == theirs.token_ids
            for entry, same in zip(ours.logprobs, theirs.logprobs):
                for token, found in entry.items():
                    assert found.logprob == pytest.approx(same[token].logprob, abs=1e-2)


def test_the_plan_counts_elements_and_scales(model):
    """A byte for each number, or half a one, and four for the scale of each token and head: to the
    byte what the device holds."""
    config = model.config
    heads = config.num_layers * 2 * config.num_kv_heads
    elements = config.head_dim // 2 if model.kv_cache_dtype == "int4" else config.head_dim
    page_bytes = PAGE_SIZE * heads * (elements + 4)
    with model.load() as llm:
        memory = llm.plan().memory
        assert (memory.page_bytes, memory.num_pages) == (page_bytes, NUM_PAGES)
        held = jax.tree.leaves(llm.engine._runner._state.kv)
        assert sum(array.nbytes for array in held) == memory.kv_bytes == NUM_PAGES * page_bytes
        assert f"KV pool in {model.kv_cache_dtype}, {NUM_PAGES} pages" in memory_table(
            llm.engine.plan
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_as_many_more_tokens_fit_as_the_formula_says(llama, dtype):
    """head_dim * size of the dtype, against head_dim + 4, or head_dim / 2 + 4."""

    def page_bytes(kind):
        config = EngineConfig(
            llama.path, dtype=dtype, kv_cache_dtype=kind, kv_cache_memory_bytes=1 << 20
        )
        return engine_plan.decide(config).memory.page_bytes

    dim, itemsize = llama.config.head_dim, jnp.dtype(dtype).itemsize
    for kind, elements in (("int8", dim), ("fp8", dim), ("int4", dim // 2)):
        assert page_bytes("auto") * (elements + 4) == page_bytes(kind) * dim * itemsize


def test_windows_and_groups(tmp_path):
    """Two groups of layers, whose arrays they share."""
    model = TinyModel.write_member(tmp_path, "qwen2").with_kv("int8")
    with load(model, max_num_seqs=1, max_num_batched_tokens=1 + 16) as llm:
        assert llm.engine.kv.windowed
        check(model, llm.engine, Preempter(llm.engine, seed=2, evicts=True, share=0.3))


@exhaustive
def test_speculation(llama):
    """By a draft model, the KV of whose layers is quantized too."""
    model = llama.with_kv("int8")
    with load(
        model,
        speculative_config={
            "method": "draft_model",
            "model": str(llama.path),
            "num_speculative_tokens": 3,
        },
        kv_cache_memory_bytes=2 * bytes_of(model, NUM_PAGES),
        host_kv_bytes=2 * bytes_of(model, 64),
        max_num_seqs=1,
        max_num_batched_tokens=4 + 16,
    ) as llm:
        check(model, llm.engine, Preempter(llm.engine, seed=3, share=0.2))
        accepted = llm.get_metrics()["vllm:spec_decode_num_accepted_tokens_total"].value
        assert accepted > LONGEST


def test_snapshots_and_exports_hold_elements_with_their_scales(llama, tmp_path):
    model = llama.with_kv("int8")
    prompt = model.prompts[-1]
    logs = [{"trace_file": tmp_path / f"{name}.json"} for name in ("source", "target", "other")]
    with load(model, **logs[0]) as source, load(model, **logs[1]) as target:
        (expected,) = generate(source, prompt, SEEDED).outputs
        source.reset_prefix_cache()
        stream = source.stream({"prompt_token_ids": prompt}, SEEDED)
        for _ in range(9):
            source.engine.step()
        source.snapshot(tmp_path / "here")
        parts = list(source.export_request(stream.request_id))
        (again,) = target.restore(tmp_path / "here")
        computed, output = prefilled(target.engine, again.result)
        assert 0 < computed <= 2 and output.outputs[0].token_ids == expected.token_ids
        target.reset_prefix_cache()
        computed, output = prefilled(target.engine, lambda: target.import_request(parts).result())
        assert 0 < computed <= 2 and output.outputs[0].token_ids == expected.token_ids
        stream.close()
    with llama.load(**logs[2]) as other:
        with pytest.raises(SnapshotError, match="kv_cache_dtype is 'int8' in the engine that exp"):
            other.import_request(parts)
        (again,) = other.restore(tmp_path / "here")
        computed, _ = prefilled(other.engine, again.result)
        assert computed >= len(prompt)  # Its own KV, of another dtype.


@pytest.mark.interpreted
def test_kernels_apply_the_scales(llama):
    """Of int8; what the kernels make of fp8, their own tests have."""
    model, few = llama.with_kv("int8"), {"max_num_seqs": 2, "max_num_batched_tokens": 2 + 16}
    with load(model, attention_backend="pallas", **few) as llm:
        preempter = Preempter(llm.engine, evicts=True, share=0.3)
        for output in drive(llm.engine, crowd(model)[-LONG:], preempter):
            model.check_greedy(output)
        assert preempter.count > 3


def test_what_there_is_none_of_is_refused(llama):
    with pytest.raises(ConfigError, match="no kernel reads the pages of kv_cache_dtype='int4'"):
        llama.with_kv("int4").load(attention_backend="pallas")
    known = "it must be one of auto, int8, fp8, fp8_e4m3, int4"
    for value in ("fp8_e5m2", "bfloat16", "int2", None, 8):
        with pytest.raises(ConfigError, match=f"kv_cache_dtype is {value!r}; {known}"):
            EngineConfig(kv_cache_dtype=value)
    assert EngineConfig(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
