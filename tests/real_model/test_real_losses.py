"""SmolLM2 when a replica is lost, and when pages on disk are: the golden tokens all the same."""

from __future__ import annotations

import itertools
import os

import pytest
from golden_prompts import check_golden, golden_prompts
from kv_engines import evict_all
from real_engines import GREEDY, MESH_TOKENS, load_alone, page_bytes
from routed_requests import routed, run
from tiny_engines import generate

from jaxserve.engine.output_queue import merge
from jaxserve.kv.tier import Tier

pytestmark = pytest.mark.real_model


def test_a_request_goes_on_in_another_replica(llm):
    """It is lost twice; its client receives every token once."""
    golden = golden_prompts("code_python", "french")
    for entry in golden:
        request, received = routed(entry.prompt_token_ids, GREEDY), []
        for steps, every in ((6, 2), (4, 1)):
            received += run(llm.engine, request, steps, every)[0]
            request.lose()
        rest, output = run(llm.engine, request)
        check_golden([entry], [output])
        (whole,) = merge(received + rest)
        assert received and len(whole.token_ids) == MESH_TOKENS
        assert whole.token_ids == output.outputs[0].token_ids
        assert whole.text == output.outputs[0].text


def test_pages_come_from_disk_or_are_computed_again(smollm2_path, tmp_path):
    golden = golden_prompts("chat_many_turns")
    tier = {"disk_kv_dir": tmp_path, "disk_kv_bytes": 64 * page_bytes(smollm2_path)}
    with load_alone(smollm2_path, preemption="swap", debug_kv=True, **tier) as llm:
        cached = []
        for turn in itertools.count():
            output = generate(llm, golden[0].prompt_token_ids, GREEDY)
            check_golden(golden, [output])
            cached.append(output.metrics.cached_tokens)
            if turn == 2:
                break
            evict_all(llm.engine)
            if turn == 1:  # All that was written is gone.
                os.ftruncate(llm.engine._kv_executor.stores[Tier.DISK]._file.fileno(), 0)
        first, from_disk, damaged = cached
        assert first == damaged == 0 < from_disk
        assert llm.get_metrics()["jaxserve:kv_fallbacks_total"].value["failed"] > 0
