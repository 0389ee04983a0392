"""`plan` of published models from their config.json alone: weights and KV by formula, exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from published_configs import DEEPSEEK_V3, GEMMA_3_27B, GPT_OSS_120B, PHI_4_MINI

from jaxserve.cli import main
from jaxserve.cli.planning.plan_tables import memory_table
from jaxserve.core.settings.config import EngineConfig
from jaxserve.models.moe_specs import active_parameters
from jaxserve.runtime.startup import engine_plan

MODELS_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PAGE, CHUNK, CONTEXT = 64, 1791, 32_768
BF16 = 2
SETTINGS = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "page_size": PAGE,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1 + CHUNK,
    "max_model_len": CONTEXT,
    "host_kv_bytes": 0,
    "memory_utilization": 1e-6,  # so that it does not fit, and nothing is compiled
}


@pytest.fixture
def config_of(tmp_path):
    def write(raw):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(raw))
        return path

    return write


def test_windowed_layers_of_gemma_3_27b_cost_a_window(config_of, capsys):
    """Ten of its 62 layers have no window, and a page has the layers of one group: ten as well."""
    path = config_of(GEMMA_3_27B)
    memory = engine_plan.decide(EngineConfig(path, **SETTINGS)).memory
    vocab, hidden, inner, heads, kv_heads, dim, layers = 262_208, 5376, 21_504, 32, 16, 128, 62
    attention = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden
    of_layer = attention + 3 * hidden * inner + 4 * hidden + 2 * dim
    assert memory.weights_bytes == BF16 * (vocab * hidden + layers * of_layer + hidden)

    page_of_layer = 2 * kv_heads * dim * BF16 * PAGE
    of_window = -(-(1024 - 1) // PAGE) + -(-(CHUNK - 1) // PAGE) + 1
    pages = CONTEXT // PAGE + 6 * of_window  # 52 windowed layers are six groups of ten
    assert memory.layout.pages_for(CONTEXT) == pages
    assert memory.kv_bytes == (pages + 1) * 10 * page_of_layer  # one page is for padding
    full = CONTEXT // PAGE * layers * page_of_layer
    gib = [size / 2**30 for size in (pages * 10 * page_of_layer, full)]
    assert "takes {:.1f} GiB of KV, not {:.1f}".format(*gib) in MODELS_PAGE.read_text("utf-8")

    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    assert main(["plan", str(path), *flags]) == 1
    printed = capsys.readouterr()
    assert f"KV pool, {pages + 1:,} pages of {PAGE}" in printed.out
    assert re.search(r"error: .*needs .*weights 50\.\d+ GiB", printed.err)


def test_gpt_oss_120b(config_of):
    """Half of its layers have a window of 128 tokens: a group of 18 layers each. A weight of an
    expert is a byte, and two for 32 of them."""
    memory = engine_plan.decide(EngineConfig(config_of(GPT_OSS_120B), **SETTINGS)).memory
    vocab, hidden, heads, kv_heads, dim, layers, experts = 201_088, 2880, 64, 8, 64, 36, 128
    attention = (hidden + 1) * dim * (heads + 2 * kv_heads) + (heads * dim + 1) * hidden + heads
    of_layer = attention + 2 * hidden + experts * (hidden + 1 + 3 * hidden)
    packed = layers * experts * 3 * hidden * hidden
    others = BF16 * (2 * vocab * hidden + layers * of_layer + hidden)
    assert memory.weights_bytes == packed + BF16 * packed // 32 + others
    page_of_layer = 2 * kv_heads * dim * BF16 * PAGE
    of_window = -(-(128 - 1) // PAGE) + -(-(CHUNK - 1) // PAGE) + 1
    assert memory.layout.pages_for(CONTEXT) == CONTEXT // PAGE + of_window
    assert memory.kv_bytes == (CONTEXT // PAGE + of_window + 1) * layers // 2 * page_of_layer
    gib, kib = memory.weights_bytes / 2**30, layers * page_of_layer // PAGE // 2**10
    of_docs = f"takes {gib:.1f} GiB of weights and {kib} KiB of KV a token"
    assert of_docs in MODELS_PAGE.read_text("utf-8")


@pytest.mark.parametrize("context", [4096, CONTEXT])
def test_phi_4_mini(config_of, context):
    """Its window is longer than its context, which is to have none."""
    path = config_of(PHI_4_MINI)
    decided = engine_plan.decide(EngineConfig(path, **SETTINGS | {"max_model_len": context}))
    vocab, hidden, inner, heads, kv_heads, dim, layers = 200_064, 3072, 8192, 24, 8, 128, 32
    attention = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden
    of_layer = attention + 3 * hidden * inner + 2 * hidden
    memory = decided.memory
    assert memory.weights_bytes == BF16 * (vocab * hidden + layers * of_layer + hidden)
    page_bytes = 2 * kv_heads * dim * BF16 * PAGE * layers
    assert memory.kv_bytes == (context // PAGE + 1) * page_bytes
    assert not memory.layout.windowed and decided.shapes.model.rope.rotary_dim == 96


def test_deepseek_v3(config_of):
    """Its weights in bfloat16, not as published: a token keeps 576 numbers in each layer."""
    path = config_of(DEEPSEEK_V3 | {"quantization_config": None})
    decided = engine_plan.decide(EngineConfig(path, **SETTINGS))
    memory, (model, specs) = decided.memory, (decided.shapes.model, decided.shapes.specs)
    vocab, hidden, heads, layers, dense, experts = 129_280, 7168, 128, 61, 3, 256
    nope, rotated, value, latent, of_query = 128, 64, 128, 512, 1536
    queries = hidden * of_query + of_query + of_query * heads * (nope + rotated)
    keys = hidden * (latent + rotated) + latent + latent * heads * (nope + value)
    attention = queries + keys + heads * value * hidden + 2 * hidden
    expert, router = 3 * hidden * 2048, experts * (hidden + 1)

    def parameters(taken):
        sparse = (taken + 1) * expert + router
        of_mlps = dense * 3 * hidden * 18_432 + (layers - dense) * sparse
        return 2 * vocab * hidden + hidden + layers * attention + of_mlps

    assert round(parameters(experts) / 1e9) == 671 and 37 <= parameters(8) / 1e9 < 38
    assert active_parameters(model, specs) == parameters(8)
    corrections = (layers - dense) * experts  # in float32
    assert memory.weights_bytes == BF16 * (parameters(experts) + corrections)
    token_bytes = layers * (latent + rotated) * BF16
    assert memory.page_bytes == PAGE * token_bytes
    assert memory.kv_bytes == (CONTEXT // PAGE + 1) * PAGE * token_bytes
    of_heads = layers * heads * (nope + rotated + value) * BF16
    numbers = memory.weights_bytes / 2**30, token_bytes / 2**10, of_heads / 2**10
    of_docs = "takes {:,.1f} GiB of weights and {:.1f} KiB of KV a token, not {:,.0f}"
    assert of_docs.format(*numbers) in MODELS_PAGE.read_text("utf-8")
    assert f"KV pool of latents, {CONTEXT // PAGE + 1} pages" in memory_table(decided)
