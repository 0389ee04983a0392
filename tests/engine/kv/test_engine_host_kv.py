"""Sequences longer than the pool, with older pages on the host: tokens, invariants, refusals."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import oracle
import pytest
from exhaustive import combination
from family_members import tensors
from lora_adapters import merged, write_adapter
from tiny_checkpoints import CONFIG, hf_shapes, write_hf
from tiny_engines import (
    CONTEXT,
    EOS,
    MIN_MARGIN,
    PAGE_SIZE,
    QUANTIZED_MARGIN,
    TinyModel,
    assert_idle,
    generate,
)

from jaxserve import LLM, LoRARequest
from jaxserve.cli.planning.plan_tables import capacity
from jaxserve.cluster.replicas.replica import Replica, _pages_beside_copies
from jaxserve.core.errors import ConfigError, MemoryPlanError, PromptTooLongError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.programs.host_kv.store import HostKVStore
from jaxserve.runtime.startup import engine_plan

PAGE = 16
POOL = 5
"""Pages that sequences can have at once on the device."""
RESIDENT = 2
"""Those that one longer than the pool keeps."""
LENGTH = 10 * POOL * PAGE
HOST = LENGTH // PAGE - RESIDENT
"""Pages on the host of a sequence of LENGTH tokens."""
OUTPUT = 20
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    raw = CONFIG | {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH + PAGE,
        "eos_token_id": EOS,
    }
    return TinyModel.open(write_hf(tmp_path_factory.mktemp("long"), raw, tensors(hf_shapes(raw))))


def settings_of(model, host_pages=HOST, pool=POOL, **changes):
    page_bytes = PAGE * model.token_bytes // (2 if changes.get("dtype") == "bfloat16" else 1)
    return model.settings() | {
        "kv_on": "host",
        "max_model_len": LENGTH + PAGE,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 2 + 16,
        "page_size": PAGE,
        "kv_cache_memory_bytes": (1 + pool) * page_bytes,
        "host_kv_bytes": host_pages * page_bytes,
        "debug_kv": True,
        **changes,
    }


def load(model, **changes):
    return model.load(**settings_of(model, **changes))


@pytest.fixture(scope="module")
def llm(model):
    with load(model) as llm:
        yield llm


def prompt_of(length, seed=5):
    return np.random.RandomState(seed).randint(3, 250, length).tolist()


def check(model, output):
    """Each token must be the most likely after all before it, by a dense pass over all of them."""
    prompt, (answer,) = list(output.prompt_token_ids), output.outputs
    tokens = prompt + list(answer.token_ids)
    padded = np.zeros(LENGTH + PAGE, np.int32)
    padded[: len(tokens)] = tokens
    logits = oracle.dense_logits(
        model.family, model.params, model.config, padded, model.kv_cache_dtype
    )[len(prompt) - 1 : len(tokens) - 1]
    chosen = logits[np.arange(len(logits)), answer.token_ids]
    margin = QUANTIZED_MARGIN if model.is_quantized else MIN_MARGIN
    assert (logits.max(axis=1) - chosen < margin).all()
    assert len(answer.token_ids) == OUTPUT


def check_books(llm):
    assert_idle(llm.engine)
    assert llm.engine.kv.host_pages.num_used == 0


# The same tokens


def test_ten_times_the_pool(model, llm, compiled):
    limits = llm.engine.kv.host_limits
    assert (limits.capacity, limits.resident_pages, limits.num_pages) == (POOL, RESIDENT, HOST)
    compiled.clear()
    output = generate(llm, prompt_of(LENGTH - OUTPUT + 1), GREEDY)
    assert compiled == []
    check(model, output)
    check_books(llm)


def test_two_at_once_and_short_ones(model, llm):
    """Both have pages in the groups that a step reads from the host."""
    engine, rows_on_host = llm.engine, 0
    lengths = (150, POOL * PAGE + 1, 7, POOL * PAGE - OUTPUT + 1, POOL * PAGE)
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    ids = [engine.add(f"two-{place}", each, GREEDY) for place, each in enumerate(prompts)]
    while engine.has_work:
        engine.step()
        tables = engine.scheduler.tables.values()
        rows_on_host = max(rows_on_host, sum(table.num_released > 0 for table in tables))
    assert rows_on_host == 2
    for each in ids:
        check(model, engine.output(each))
    check_books(llm)


def test_pages_and_queries_cost_what_the_formulas_say(model, llm):
    """The same six decodes after 150 tokens, 8 pages of which are on the host, cost keys and values
    of these, or queries, results and log-sum-exps of a token, whatever there is on the host."""
    config, once = model.config, dataclasses.replace(GREEDY, max_tokens=1)

    def of_decodes(llm):
        copies = llm.engine.counters.host_kv_copies
        found = []
        for params in (once, dataclasses.replace(GREEDY, max_tokens=7)):
            before = copies.page_bytes, copies.query_bytes
            output = generate(llm, prompt_of(150), params)
            found.append((copies.page_bytes - before[0], copies.query_bytes - before[1]))
        metrics = llm.get_metrics()
        assert metrics["jaxserve:kv_host_page_bytes_total"].value == copies.page_bytes
        assert metrics["jaxserve:kv_host_query_bytes_total"].value == copies.query_bytes
        return output, *np.subtract(found[1], found[0])

    layers, heads, dim = 3, config.num_heads, config.head_dim
    with load(model, host_attention="disabled") as copying:
        check(model, generate(copying, prompt_of(300), GREEDY))
        check_books(copying)
        output, page_bytes, query_bytes = of_decodes(copying)
    of_page = PAGE * 2 * config.num_kv_heads * dim * 4
    assert (page_bytes, query_bytes) == (6 * layers * 8 * of_page, 0)
    sent, page_bytes, query_bytes = of_decodes(llm)
    assert (page_bytes, query_bytes) == (0, 6 * layers * heads * (2 * dim * 4 + 4))
    assert sent.outputs[0].token_ids == output.outputs[0].token_ids


def errors_of_logprobs(model, llm):
    """How far the log probabilities of a prompt's tokens are from those of a dense pass."""
    prompt = prompt_of(10 * PAGE + 3)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    scores = generate(llm, prompt, scored).prompt_logprobs
    found = [entry[token].logprob for entry, token in zip(scores[1:], prompt[1:])]
    padded = np.zeros(LENGTH + PAGE, np.int32)
    padded[: len(prompt)] = prompt
    logits = oracle.dense_logits(model.family, model.params, model.config, padded)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return np.abs(found - exact[np.arange(len(found)), prompt[1:]])


def test_log_probabilities_are_those_of_a_dense_pass(model, llm):
    """Up to the order of the sums."""
    assert errors_of_logprobs(model, llm).max() < 1e-4


def test_an_abort_and_a_preemption_free_the_host(model, llm):
    engine = llm.engine
    first = engine.add("stays", prompt_of(90, 1), GREEDY)
    engine.add("goes", prompt_of(140, 2), GREEDY)
    for _ in range(16):
        engine.step()
    assert engine.kv.host_pages.num_used > 0
    engine.abort("goes")
    (seq,) = engine.scheduler.running
    engine.scheduler.preempt(seq)
    assert engine.kv.host_pages.num_used == 0
    while engine.has_work:
        engine.step()
    check(model, engine.output(first))
    check_books(llm)


def test_a_snapshot_and_a_sleep(model, llm, tmp_path):
    """What was on the host is computed again."""
    stream = llm.stream({"prompt_token_ids": prompt_of(6 * PAGE)}, GREEDY)
    for _ in range(10):
        llm.engine.step()
    llm.snapshot(tmp_path)
    stream.close()
    check_books(llm)
    (again,) = llm.restore(tmp_path)
    llm.sleep()
    llm.wake_up()
    check(model, again.result())
    check_books(llm)


def test_bfloat16_rounds_no_more_than_elsewhere(model):
    """Parts of an attention are merged in float32."""
    few = {"dtype": "bfloat16", "max_num_seqs": 1, "max_num_batched_tokens": 1 + 16}
    with load(model, **few) as llm:
        assert errors_of_logprobs(model, llm).mean() < 0.1


def test_quantized_pages_adapters_and_streamed_weights(model, tmp_path):
    path = write_adapter(tmp_path / "a", model)
    adapted = merged(model, path, tmp_path / "merged").with_kv("int8")
    features = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1 + 16,
        "enable_lora": True,
        "max_loras": 1,
        "weights_on": "disk",
    }
    with load(model.with_kv("int8"), **features) as llm:
        (output,) = llm.generate(
            prompt_of(100), GREEDY, use_tqdm=False, lora_request=LoRARequest("a", path)
        )
        check(adapted, output)
        check_books(llm)


@pytest.mark.parametrize(
    ("member", "way"),
    [
        ("deepseek_v3", "enabled"),
        ("gemma2", "disabled"),
        combination("deepseek_v3", "disabled"),
        combination("gemma2", "enabled"),
        combination("gemma3", "enabled"),
        combination("gpt_oss", "enabled"),
    ],
)
def test_latents_and_layers_with_a_window(tmp_path, member, way):
    """Those with a window have all that they need in the pool."""
    model = TinyModel.write_member(tmp_path, member)
    settings = model.settings(max_num_seqs=1, max_num_batched_tokens=1 + 16)
    settings |= {"kv_on": "host", "host_attention": way, "debug_kv": True}
    memory = engine_plan.decide(EngineConfig(model.path, **settings)).memory
    layout = memory.layout
    pool = layout.num_full * layout.chunk_pages + layout.window_pages
    settings["kv_cache_memory_bytes"] = (1 + pool) * memory.page_bytes
    settings["host_kv_bytes"] = CONTEXT // PAGE_SIZE * layout.num_full * memory.page_bytes
    with LLM(model.path, **settings) as llm:
        (output,) = (generate(llm, model.prompts[-1], GREEDY),)
        assert llm.engine.kv.host_limits.on_host(len(model.prompts[-1])) > 0
        model.check_greedy(output)
        check_books(llm)


# What is planned, and refused


def test_a_request_that_needs_a_page_more_than_the_host_has_is_refused_alone(model, llm):
    assert llm.plan().memory.longest_tokens == LENGTH
    engine = llm.engine
    other = engine.add("fits", prompt_of(100), GREEDY)
    with pytest.raises(PromptTooLongError, match=rf"needs 51 KV pages .* {HOST} on the host"):
        engine.add("does not", prompt_of(LENGTH - OUTPUT + 2), GREEDY)
    while engine.has_work:
        engine.step()
    check(model, engine.output(other))
    check_books(llm)


def test_the_plan_counts_the_window_and_the_host(model):
    """The window, where pages are copied to the device."""
    settings = settings_of(model, host_attention="disabled")
    decided = engine_plan.plan_engine(EngineConfig(model.path, **settings))
    assert str(decided).endswith("to attend to pages on the host, steps copy them")
    assert "KV that a decode after 816 tokens reads from the host" in capacity(decided)
    planned = decided.memory
    assert planned.host_pages == HOST
    of_layer = planned.page_bytes // 3
    assert planned.staging_bytes == planned.kv_window_bytes == 2 * RESIDENT * of_layer
    settings = settings_of(model, host_attention="enabled")
    decided = engine_plan.plan_engine(EngineConfig(model.path, **settings))
    assert str(decided).endswith("steps send queries")
    assert "queries and results of a decode after 816 tokens" in capacity(decided)
    assert (decided.memory.host_pages, decided.memory.staging_bytes) == (HOST, 0)
    default = settings_of(model) | {"host_kv_bytes": None}
    planned = engine_plan.plan_engine(EngineConfig(model.path, **default)).memory
    assert planned.host_pages == (LENGTH + PAGE) // PAGE - RESIDENT


def test_each_of_several_replicas_has_the_pages_of_the_longest_request(model):
    config = EngineConfig(model.path, **settings_of(model) | {"host_kv_bytes": None})
    planned = asyncio.run(Replica().plan(config, 3))
    assert planned.host_kv_bytes == engine_plan.plan_engine(config).memory.host_bytes


@pytest.mark.parametrize(
    ("kv_on", "pages", "free", "expected"),
    [
        ("device", 200, 0, 200 - 32),  # Two copies of 16 pages, one for each step.
        ("device", 200, 40, 200),
        ("device", 72, 0, 72 - 16),  # A quarter is one copy.
        ("device", 64, 0, 64),  # The longest request needs 52 with the trash page.
        ("device", 64, 10, 64 - 6),
        ("host", 200, 0, 200),
    ],
)
def test_a_pool_gives_up_pages_for_copies_but_none_of_the_longest_request(
    model, kv_on, pages, free, expected
):
    settings = settings_of(model, pool=pages - 1, host_kv_bytes=None, kv_on=kv_on)
    planned = engine_plan.plan_engine(EngineConfig(model.path, **settings))
    memory = planned.memory
    limit = memory.total_bytes + free * memory.page_bytes
    tight = dataclasses.replace(memory, limit_bytes=limit)
    assert _pages_beside_copies(dataclasses.replace(planned, memory=tight)) == expected


def test_a_host_that_gives_no_memory_is_refused(model):
    planned = engine_plan.plan_engine(EngineConfig(model.path, **settings_of(model)))
    endless = dataclasses.replace(planned.shapes, num_host_pages=1 << 50)
    with pytest.raises(ConfigError, match=r"host has no memory for .*; set host_kv_bytes to"):
        HostKVStore(endless)


def test_a_pool_without_room_for_a_steps_tokens_is_refused(model):
    settings = settings_of(model, pool=3, max_num_batched_tokens=2 + 48)
    with pytest.raises(MemoryPlanError, match=r"48 tokens of one sequence may lie on 4; set kv_ca"):
        engine_plan.plan_engine(EngineConfig(model.path, **settings))


@pytest.mark.parametrize(
    "refused",
    [
        {"program_scope": "step"},
        {"batch_invariant": True},
        {"sequence_parallel": True, "tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"context_parallel_size": 2},
        {"preemption": "swap"},
        {"disk_kv_dir": "pages", "disk_kv_bytes": 1 << 20},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
)
def test_what_it_does_not_combine_with_is_refused_by_name(refused):
    with pytest.raises(ConfigError, match=rf"kv_on is 'host', but {next(iter(refused))} is"):
        EngineConfig(kv_on="host", **refused)


def test_windows_are_refused_where_they_are_all_there_is_or_in_blocks(tmp_path):
    small = {"kv_on": "host", "page_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 16}
    path = TinyModel.write_member(tmp_path / "all", "mistral").path
    with pytest.raises(ConfigError, match=r"kv_on is 'host', but all layers of Mistral\w+ have a"):
        engine_plan.plan_engine(EngineConfig(path, **small))
    path = TinyModel.write_member(tmp_path / "some", "gemma2").path
    in_blocks = {"weights_on": "disk", "steps_per_weight_read": 2}
    with pytest.raises(ConfigError, match=r"steps_per_weight_read is 2 and kv_on 'host', but Gemm"):
        engine_plan.plan_engine(EngineConfig(path, **small | in_blocks | {"max_num_seqs": 2}))
    with pytest.raises(ConfigError, match="kv_compression is 'sparf', but Gemma2"):
        engine_plan.plan_engine(EngineConfig(path, kv_compression="sparf", **small))
