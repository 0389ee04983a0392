"""/metrics by a Prometheus parser, under the names that vLLM's dashboards ask for."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import CONTEXT

pytestmark = pytest.mark.interfaces

COUNTERS = {
    "vllm:num_preemptions",
    "vllm:admission_rejections",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:request_success",
    "jaxserve:programs_compiled",
}
GAUGES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "jaxserve:device_busy_share",
    "jaxserve:startup_seconds",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:iteration_tokens_total",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_num_preemptions",
    "vllm:request_params_n",
    "vllm:request_params_max_tokens",
    "jaxserve:fluidity_index",
}


def test_names_types_and_labels(server):
    server.complete({"prompt": "measure me", "max_tokens": 4, "ignore_eos": True})
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = {f.name: f for f in text_string_to_metric_families(response.text)}
    for names, kind in ((COUNTERS, "counter"), (GAUGES, "gauge"), (HISTOGRAMS, "histogram")):
        for name in names:
            assert families[name].type == kind, name
            for sample in families[name].samples:
                assert sample.labels["model_name"] == "tiny"
    (cache,) = families["vllm:cache_config_info"].samples
    assert cache.value == 1 and cache.labels["block_size"] == "16"
    size, most = cache.labels["kv_cache_size_tokens"], cache.labels["kv_cache_max_concurrency"]
    assert float(most) == round(int(size) / CONTEXT, 2) > 0
    phases = {s.labels["phase"] for s in families["jaxserve:startup_seconds"].samples}
    assert len(phases) >= 3


def test_counters_count(server):
    before = server.metrics()
    server.complete({"prompt": [9] * 7, "max_tokens": 5, "n": 2, "ignore_eos": True})
    after = server.metrics()

    def gained(*name: str) -> float:
        return after[name] - before[name]

    assert gained("vllm:generation_tokens_total") == 10
    assert gained("vllm:prompt_tokens_total") == 14
    assert gained("vllm:request_success_total", "length") == 2
    assert gained("vllm:e2e_request_latency_seconds_count") == 2
    assert gained("vllm:time_to_first_token_seconds_count") == 2
    # As vLLM's own test counts.
    assert gained("vllm:iteration_tokens_total_sum") == 14 + 10
    assert gained("vllm:request_prompt_tokens_sum") == 14
    assert gained("vllm:request_generation_tokens_sum") == 10
    assert gained("vllm:request_params_n_sum") == 2
    assert gained("vllm:request_params_max_tokens_sum") == 10
    bounds = [name for name in after if name[0] == "vllm:time_to_first_token_seconds_bucket"]
    counts = [after[name] for name in sorted(bounds, key=lambda name: float(name[1]))]
    assert counts == sorted(counts) and bounds[-1][1] == "+Inf"


@pytest.mark.parametrize("form", ["TEXT", "json"])
def test_routers_get_the_load_with_an_answer(server, form):
    """As ORCA has it, and vLLM writes it."""
    header = {"endpoint-load-metrics-format": form}
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, **header)
    kind, _, told = answer.headers["endpoint-load-metrics"].partition(" ")
    assert kind == form.upper()
    if kind == "JSON":
        load = json.loads(told)["named_metrics"]
    else:
        load = dict(pair.removeprefix("named_metrics.").split("=") for pair in told.split(", "))
    assert load.keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
    assert all(float(value) >= 0 for value in load.values())
    plain = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    assert "endpoint-load-metrics" not in plain.headers


def test_an_idle_server_uses_no_pages(server):
    """Routers send a request to the replica with the least KV in use."""
    body = {"prompt": "busy", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # Kept: without it the stream would be closed.
        next(lines)
        assert server.metrics()["vllm:kv_cache_usage_perc",] > 0
    server.wait_idle()
    assert server.metrics()["vllm:kv_cache_usage_perc",] == 0
