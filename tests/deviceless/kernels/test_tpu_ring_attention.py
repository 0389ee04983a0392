"""Ring attention compiled for sixteen TPUs: what is sent, what is held."""

from __future__ import annotations

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from exhaustive import combination, exhaustive
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu import compiled, mesh

from pallas_kernels.ring_attention import ring_attention, zigzag

pytestmark = pytest.mark.deviceless

RANKS, SHARD, HEADS, KV_HEADS, DIM = 16, 2048, 16, 8, 128
PAGES = SHARD // 128


@functools.cache
def program(topology, scheme):
    """One sequence of 32k tokens on sixteen chips, attended to by the TPU kernel."""
    on, split = mesh(topology, (RANKS,), ("seq",)), P(None, "seq")

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
        local, mesh=on, in_specs=(split, split, split, P()), out_specs=split, check_vma=False
    )
    arrays = [
        jax.ShapeDtypeStruct(
            (1, RANKS * SHARD, heads, DIM), jnp.bfloat16, sharding=NamedSharding(on, split)
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=NamedSharding(on, P()))
    return compiled(mapped, *arrays, lengths)


def schedule(topology, scheme):
    """Sends begun ("<") and arrived (">") and kernels ("k"), in the order of the schedule; and
    the shapes of what is sent, with their number."""
    text = program(topology, scheme).as_text()
    assert "is_scheduled=true" in text
    assert not re.search(r" (all-gather|all-reduce|all-to-all|reduce-scatter)", text)
    signs = {"%paged_attention": "k", " collective-permute-start(": "<"}
    entry = text[text.index("ENTRY") :]
    found = re.findall(r"%paged_attention(?=[.\d]* =)| collective-permute-(?:start|done)\(", entry)
    sent = re.findall(r"= \(\w+\[([\d,]+)\].* collective-permute-start\(", entry)
    return "".join(signs.get(name, ">") for name in found), collections.Counter(sent)


@pytest.mark.parametrize("topology", [combination("v5e:4x4"), "v6e:4x4"])
def test_a_step_attends_while_it_sends(topology):
    """Keys and values, once less than there are ranks, each hop behind a whole kernel."""
    order, sent = schedule(topology, "pass_kv")
    assert order == "<<k>>" * (RANKS - 1) + "k"
    assert sent == {f"{PAGES},{KV_HEADS},128,{DIM}": 2 * (RANKS - 1)}


@exhaustive
def test_both_ways_messages_are_half_as_large():
    order, sent = schedule("v6e:4x4", "pass_kv_both_ways")
    assert re.fullmatch(r"k?<<<<k+>>>>(<<<<kk>>>>){14}kk", order)
    assert sent == {f"{PAGES // 2},{KV_HEADS},128,{DIM}": 4 * (RANKS - 1)}


def test_queries_or_results_travel_while_any_kernel_runs():
    order, sent = schedule("v6e:4x4", "pass_q")
    before = [order[: kernel.start()] for kernel in re.finditer("k", order)]
    in_flight = [part.count("<") - part.count(">") for part in before]
    assert len(in_flight) == RANKS and min(in_flight[:-1]) >= 1
    assert sent == {
        f"{SHARD},{HEADS},{DIM}": 2 * (RANKS - 1),  # queries and outs
        f"{SHARD},{HEADS}": RANKS - 1,
    }


def test_memory_does_not_hold_all_ranks_keys():
    """But two ranks', and two results in float32."""
    result_bytes, keys_bytes = SHARD * HEADS * (DIM + 1) * 4, SHARD * 2 * KV_HEADS * DIM * 2
    held = program("v6e:4x4", "pass_kv").memory_analysis().temp_size_in_bytes
    assert held < 2 * (result_bytes + keys_bytes) < RANKS * keys_bytes
