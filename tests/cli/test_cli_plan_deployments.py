"""Which deployments hold published models, planned from their config.json alone: the weights and
the KV of each device to the byte, and the table of the page of models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_families import PUBLISHED

from jaxserve.cli import main
from jaxserve.core.devices import DeviceSpec
from jaxserve.core.errors import MemoryPlanError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.hardware.devices import DescribedDevice
from jaxserve.runtime.startup.engine_plan import plan_described

MODELS_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BF16, PAGE = 2, 64
DEPLOYMENTS = {"one H200": ("h200", 1), "eight H200": ("h200", 8), "a v6e-8": ("v6e", 8)}
FITTING = {
    "Llama-3.1-8B": ("one H200", "eight H200", "a v6e-8"),
    "Llama-3.1-70B": ("eight H200", "a v6e-8"),
    "Gemma-3-27B": ("one H200", "eight H200", "a v6e-8"),
    "gpt-oss-120b": ("one H200", "eight H200", "a v6e-8"),
    "Qwen3-235B-A22B": ("eight H200",),
    "DeepSeek-V3": ("eight H200",),
}


def planned(tmp_path, name, deployment):
    """The memory of each device; None where the engine does not fit."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name]))
    kind, tensor = DEPLOYMENTS[deployment]
    spec = DeviceSpec.of(kind)
    config = EngineConfig(
        path,
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=16,
        page_size=PAGE,
        tensor_parallel_size=tensor,
    )
    device = DescribedDevice(spec.platform, spec.kind, spec.memory_bytes)
    try:
        return plan_described(config, device, propose=False).memory
    except MemoryPlanError:
        return None


IN_ORDER = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt-oss-120b", {}),
        ("DeepSeek-V3", {}),
        ("Llama-3.1-8B", {"quantization_config": IN_ORDER}),
    ],
)
def test_the_placement_of_packed_weights_is_printed(tmp_path, capsys, name, fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name] | fields))
    flags = ["--load-format", "dummy", "--device", "h200", "--tensor-parallel-size", "8"]
    assert main(["plan", str(path), *flags, "--max-model-len", "4096"]) == 0
    printed = capsys.readouterr().out
    assert "values" in printed and "scales" in printed
    assert ("order" in printed) == ("quantization_config" in fields)


@pytest.mark.parametrize("name", FITTING)
def test_which_deployments_hold_a_model(tmp_path, name):
    """As the page says: GiB of weights on each device, or a dash."""
    found = {deployment: planned(tmp_path, name, deployment) for deployment in DEPLOYMENTS}
    assert tuple(deployment for deployment, memory in found.items() if memory) == FITTING[name]
    cells = [f"{memory.weights_bytes / 2**30:.1f}" if memory else "-" for memory in found.values()]
    assert f"| {name} | {' | '.join(cells)} |" in MODELS_PAGE.read_text("utf-8")


def of_llama(raw, ranks):
    """Parameters of a rank: heads, inner dimension and vocabulary are divided, norms are not."""
    hidden, dim = raw["hidden_size"], raw["hidden_size"] // raw["num_attention_heads"]
    heads, kv_heads = raw["num_attention_heads"] // ranks, raw["num_key_value_heads"] // ranks
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    of_layer = attention + 3 * hidden * raw["intermediate_size"] // ranks + 2 * hidden
    vocabulary = 2 * raw["vocab_size"] // ranks * hidden
    return vocabulary + raw["num_hidden_layers"] * of_layer + hidden


def of_qwen3_moe(raw, ranks):
    """Every rank has a KV head, of four that are copied; a part of each expert; all of the
    router."""
    hidden, dim, experts = raw["hidden_size"], raw["head_dim"], raw["num_experts"]
    heads, kv_heads = raw["num_attention_heads"] // ranks, raw["num_key_value_heads"] * 2 // ranks
    attention = hidden * dim * (2 * heads + 2 * kv_heads) + 2 * dim
    mixture = experts * (3 * hidden * raw["moe_intermediate_size"] // ranks + hidden)
    vocabulary = 2 * raw["vocab_size"] // ranks * hidden
    return vocabulary + raw["num_hidden_layers"] * (attention + mixture + 2 * hidden) + hidden


@pytest.mark.parametrize(
    "name, deployment, count, kv_heads",
    [
        ("Llama-3.1-8B", "one H200", of_llama, 8),
        ("Llama-3.1-8B", "a v6e-8", of_llama, 1),
        ("Llama-3.1-70B", "eight H200", of_llama, 1),
        ("Qwen3-235B-A22B", "eight H200", of_qwen3_moe, 1),
    ],
)
def test_bytes_of_each_device(tmp_path, name, deployment, count, kv_heads):
    memory, raw = planned(tmp_path, name, deployment), PUBLISHED[name]
    ranks = DEPLOYMENTS[deployment][1]
    assert memory.num_devices == ranks
    assert memory.weights_bytes == BF16 * count(raw, ranks)
    dim, layers = 128, raw["num_hidden_layers"]
    assert memory.page_bytes == PAGE * layers * 2 * kv_heads * dim * BF16
    assert memory.kv_bytes == memory.num_pages * memory.page_bytes


def test_bytes_of_gpt_oss_on_each_of_eight_devices(tmp_path):
    """Its experts packed: a byte for a value, and scales of two bytes for 32 inputs, or for 8 where
    the 2,880 inputs are divided."""
    raw, ranks = PUBLISHED["gpt-oss-120b"], 8
    hidden, dim, experts = raw["hidden_size"], raw["head_dim"], raw["num_local_experts"]
    heads, kv_heads = raw["num_attention_heads"] // ranks, raw["num_key_value_heads"] // ranks
    inner, qkv = raw["intermediate_size"] // ranks, (heads + 2 * kv_heads) * dim
    attention = BF16 * (qkv * hidden + qkv + heads * dim * hidden + hidden + heads)
    router = BF16 * (experts * hidden + experts)
    gate_up = experts * 2 * inner * (hidden + BF16 * hidden // 32 + BF16)
    down = experts * hidden * (inner + BF16 * inner // 8 + BF16)
    of_layer = attention + router + gate_up + down + BF16 * 2 * hidden
    outside = BF16 * (2 * raw["vocab_size"] // ranks * hidden + hidden)
    memory = planned(tmp_path, "gpt-oss-120b", "eight H200")
    assert memory.weights_bytes == outside + raw["num_hidden_layers"] * of_layer


def test_parameters_of_published_llamas():
    """Meta's numbers of parameters."""
    assert of_llama(PUBLISHED["Llama-3.1-8B"], 1) == 8_030_261_248
    assert of_llama(PUBLISHED["Llama-3.1-70B"], 1) == 70_553_706_496
