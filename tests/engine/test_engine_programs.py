"""What is compiled, and when: the enumerated set before the engine is ready, nothing after it.
And what it plans to take of the memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from tiny_engines import CONTEXT, LONGEST, NUM_PAGES, Arrival, drive, generate, preemptions

from jaxserve.core.errors import ConfigError, MemoryPlanError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.runtime.program_kinds import ProgramKinds
from jaxserve.runtime.programs.page_programs import CopyPages
from jaxserve.runtime.programs.shapes.program import DraftModel


def mixture(llama):
    """Requests that between them use everything."""
    greedy = SamplingParams(temperature=0, max_tokens=LONGEST)
    options = [
        {},
        {"temperature": 0.8, "top_k": 5, "seed": 1},
        {"temperature": 0.8, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 1.0, "n": 3, "logprobs": 5, "prompt_logprobs": 2},
        {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
        {"logit_bias": {5: 1.0}, "bad_words": ("ab", "c"), "min_tokens": 3},
        {"allowed_token_ids": (3, 4, 5), "stop_token_ids": (4,), "ignore_eos": True},
        {"stop": ("a",), "logprobs": 0},
    ]
    everything = [SamplingParams(**{"temperature": 0, "max_tokens": LONGEST} | w) for w in options]
    arrivals = [Arrival(prompt, greedy) for prompt in llama.prompts]
    for step, params in enumerate(everything):
        arrivals += [Arrival(prompt, params, 3 * step) for prompt in llama.prompts[::3]]
    return arrivals


def test_nothing_is_compiled_once_the_engine_is_ready(llama, ahead_of_time, compiled):
    arrivals = mixture(llama)
    jax.clear_caches()  # what other tests ran must not hide what this one would compile
    with llama.load() as llm:
        compiled.clear()
        drive(llm.engine, arrivals)
        assert preemptions(llm.engine) > 0
        request = llm.engine.add("aborted", llama.prompts[0], SamplingParams(seed=1))
        llm.engine.step()
        llm.engine.abort(request.request_id)
        llm.generate(llama.prompts[0], use_tqdm=False)
    assert compiled == []
    jax.jit(lambda x: x + 1)(jnp.zeros(3))
    assert compiled, "the events that should count nothing do count"


def test_the_programs_are_the_enumerated_ones(
    llama, tmp_path, monkeypatch, ahead_of_time, compiled
):
    """All of them are compiled by a cold start and kept; a warm one compiles none. One with a
    larger pool compiles those that take the pool, and the rest is what was kept."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    settings = {"page_size": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 16}
    with llama.load(**settings) as cold:
        names = {spec.name for spec in ProgramKinds(cold.plan().shapes).specs()}
        kept = cold.plan().cache.directory
        assert compiled_programs(cold) == len(names)
        assert {path.name for path in kept.iterdir()} == names
        assert kept.is_relative_to(tmp_path)
    compiled.clear()
    with llama.load(**settings) as warm:
        assert compiled_programs(warm) == 0
        assert not [event for event in compiled if "backend_compile" in event]
        drive(warm.engine, [Arrival(llama.prompts[5], SamplingParams(seed=1))])
        settings["kv_cache_memory_bytes"] = 2 * warm.plan().memory.kv_bytes
    of_pages = ("layers", "copy", "gather", "scatter")
    take_the_pool = {name for name in names if name.startswith(of_pages)}
    with llama.load(**settings) as larger:
        assert compiled_programs(larger) == len(take_the_pool)
        kept_too = larger.plan().cache.directory
        assert {path.name for path in kept_too.iterdir()} == names
        shared = {name for name in names if (kept_too / name).samefile(kept / name)}
        assert shared == names - take_the_pool
        llama.check_greedy(generate(larger, llama.prompts[5], SamplingParams(temperature=0)))
    with llama.load(**settings) as larger:
        assert compiled_programs(larger) == 0


def test_layers_with_pages_of_one_shape_share_the_program_that_copies_them(llm):
    shapes = llm.plan().shapes
    draft = dataclasses.replace(shapes.model, num_kv_heads=1)
    drafted = dataclasses.replace(shapes, draft_model=DraftModel(draft, shapes.family, {}))
    one_program = dataclasses.replace(shapes.config, program_scope="step")
    whole = dataclasses.replace(drafted, config=one_program)
    assert copied_layers(shapes) == [1]
    assert copied_layers(drafted) == [1, 1]
    assert copied_layers(whole) == [2 * shapes.model.num_layers]


def copied_layers(shapes):
    """Layers of each program that copies pages."""
    kind = CopyPages(shapes)
    return [len(kind.spec(key).arguments()[0]) for key in kind.keys()]  # noqa: SIM118


def compiled_programs(llm):
    return llm.get_metrics()["jaxserve:programs_compiled_total"].value


# Memory


def test_the_pool_is_the_size_asked_for(llm):
    memory = llm.plan().memory
    assert memory.num_pages == NUM_PAGES
    assert memory.kv_bytes == llm.plan().config.kv_cache_memory_bytes
    assert llm.engine.kv.pool.capacity * llm.engine.kv.pool.page_size == memory.kv_tokens
    assert memory.total_bytes <= memory.limit_bytes


def test_a_pool_of_less_than_a_page_is_refused_with_what_fits(llama):
    page_bytes = llama.config.kv_bytes_per_token(4) * 4
    with pytest.raises(MemoryPlanError) as refusal:
        llama.load(kv_cache_memory_bytes=2 * page_bytes - 1)
    message = str(refusal.value)
    assert f"{2 * page_bytes - 1} holds 1 pages of {page_bytes} bytes" in message
    assert f"({2 * page_bytes} bytes)" in message
    assert f"{(CONTEXT // 4 + 1) * page_bytes} bytes for one request" in message


def test_a_pool_larger_than_the_memory_is_refused_with_what_fits(llama):
    with pytest.raises(MemoryPlanError, match=r"What fits: kv_cache_memory_bytes \d+"):
        llama.load(kv_cache_memory_bytes=1 << 60)


def test_memory_too_small_for_one_request_is_refused(llama):
    tiny_share = 1e-9
    with pytest.raises(MemoryPlanError, match=rf"a request of max_model_len {CONTEXT}"):
        llama.load(kv_cache_memory_bytes=None, memory_utilization=tiny_share)


def test_a_context_beyond_the_models_is_refused_with_the_limit(llama):
    with pytest.raises(ConfigError, match=f"{CONTEXT + 1}.*context is {CONTEXT} tokens"):
        llama.load(max_model_len=CONTEXT + 1)


def test_a_budget_without_room_for_prompts_is_refused(llama):
    with pytest.raises(ConfigError, match="max_num_batched_tokens 19 with max_num_seqs 4"):
        llama.load(max_num_batched_tokens=4 + 15)
