"""Compressed KV of sequences longer than the pool (ShadowKV): limits, needles, counts, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine_host_kv import OUTPUT, PAGE, check, check_books, model, prompt_of, settings_of
from tiny_engines import generate

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.planning.shadow import CHUNK
from jaxserve.runtime.programs.host_kv.step import Partial
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan, Prefill
from jaxserve.runtime.startup import engine_plan

__all__ = ["model"]  # A fixture.

GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
SHADOW = {"kv_compression": "shadow", "max_num_batched_tokens": 2 + 16}
FULL = SHADOW | {"shadow_rank": 1 << 10, "shadow_budget": 1 << 20, "shadow_outliers": 3}
SMALL = SHADOW | {"max_num_seqs": 1, "shadow_rank": 4, "shadow_budget": CHUNK, "shadow_outliers": 2}


@pytest.fixture(scope="module")
def full(model):
    """Of full rank, and all chunks."""
    with model.load(**settings_of(model, **FULL)) as llm:
        yield llm


@pytest.fixture(scope="module")
def small(model):
    with model.load(**settings_of(model, **SMALL)) as llm:
        yield llm


def shadow_of(llm):
    return llm.engine._runner._kinds.forward.shadow


# Full rank and all chunks are dense attention


def test_full_rank_and_all_chunks_are_dense(model, full, compiled):
    engine, sizes = full.engine, full.plan().memory.shadow
    assert sizes.rank == sizes.width
    compiled.clear()
    lengths = (150, 7, 300)
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    ids = [engine.add(f"two-{place}", each, GREEDY) for place, each in enumerate(prompts)]
    while engine.has_work:
        engine.step()
    assert compiled == []
    for each in ids:
        check(model, engine.output(each))
    check_books(full)


def test_log_probabilities_of_decodes_are_those_of_dense_attention(model, full):
    """A sequence that outgrows the pool while it decodes: its basis is of one page first, and of
    more as it grows. Prompts are exact, so the same tokens as a prompt have the right ones."""
    long = SamplingParams(temperature=0, max_tokens=130, ignore_eos=True, logprobs=1)
    output = generate(full, prompt_of(20), long)
    tokens = list(output.outputs[0].token_ids)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    again = generate(full, [*output.prompt_token_ids, *tokens], scored).prompt_logprobs
    exact = [entry[token].logprob for entry, token in zip(again[20:], tokens, strict=True)]
    found = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, tokens)]
    assert np.abs(np.subtract(found, exact)).max() < 1e-4
    check_books(full)


def test_a_chunk_that_stays_is_copied_once(full):
    """With room for all chunks each head copies its chunks once, whatever the number of decodes."""
    counts, sizes = full.engine.counters.recall_counts, full.plan().memory.shadow
    attended, copied = counts.attended, counts.copied
    generate(full, prompt_of(150), SamplingParams(temperature=0, max_tokens=7, ignore_eos=True))
    # 150 tokens have 10 pages, of which 8 are on the host, less the outliers: six decodes.
    heads = sizes.num_layers * sizes.kv_heads
    once = heads * (8 * sizes.page_chunks - sizes.outliers)
    assert (counts.attended - attended, counts.copied - copied) == (6 * once, once)
    metrics = full.get_metrics()
    copied_bytes = metrics["jaxserve:kv_recall_copied_bytes_total"].value
    assert copied_bytes == counts.copied * CHUNK * sizes.head_dim * 4


# What is left out, and what never is


def test_the_device_holds_what_the_formula_says(small):
    memory = small.plan().memory
    arrays = jax.tree.leaves(shadow_of(small)._layers)
    assert sum(array.nbytes for array in arrays) == memory.shadow_bytes > 0


def test_fewer_chunks_give_answers_and_free_the_books(small):
    counts = small.engine.counters.recall_counts
    output = generate(small, prompt_of(150), GREEDY)
    assert len(output.outputs[0].token_ids) == OUTPUT
    assert 0 < counts.copied <= counts.attended
    small.sleep()
    small.wake_up()
    again = generate(small, prompt_of(150), GREEDY)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    check_books(small)


@pytest.mark.parametrize("seed", range(4))
def test_a_needle_in_an_outlier_is_found(small, seed):
    """A key that its landmark hides, and rank and budget too small for it: its chunk is kept
    exactly, so a query for it gets its value, to the last bits."""
    shadow, shapes = shadow_of(small), small.engine._runner.shapes
    store, sizes = small.engine._runner._kinds.forward.store, shadow.sizes
    draw = np.random.RandomState(seed)
    pages, heads, dim = list(range(6)), sizes.kv_heads, sizes.head_dim
    keys = np.ones((6, heads, dim, PAGE), np.float32) + 0.1 * draw.randn(6, heads, dim, PAGE)
    values = draw.randn(6, heads, PAGE, dim).astype(np.float32)
    page, place = draw.randint(6), draw.randint(PAGE)
    needle = draw.randn(heads, dim).astype(np.float32)
    needle *= 8 / np.linalg.norm(needle, axis=1, keepdims=True)
    keys[page, :, :, place] = -needle
    payload = np.concatenate([keys.reshape(6, -1), values.reshape(6, -1)], axis=1)
    for layer in range(sizes.num_layers):
        store.write(layer, pages, jnp.asarray(payload, jnp.float32))
    key = next(key for key in shapes.layouts if key.rows and not key.prefill_tokens)
    shadow.begin_step(key, FrozenPlan(prefills=[Prefill(96, 0, [1], True, 0)]))
    step = FrozenPlan(stops=[97], slots=[0], counts=[1], adapters=[0], host_pages=[(pages,)])
    decodes = shadow.begin_step(key, step)
    shape = shadow._choose.partial(key).q.shape
    q = np.zeros(shape, np.float32)
    group = shape[1] // heads
    q[0] = np.repeat(-needle * 40, group, axis=0)
    empty = Partial(jnp.asarray(q), jnp.zeros(shape), jnp.full(shape[:2], -jnp.inf))
    found = shadow.attend(key, 0, empty, step, decodes)
    expected = np.repeat(values[page, :, place], group, axis=0)
    np.testing.assert_allclose(np.asarray(found.out)[0], expected, atol=1e-5)
    shadow._compressed.clear()


# Bad input


def test_a_budget_of_less_than_a_chunk_is_refused():
    with pytest.raises(ConfigError, match="shadow_budget is 7"):
        EngineConfig(kv_on="host", kv_compression="shadow", shadow_budget=7)


def test_a_page_that_is_not_of_whole_chunks_is_refused(model):
    settings = settings_of(model, **SMALL | {"page_size": 12})
    with pytest.raises(ConfigError, match="page_size is 12; set it to a multiple of 8"):
        engine_plan.plan_engine(EngineConfig(model.path, **settings))
