"""Counts of drafts in a server's metrics."""

from __future__ import annotations

from jaxserve.loadgen.draft_counts import ServerDraftCounts, parsed

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3.2e+01
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 1.0
vllm:num_requests_running{engine="0"} 3.0
"""


def test_replicas_are_summed():
    assert parsed(METRICS) == ServerDraftCounts(12, 32, 9, (6, 3))
    assert parsed("vllm:num_requests_running 1.0\n") is None


def test_a_load_has_what_was_counted_during_it():
    counts = ServerDraftCounts(12, 32, 9, (6, 3)).since(ServerDraftCounts(2, 4, 3, (3,)))
    assert counts == ServerDraftCounts(10, 28, 6, (3, 3))
    assert dict(counts.rows()) == {
        "drafts": "10",
        "draft tokens": "28",
        "of which accepted": "6 (21.4%)",
        "tokens a drafted step": "1.60",
        "drafts accepted up to position 1": "30.0%",
        "drafts accepted up to position 2": "30.0%",
    }
    assert dict(ServerDraftCounts(0, 0, 0).rows()) == {"drafts": "0"}
