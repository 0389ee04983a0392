"""Checkpoints with a `quantization_config` on a mesh: each device has its part of every format's
values, packed where one device has them packed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import family_members
import pytest
from draft_layers import mtp_checkpoint
from exhaustive import EXHAUSTIVE, exhaustive
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from lora_adapters import LLAMA, merged, write_adapter
from mesh_engines import load, on_mesh
from mesh_workload import GREEDY
from quantized_checkpoints import FORMATS, mxfp4, write
from tiny_checkpoints import CONFIG, fused_experts, hf_shapes, of_experts, write_gguf, write_hf
from tiny_engines import CONTEXT, EOS, Arrival, TinyModel, drive, member

from jaxserve import LoRARequest, SamplingParams
from pallas_kernels.quantized_matmul import MXFP4, QuantizedWeight

pytestmark = pytest.mark.meshes

PROMPTS = 2
"""The last, which are the longest."""
RAW = CONFIG | {
    "intermediate_size": 192,  # three groups of 32 for each device, and one and a half of 64
    "max_position_embeddings": CONTEXT,
    "eos_token_id": EOS,
}
FEW_FORMATS = ("fp8 in blocks", "compressed-tensors W8A8")
"""In CI; awq, weights in activation order and MXFP4 have tests of their own."""
GROUP_OF_PARTS = 8
EXPERTS = of_experts("Qwen3MoeForCausalLM") | {"moe_intermediate_size": 64}


def test_every_format_gives_the_tokens_of_one_device(tmp_path):
    on_mesh("TP2", check_formats, tmp_path)


def check_formats(mesh: str, directory: Path) -> None:
    for name in FORMATS if EXHAUSTIVE else FEW_FORMATS:
        model = written(directory / name, RAW, name)
        check(model, mesh, (0, 14))
    # Random weights are rounded to the format that the config names.
    drawn = written(directory / "drawn", RAW, "awq")
    with load(drawn, mesh, max_num_seqs=1, load_format="dummy") as llm:
        assert llm.plan().weights_dequantized == (0, 14)
        assert len(drive(llm.engine, [Arrival(drawn.prompts[0], GREEDY)])) == 1


@exhaustive
def test_packed_weights_beside_latents(tmp_path):
    """Queries and outputs of heads whose latent is on each device; in the layer that drafts too."""
    on_mesh("TP2", check_latents, tmp_path)


def check_latents(mesh: str, directory: Path) -> None:
    checkpoint = mtp_checkpoint()
    model = TinyModel.open(write(directory, checkpoint.raw, checkpoint.all_tensors, "fp8")[0])
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 3 + 16, "pages": 30}
    with load(model, mesh, **sizes, speculative_config=drafts) as llm:
        dequantized, number = llm.plan().weights_dequantized
        assert number and not dequantized
        state = llm.engine._runner._state
        for params in (state.params, state.draft_params):
            for name in ("queries", "attn_out"):
                assert isinstance(params["layers"][0][name], QuantizedWeight)
        few = SamplingParams(temperature=1, seed=3, max_tokens=60, allowed_token_ids=[7, 8])
        arrivals = [Arrival(prompt, GREEDY) for prompt in model.prompts[-PROMPTS:]]
        *outputs, guessed = drive(llm.engine, [*arrivals, Arrival(model.prompts[0], few)])
        for output in outputs:
            model.check_greedy(output)
        metrics = guessed.metrics
        assert metrics.num_draft_tokens / 4 < metrics.num_accepted_tokens


def test_stages_have_packed_weights(tmp_path):
    on_mesh("PP2", check_stages, tmp_path)
    on_mesh("TP2 PP2", check_mixed_blocks, tmp_path)


def check_stages(mesh: str, directory: Path) -> None:
    """As they are stored, and rounded while they load."""
    check(written(directory / "awq", RAW, "awq"), mesh, (0, 14))
    tensors = family_members.tensors(hf_shapes(RAW))
    plain = TinyModel.open(write_hf(directory / "hf", RAW, tensors))
    with_packed(plain.rounded("int8"), mesh, "int8")


def check_mixed_blocks(mesh: str, directory: Path) -> None:
    """Layers that run as one, of which one has other blocks."""
    tensors = family_members.tensors(hf_shapes(RAW))
    down = quants.quantize(tensors["model.layers.1.mlp.down_proj.weight"], Kind.Q8_0)
    raw = {"blk.1.ffn_down.weight": (down, Kind.Q8_0)}
    blocks = write_gguf(directory / "m.gguf", RAW, tensors, kind=Kind.Q4_1, raw=raw)
    model = TinyModel.open(blocks)
    with load(model, mesh, max_num_seqs=1, quantization="gguf") as llm:
        layer = llm.engine._runner._state.params["layers"][0]
        assert isinstance(layer["gate_up"], QuantizedWeight)
        assert not isinstance(layer["down"], QuantizedWeight)
        for output in drive(llm.engine, [Arrival(model.prompts[-1], GREEDY)]):
            model.check_greedy(output)


@exhaustive
def test_experts_are_split_or_whole(tmp_path):
    on_mesh("TP2", check_experts, tmp_path)


def check_experts(mesh: str, directory: Path) -> None:
    model = written(directory, RAW | EXPERTS, "awq")
    quantized = 2 * (4 + 4 * 3)
    check(model, mesh, (0, quantized))
    check(model, mesh, (0, quantized), enable_expert_parallel=True)


def test_inputs_in_activation_order(tmp_path):
    """Those of o_proj and down_proj are gathered, with sequence parallelism, where random weights
    are rounded, and beside adapters, too; experts whose inputs are split are dequantized."""
    on_mesh("TP2", check_order, tmp_path)


def check_order(mesh: str, directory: Path) -> None:
    name = "gptq in activation order"
    dense = written(directory / "dense", RAW, name)
    check(dense, mesh, (0, 14), sequence_parallel=True)
    check_adapters(mesh, directory / "dense")
    if not EXHAUSTIVE:
        return
    model = written(directory / "experts", RAW | EXPERTS, name)
    quantized = 2 * (4 + 4 * 3)
    check(model, mesh, (2 * 4, quantized))
    check(model, mesh, (0, quantized), enable_expert_parallel=True)
    shared = of_experts("Qwen2MoeForCausalLM") | {"shared_expert_intermediate_size": 64}
    model = written(directory / "shared", RAW | EXPERTS | shared, name)
    check(model, mesh, (2 * 4, 2 * (4 + 5 * 3)))
    drawn = {"load_format": "dummy", "enable_expert_parallel": True}
    with load(model, mesh, max_num_seqs=1, **drawn) as llm:
        assert llm.plan().weights_dequantized == (0, 2 * (4 + 5 * 3))
        assert len(drive(llm.engine, [Arrival(model.prompts[0], GREEDY)])) == 1


def check_adapters(mesh: str, directory: Path) -> None:
    """On the model in `quantized`, whose floats are in `plain`."""
    model = TinyModel.open(directory / "quantized")
    plain = TinyModel.open(directory / "plain")
    adapter = write_adapter(directory / "adapter", plain, seed=0, targets=LLAMA)
    own = merged(plain, adapter, directory / "merged")
    asked = LoRARequest("a", adapter)
    adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 6}
    with load(model, mesh, max_num_seqs=1, **adapters) as llm:
        (output,) = llm.generate([model.prompts[-1]], GREEDY, use_tqdm=False, lora_request=[asked])
        own.check_greedy(output)


def test_experts_in_mxfp4(tmp_path):
    """Parts of each, whose 24 inputs on four devices are three groups of 8, and whole experts."""
    on_mesh("TP4", check_mxfp4, tmp_path, GROUP_OF_PARTS)
    on_mesh("TP2", check_mxfp4, tmp_path, MXFP4.group_size, enable_expert_parallel=True)


def check_mxfp4(mesh: str, directory: Path, group: int, **settings: Any) -> None:
    raw = member("gpt_oss")[0] | {"num_experts": 6, "intermediate_size": 96}
    packed, plain = mxfp4(fused_experts(family_members.tensors(hf_shapes(raw))))
    own = {"quantization_config": {"quant_method": "mxfp4"}}
    path = write_hf(directory / f"packed {mesh}", raw | own, packed)
    model = TinyModel.open(write_hf(directory / f"plain {mesh}", raw, plain))
    with load(dataclasses.replace(model, path=path), mesh, max_num_seqs=1, **settings) as llm:
        assert llm.plan().weights_dequantized == (0, 3 * 6 * 3)
        for layer in llm.engine._runner._state.params["layers"]:
            assert layer["experts_gate_up"].format == MXFP4
            assert layer["experts_down"].format == dataclasses.replace(MXFP4, group_size=group)
        arrivals = [Arrival(prompt, GREEDY) for prompt in model.prompts[-PROMPTS:]]
        for output in drive(llm.engine, arrivals):
            model.check_greedy(output)


def test_weights_that_a_setting_packs(tmp_path):
    on_mesh("TP2", check_settings, tmp_path)
    on_mesh("TP2 CP2", check_blocks, tmp_path)


def check_blocks(mesh: str, directory: Path) -> None:
    tensors = family_members.tensors(hf_shapes(RAW))
    blocks = write_gguf(directory / "m.gguf", RAW, tensors, kind=Kind.Q4_1)
    with_packed(TinyModel.open(blocks), mesh, "gguf")


def check_settings(mesh: str, directory: Path) -> None:
    """Rounded while they load."""
    tensors = family_members.tensors(hf_shapes(RAW))
    plain = TinyModel.open(write_hf(directory / "hf", RAW, tensors))
    for quantization in ("int8", "int4") if EXHAUSTIVE else ("int4",):
        with_packed(plain.rounded(quantization), mesh, quantization)
    if not EXHAUSTIVE:
        return
    experts = RAW | EXPERTS
    plain = TinyModel.open(
        write_hf(directory / "experts", experts, family_members.tensors(hf_shapes(experts)))
    )
    with_packed(plain.rounded("int8"), mesh, "int8", enable_expert_parallel=True)


def with_packed(model: TinyModel, mesh: str, quantization: str, **settings: Any) -> None:
    with load(model, mesh, max_num_seqs=1, quantization=quantization, **settings) as llm:
        layer = llm.engine._runner._state.params["layers"][0]
        linear = [name for name in layer if name.split("_")[-1] in ("qkv", "out", "up", "down")]
        assert len(linear) == 4
        for name in linear:
            assert isinstance(layer[name], QuantizedWeight), name
            for array in (layer[name].values, layer[name].scales):
                shard = array.addressable_shards[0].data
                assert shard.size * 2 == array.size or array.shape[-1] == 1
        arrivals = [Arrival(prompt, GREEDY) for prompt in model.prompts[-PROMPTS:]]
        for output in drive(llm.engine, arrivals):
            model.check_greedy(output)


def written(directory: Path, raw: dict[str, Any], name: str) -> TinyModel:
    tensors = family_members.tensors(hf_shapes(raw))
    return TinyModel.open(write(directory, raw, tensors, name)[0])


def check(model: TinyModel, mesh: str, dequantized: tuple[int, int], **settings: Any) -> None:
    with load(model, mesh, max_num_seqs=1, **settings) as llm:
        assert llm.plan().weights_dequantized == dequantized
        down = llm.engine._runner._state.params["layers"][0]["attn_out"]
        if isinstance(down, QuantizedWeight):
            halved = list(down.values.shape)
            halved[0 if mesh == "PP2" else -1] //= 2
            assert {shard.data.shape for shard in down.values.addressable_shards} == {(*halved,)}
        arrivals = [Arrival(prompt, GREEDY) for prompt in model.prompts[-PROMPTS:]]
        for output in drive(llm.engine, arrivals):
            model.check_greedy(output)
