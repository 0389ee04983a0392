"""Ring attention compiled for eight H200: what is sent when, what is held."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import combination, exhaustive
from gpu import TARGET
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.ring_attention import ring_attention, zigzag

pytestmark = pytest.mark.deviceless

RANKS, SHARD, HEADS, KV_HEADS, DIM = 8, 2048, 32, 32, 128
TWO_SENDS_AT_ONCE = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}


@functools.cache
def program(scheme):
    """One sequence of 16k tokens on eight GPUs, attended to by the Hopper kernel."""
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{RANKS}"
    ).devices
    mesh, split = Mesh(np.array(devices), ("seq",)), P(None, "seq")

    def local(q, k, v, lengths):
        layout = zigzag(lengths, RANKS)
        return ring_attention(
            q,
            k,
            v,
            lengths,
            layout,
            axis_name="seq",
            scale=0.1,
            scheme=scheme,
            backend="pallas",
        )

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(split, split, split, P()), out_specs=split, check_vma=False
    )
    arrays = [
        jax.ShapeDtypeStruct(
            (1, RANKS * SHARD, heads, DIM), jnp.bfloat16, sharding=NamedSharding(mesh, split)
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=NamedSharding(mesh, P()))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(mapped).lower(*arrays, lengths)
    return lowered.compile(compiler_options=TWO_SENDS_AT_ONCE)


def schedule(scheme):
    """Sends begun ("<") and arrived (">") and kernels ("k"), in the order of the schedule."""
    text = program(scheme).as_text()
    assert "is_scheduled=true" in text
    entry = text[text.index("ENTRY") :]
    kinds = {"collective-permute-start": "<", "collective-permute-done": ">", "custom-call": "k"}
    found = re.findall(rf" ({'|'.join(kinds)})\(", entry)
    assert not re.search(r" (all-gather|all-reduce|all-to-all|reduce-scatter)", text)
    return "".join(kinds[name] for name in found)


def test_a_step_attends_while_it_sends():
    """Keys and values, each of the hops behind a whole kernel."""
    assert schedule("pass_kv") == "<<k>>" * (RANKS - 1) + "k"


@exhaustive
def test_a_step_attends_to_both_halves_while_it_sends_them():
    """Keys and values of a half go as one message."""
    assert schedule("pass_kv_both_ways") == "<<kk>>" * (RANKS - 1) + "kk"


def test_queries_and_results_travel_at_once():
    """Queries of the next step and results of the last one; there are none before the third step,
    and those of the last step have nothing to hide behind."""
    assert schedule("pass_q") == "<k>" * 2 + "<<k>>" * (RANKS - 3) + "<k>" + "<>"


@pytest.mark.parametrize("scheme", ["pass_kv", combination("pass_kv_both_ways")])
def test_memory_does_not_hold_all_ranks_keys(scheme):
    """Which would be four results in float32 more than any number of ranks needs."""
    result_bytes = SHARD * HEADS * (DIM + 1) * 4
    assert program(scheme).memory_analysis().temp_size_in_bytes < 7 * result_bytes
