"""What the KV manager says of itself: names, kinds, and numbers that add up."""

from __future__ import annotations

import dataclasses

import pytest
from kv_engines import Preempter, count, evict_all, settle
from tiny_engines import LONGEST, NUM_PAGES, PROMPT_LENGTHS, Arrival, drive, generate

from jaxserve.core.events import Transferred
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import PagePool
from jaxserve.kv.tier import Tier
from jaxserve.metrics.kv_metrics import kv_metrics

SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=LONGEST, ignore_eos=True)


def values(engine):
    return {name.split(":")[1]: metric.value for name, metric in engine.get_metrics().items()}


def test_every_metric_is_shaped_for_an_exporter():
    metrics = kv_metrics(KVManager(PagePool(9, 4)), max_model_len=10)
    config = metrics.pop("vllm:cache_config_info")
    assert config.kind == "info"
    assert config.value == {
        "block_size": "4",
        "num_gpu_blocks": "8",
        "num_cpu_blocks": "0",
        "enable_prefix_caching": "True",
        "kv_cache_size_tokens": "32",
        "kv_cache_max_concurrency": "3.2",
    }
    assert metrics.pop("vllm:kv_cache_usage_perc").value == 0
    for name, metric in metrics.items():
        assert name.startswith("jaxserve:kv_")
        assert (metric.kind == "counter") == name.endswith("_total"), name
        assert (metric.label is not None) == isinstance(metric.value, dict), name
        assert metric.help
    assert metrics["jaxserve:kv_pages"].value == {"free": 8, "used": 0, "cached": 0}
    assert metrics["jaxserve:kv_transfer_bytes_per_second"].value == {}


def test_pages_are_in_one_state_at_every_step(llama, kv_llm_for):
    engine = kv_llm_for(host=12, disk=64, preemption="swap").engine
    used = set()

    def look():
        now = values(engine)
        assert sum(now["kv_pages"].values()) == NUM_PAGES - 1
        assert now["kv_offload_capacity_pages"] == {"host": 12, "disk": 64}
        for tier, pages in now["kv_offload_pages"].items():
            assert 0 <= pages <= now["kv_offload_capacity_pages"][tier]
        used.add(now["kv_pages"]["used"])
        assert now["kv_cache_usage_perc"] == now["kv_pages"]["used"] / (NUM_PAGES - 1)

    arrivals = [Arrival(prompt, SEEDED, step) for step, prompt in enumerate(llama.prompts)]
    drive(engine, arrivals, look)
    assert max(used) > 20
    settle(engine)
    now = values(engine)
    assert now["kv_pages"]["used"] == now["kv_transfers_in_flight"] == 0
    assert now["kv_cache_usage_perc"] == 0
    assert now["kv_nodes"] >= now["kv_pages"]["cached"]


def test_one_conversation_by_the_numbers(llama, kv_llm_for):
    """A prompt of 17 tokens and 4 more: 20 are written, on 5 pages."""
    llm = kv_llm_for(host=64, preemption="swap")
    engine, prompt = llm.engine, llama.prompts[PROMPT_LENGTHS.index(17)]
    params = dataclasses.replace(SEEDED, max_tokens=4)
    before = values(engine)

    def gained(name, label=None):
        now, then = values(engine)[name], before[name]
        if label is not None:
            now, then = now.get(label, 0), then.get(label, 0)
        return now - then

    generate(llm, prompt, params)
    assert count(engine, "kv_pages", "cached") == count(engine, "kv_nodes") == 5
    evict_all(engine)
    assert gained("kv_evicted_pages_total") == 5
    assert gained("kv_lost_pages_total") == 0
    assert gained("kv_saved_pages_total", "host") == 5
    assert count(engine, "kv_offload_pages", "host") == 5
    page_bytes = llm.plan().memory.page_bytes
    assert gained("kv_transferred_bytes_total", "device-host") == 5 * page_bytes
    output = generate(llm, prompt, params)
    assert output.metrics.cached_tokens == 16
    assert gained("kv_fetched_pages_total", "host") == 4
    assert gained("kv_transferred_bytes_total", "host-device") == 4 * page_bytes
    assert gained("prefix_cache_queries_total") == 2 * 17
    assert gained("prefix_cache_hits_total") == 16
    assert gained("kv_copied_pages_total") == 0
    assert gained("kv_fallbacks_total", "failed") == gained("kv_fallbacks_total", "slow") == 0
    llm.reset_prefix_cache()
    assert count(engine, "kv_nodes") == 0
    assert count(engine, "kv_offload_pages", "host") == 0


def test_preempted_sequences_are_counted_by_what_became_of_them(llama, kv_llm_for):
    for preemption, kind in (("swap", "swap"), ("recompute", "recompute")):
        engine = kv_llm_for(host=64, preemption=preemption).engine
        before = dict(values(engine)["kv_preemptions_total"])
        preempter = Preempter(engine)
        drive(engine, [Arrival(llama.prompts[6], SEEDED)], preempter)
        after = values(engine)["kv_preemptions_total"]
        assert after[kind] - before[kind] == preempter.count > 0
        other = {"swap": "recompute", "recompute": "swap"}[kind]
        assert after[other] == before[other]


def test_rates_are_measured_from_the_start(llama, kv_llm_for):
    """Moves are timed at startup, prefills as they come."""
    llm = kv_llm_for(host=12, disk=64)
    generate(llm, llama.prompts[-1], SEEDED)
    generate(llm, llama.prompts[-2], SEEDED)
    now = values(llm.engine)
    rates = llm.engine.kv.rates
    for way in ("device-host", "host-device", "host-disk", "disk-device"):
        assert rates.transfer_us(*map(Tier, way.split("-")), 1 << 20) > 0, way
    assert set(now["kv_transfer_bytes_per_second"]) == {
        "device-host",
        "host-device",
        "device-disk",
        "disk-device",
    }
    assert now["kv_prefill_tokens_per_second"] > 0


def test_moves_of_the_log_are_those_counted(llama, kv_llm_for):
    engine = kv_llm_for(host=12, disk=64, preemption="swap").engine
    first, before = len(engine.log.records), values(engine)["kv_transferred_bytes_total"]
    arrivals = [Arrival(prompt, SEEDED, step) for step, prompt in enumerate(llama.prompts)]
    drive(engine, arrivals, Preempter(engine, evicts=True))
    settle(engine)
    moved = [record for record in engine.log.records[first:] if isinstance(record, Transferred)]
    assert moved
    ways = {}
    for record in moved:
        assert 0 < record.pages <= 16
        assert record.bytes == record.pages * engine.plan.memory.page_bytes
        assert record.begin_us <= record.time_us
        if record.error is None:
            way = f"{record.source}-{record.target}"
            ways[way] = ways.get(way, 0) + record.bytes
    after = values(engine)["kv_transferred_bytes_total"]
    assert ways == {way: after[way] - before.get(way, 0) for way in after if way in ways}


@pytest.mark.parametrize("name", ["vllm:num_requests_running", "vllm:num_requests_waiting"])
def test_gauges_come_back_to_zero(llama, kv_llm_for, name):
    engine = kv_llm_for(host=12, disk=64, preemption="swap").engine
    arrivals = [Arrival(prompt, SEEDED, step) for step, prompt in enumerate(llama.prompts)]
    seen = set()
    drive(engine, arrivals, lambda: seen.add(engine.get_metrics()[name].value))
    assert engine.get_metrics()[name].value == 0
    assert min(seen) >= 0 < max(seen)
