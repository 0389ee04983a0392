"""Mixtures of experts on meshes: the tokens of one device, whole experts on a rank or parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from draft_layers import Reference, mtp_checkpoint, slots
from exhaustive import combination, combinations_but
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mesh_engines import load, on_mesh
from mesh_workload import GREEDY, check_greedy
from test_mesh_weights import bytes_by_device, shapes_of, tensors_of
from tiny_engines import Arrival, TinyModel, assert_loads, drive

from jaxserve.core.model_config import MoEConfig
from jaxserve.models import moe
from sharding_rules import TENSOR

pytestmark = pytest.mark.meshes

MESHES = {
    "mixtral": ("TP2", {"sequence_parallel": True}),
    "qwen2_moe": ("TP2", {"enable_expert_parallel": True, "sequence_parallel": True}),
    "qwen3_moe": ("TP2 CP2", {"enable_expert_parallel": True, "program_scope": "layer"}),
    "olmoe_normed": ("TP2 PP2", {}),
    "deepseek_v2_groups": ("TP2 CP2", {"enable_expert_parallel": True}),
    "deepseek_v3": ("TP2 CP2", {"enable_expert_parallel": True, "sequence_parallel": True}),
    "gpt_oss": ("TP2", {"enable_expert_parallel": True}),
    "gpt_oss_unbiased": ("TP2 CP2", {"program_scope": "layer"}),
}
"""Mixtral has five experts of 80, of which each rank has 40. Of gpt-oss, each has three experts or
a part of every one, whose biases are added once. Of DeepSeek, every rank has all latents."""


@pytest.mark.parametrize(
    "member", combinations_but(MESHES, "qwen2_moe", "olmoe_normed", "deepseek_v3")
)
def test_a_mixture_on_a_mesh(tmp_path, member):
    mesh, settings = MESHES[member]
    on_mesh(mesh, check_mixture, tmp_path, member, **settings)


def check_mixture(mesh: str, directory: Path, member: str, **settings: object) -> None:
    model = TinyModel.write_member(directory, member)
    with load(model, mesh, trace_file=directory / "trace.json", **settings) as llm:
        check_greedy(model, llm.engine)
        assert_loads(llm.engine)


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        combination("CP2", {}),
        combination("TP2 CP2", {"enable_expert_parallel": True}),
        combination("TP2 CP2", {"enable_expert_parallel": True, "quantization": "int8"}),
        combination("TP2", {"enable_expert_parallel": True, "sequence_parallel": True}),
    ],
)
def test_a_layer_for_further_tokens(tmp_path, mesh, settings):
    on_mesh(mesh, check_further_tokens, tmp_path, **settings)


def check_further_tokens(mesh: str, directory: Path, **settings: Any) -> None:
    """What it makes of each sequence is what one device would, of the model's experts and its
    own."""
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    checkpoint, quantization = mtp_checkpoint(), settings.get("quantization")
    layer = checkpoint.layer(directory / "ordinary", drafts, quantization)
    model = TinyModel.open(checkpoint.write(directory / "model"))
    model = model if quantization is None else model.rounded(quantization)
    settings |= {"speculative_config": drafts, "max_num_seqs": 1, "program_scope": "layer"}
    budget = {"max_num_batched_tokens": 3 + 16, "pages": 30}
    prompt, seen = model.prompts[-2], []
    with load(model, mesh, **settings, **budget) as llm:
        engine = llm.engine
        arrival = Arrival(prompt, GREEDY)
        (output,) = drive(engine, [arrival], lambda: seen.extend(slots(engine)))
    model.check_greedy(output)
    reference = Reference(model, layer, [*prompt, *output.outputs[0].token_ids])
    assert reference.check(seen, len(prompt), of_drafts=True) > 3


@pytest.mark.parametrize("further", [{}, combination({"dual_batch_overlap": "on"})])
def test_wide_chunks_of_latents(tmp_path, further):
    """Which attend to themselves by each rank's keys and values of heads, in both halves too."""
    least = TinyModel.write_member(tmp_path / "read", "deepseek_v3").config.mla.uncompressed_from
    tokens = {"max_num_batched_tokens": 2 * least + 2, "max_num_seqs": 2, "page_size": 4}
    on_mesh("TP2", check_mixture, tmp_path, "deepseek_v3", **tokens | further)


@pytest.mark.parametrize("whole", [False, True])
def test_padding_takes_no_expert_of_any_rank(whole):
    on_mesh("TP2", check_padding, whole)


def check_padding(mesh: str, whole: bool) -> None:
    """Of four tokens two are real: rows of experts are counted in the program of each rank, which
    has a part of every expert or half of them."""
    config = MoEConfig(6, 2, 16, (True,))
    rng = np.random.default_rng(3)
    shapes = {"router": (6, 32), "experts_gate_up": (12, 16, 32), "experts_down": (6, 32, 16)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    x, real = rng.normal(size=(4, 32)).astype(np.float32), np.array([True, False, True, False])
    expected = jax.jit(moe.mixture, static_argnums=0)(config, params, x[real])
    specs = {"router": P(), "experts_gate_up": P(TENSOR), "experts_down": P(TENSOR)}
    if not whole:
        specs |= {"experts_gate_up": P(None, TENSOR), "experts_down": P(None, None, TENSOR)}
    runs, sort = [], moe.sorted_choices

    def recorded(*arguments):
        runs.append(sort(*arguments))
        return runs[-1]

    def compute(params, x, real):
        with moe.real_tokens(real):
            out = moe.mixture(config, params, x)
        return out, runs.pop().sizes

    devices = Mesh(np.array(jax.devices()[:2]), (TENSOR,))
    on_ranks = jax.shard_map(
        compute,
        mesh=devices,
        in_specs=(specs, P(), P()),
        out_specs=(P(), P(TENSOR)),
        check_vma=False,
    )
    with mock.patch.object(moe, "sorted_choices", recorded):
        out, sizes = jax.jit(on_ranks)(params, x, real)
    rows = 2 * real.sum()
    assert sizes.reshape(2, -1).sum() == (rows if whole else 2 * rows)
    np.testing.assert_allclose(out[real], expected, rtol=1e-5, atol=1e-4)
    assert not out[~real].any()


def test_a_rank_reads_its_own_experts(tmp_path):
    on_mesh("TP2", check_bytes, tmp_path)
    on_mesh("TP2 CP3", check_experts_of_every_rank, tmp_path)


def check_bytes(mesh: str, directory: Path) -> None:
    """Half of the experts each, and as many bytes in all as with a part of every expert."""
    path = TinyModel.write_member(directory, "qwen2_moe").path
    of_file = sum(part.nbytes for part in tensors_of(path))
    for whole in (False, True):
        shapes = shapes_of(mesh, path, enable_expert_parallel=whole)
        read = bytes_by_device(shapes, path)
        assert set(read.values()) == {shapes.weights_bytes}
        assert shapes.weights_bytes < 0.56 * of_file
        experts = shapes.params.abstract["layers"][1]["experts_gate_up"]
        expected = (6, 24, 64) if whole else (12, 12, 64)
        assert experts.sharding.shard_shape(experts.shape) == expected


def check_experts_of_every_rank(mesh: str, directory: Path) -> None:
    """Six experts over six devices: one on each, where ranks of `seq` would else repeat them."""
    path = directory / "qwen2_moe"
    path = TinyModel.write_member(path, "qwen2_moe").path
    for whole, expected in ((False, (12, 12, 64)), (True, (2, 24, 64))):
        experts = shapes_of(mesh, path, enable_expert_parallel=whole).params.abstract
        experts = experts["layers"][1]["experts_gate_up"]
        assert experts.sharding.shard_shape(experts.shape) == expected
