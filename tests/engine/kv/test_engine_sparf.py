"""Attention of decodes to some of the tokens on the host (SparF): limits, the rule, counts."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import combination
from test_engine_host_kv import (
    GREEDY,
    OUTPUT,
    PAGE,
    check,
    check_books,
    model,
    prompt_of,
    settings_of,
)
from tiny_engines import generate

from jaxserve.cli.planning.plan_tables import capacity
from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.planning.sparf import SparFSizes
from jaxserve.runtime.programs.host_kv.sparf_step import attend_to_some
from pallas_kernels.paged_attention import KVPages

__all__ = ["model"]  # A fixture.

SPARF = {"kv_compression": "sparf"}
FULL = SPARF | {"sparf_components": 1 << 10, "sparf_budget": 1 << 20}
SMALL = SPARF | {"sparf_components": 2, "sparf_budget": 20}


@pytest.fixture(scope="module")
def small(model):
    with model.load(**settings_of(model, **SMALL)) as llm:
        yield llm


def test_all_features_and_all_tokens_are_dense_attention(model, compiled):
    """Also beside prompts whose pages are copied to the device."""
    with model.load(**settings_of(model, **FULL, host_attention="disabled")) as llm:
        engine = llm.engine
        compiled.clear()
        prompts = [prompt_of(length, seed) for seed, length in enumerate((150, 7, 300))]
        ids = [engine.add(f"some-{place}", each, GREEDY) for place, each in enumerate(prompts)]
        while engine.has_work:
            engine.step()
        assert compiled == []
        for each in ids:
            check(model, engine.output(each))
        assert engine.counters.host_kv_copies.page_bytes > 0
        assert engine.counters.sparse_reads.share == 1
        check_books(llm)


def test_what_decodes_read_is_what_the_formulas_say(model, small):
    """Six decodes after 150 tokens, 8 pages of which are on the host, attend to the budget's; over
    the link go queries and results, of the prompt too."""
    reads, copies = small.engine.counters.sparse_reads, small.engine.counters.host_kv_copies
    before, found = dataclasses.replace(reads), []
    for tokens in (1, 7):
        start = copies.query_bytes
        generate(small, prompt_of(150), dataclasses.replace(GREEDY, max_tokens=tokens))
        found.append(copies.query_bytes - start)
    config = model.config
    heads = 3 * config.num_kv_heads
    assert reads.tokens - before.tokens == 6 * heads * 8 * PAGE
    assert reads.attended - before.attended == 6 * heads * 20
    assert found[1] - found[0] == 6 * 3 * config.num_heads * (2 * config.head_dim * 4 + 4)
    sizes = small.plan().shapes.sparf
    assert sizes.read_bytes(8 * PAGE) == heads * (8 * PAGE * 2 + 2 * 20 * config.head_dim) * 4
    assert "2 features of keys, and 20 tokens, that a decode after" in capacity(small.plan())
    metrics = small.get_metrics()
    assert metrics["jaxserve:kv_sparse_attended_tokens_total"].value == reads.attended
    assert metrics["jaxserve:kv_sparse_tokens_total"].value == reads.tokens


def test_an_answer_is_the_same_again(small):
    """In another slot's place, and after a sleep: mean values are those of the sequence."""
    output = generate(small, prompt_of(150), GREEDY)
    assert len(output.outputs[0].token_ids) == OUTPUT
    generate(small, prompt_of(200, seed=9), GREEDY)
    small.sleep()
    small.wake_up()
    again = generate(small, prompt_of(150), GREEDY)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    check_books(small)


# The rule

KV_HEADS, HEADS, DIM, COUNT = 2, 4, 8, 12
CONTEXT = [5 * PAGE, 0, 2 * PAGE]


@pytest.fixture(scope="module")
def drawn(model):
    """A model's config; queries, pages, page tables and mean values of three rows."""
    draw = np.random.RandomState(0)
    k = draw.randn(COUNT, KV_HEADS, DIM, PAGE).astype(np.float32)
    v = draw.randn(COUNT, KV_HEADS, PAGE, DIM).astype(np.float32)
    q = 3 * draw.randn(len(CONTEXT), HEADS, DIM).astype(np.float32)
    tables = np.stack([draw.permutation(COUNT)[:6] for _ in CONTEXT]).astype(np.int32)
    whole = [v[table].swapaxes(0, 1).reshape(KV_HEADS, -1, DIM) for table in tables]
    means = [values[:, : max(1, end)].mean(axis=1) for values, end in zip(whole, CONTEXT)]
    config = dataclasses.replace(model.config, head_dim=DIM)
    return config, q, KVPages(k, v), tables, np.stack(means).astype(np.float32)


def attended(drawn, components, selected):
    config, q, pages, tables, means = drawn
    sizes = SparFSizes(1, KV_HEADS, DIM, 4, components, selected)
    pages = KVPages(*map(jnp.asarray, (pages.k, pages.v)))
    context = jnp.asarray(CONTEXT, jnp.int32)
    out, lse = attend_to_some(config, sizes, *map(jnp.asarray, (q,)), pages, tables, context, means)
    return np.asarray(out), np.asarray(lse)


def by_the_paper(drawn, components, selected):
    """SparF's formulas, head by head, in float64."""
    config, q, pages, tables, means = drawn
    outs, lses = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    group = HEADS // KV_HEADS
    for row, end in enumerate(CONTEXT):
        for head in range(KV_HEADS) if end else ():
            k = np.concatenate([pages.k[page, head].T for page in tables[row]])[:end]
            v = np.concatenate([pages.v[page, head] for page in tables[row]])[:end]
            own = q[row, head * group : (head + 1) * group].astype(np.float64)
            largest = np.argsort(-np.abs(own).sum(axis=0), kind="stable")[:components]
            share = np.abs(own[:, largest]).sum(axis=1) / np.abs(own).sum(axis=1)
            estimates = own[:, largest] @ k[:, largest].T * config.attention_scale
            weights = np.exp(estimates / np.sqrt(share)[:, None])
            weights /= weights.sum(axis=1, keepdims=True)
            some = np.argsort(-weights.sum(axis=0), kind="stable")[:selected]
            alpha = weights[:, some].sum(axis=1, keepdims=True)
            scores = np.exp(own @ k[some].T * config.attention_scale)
            total = scores.sum(axis=1, keepdims=True)
            place = slice(head * group, (head + 1) * group)
            outs[row, place] = alpha * (scores / total @ v[some]) + (1 - alpha) * means[row, head]
            lses[row, place] = np.log(total / alpha)[:, 0]
    return outs, lses


@pytest.mark.parametrize(
    ("components", "selected"), [combination(2, 10), (3, 40), combination(8, 6 * PAGE)]
)
def test_the_papers_formulas(drawn, components, selected):
    for found, expected in zip(
        attended(drawn, components, selected), by_the_paper(drawn, components, selected)
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_more_features_and_more_tokens_are_nearer(drawn):
    exact, _ = attended(drawn, DIM, 6 * PAGE)
    errors = [np.abs(attended(drawn, *few)[0] - exact).mean() for few in ((1, 4), (3, 12), (6, 40))]
    assert errors[0] > errors[1] > errors[2] > 0


# Bad input


@pytest.mark.parametrize("setting", ["sparf_components", "sparf_budget"])
def test_none_is_refused(setting):
    with pytest.raises(ConfigError, match=f"{setting} is 0"):
        EngineConfig(kv_on="host", kv_compression="sparf", **{setting: 0})
