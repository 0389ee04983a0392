"""/metrics by a Prometheus parser, under the names that vLLM's dashboards ask for."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.interfaces

COUNTERS = {
    "vllm:num_preemptions",
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
    "vllm:kv_cache_usage_perc",
    "jaxserve:device_busy_share",
    "jaxserve:startup_seconds",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
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
    bounds = [name for name in after if name[0] == "vllm:time_to_first_token_seconds_bucket"]
    counts = [after[name] for name in sorted(bounds, key=lambda name: float(name[1]))]
    assert counts == sorted(counts) and bounds[-1][1] == "+Inf"
