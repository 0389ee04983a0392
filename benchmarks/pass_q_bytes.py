"""Bytes sent per rank by pass-KV and by pass-Q, and which of them is chosen.

The engine's attention of one layer of Llama-3.1-8B is compiled for eight devices that share a
sequence, for one chunk after contexts of several lengths, and its collectives are counted. For n
tokens, N ranks, query and KV heads Hq and Hkv of d elements of e bytes, a rank sends:

    either way  (N - 1) / N * n * 2 Hkv d e            new keys and values, to their owners
    pass-KV     (N - 1) * (n + cached) / N * 2 Hkv d e keys and values around the ring
    pass-Q      (N - 1) / N * n * Hq d e               queries
                (N - 1) / N * n * Hq (d + 3) * 4       results: outputs, weights, and a maximum

Elements are float32 here, the only type that CPUs send. The choice is modelled for an H200 as in
pallas_kernels/ring_attention/choice.py: only sends that compute does not hide count.

    python benchmarks/pass_q_bytes.py
"""

from __future__ import annotations

import argparse
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from table import print_table
from virtual_devices import make_devices

from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.kv.layout import KVLayout
from jaxserve.runtime.programs.forward import context_parallel
from jaxserve.runtime.programs.layout.step_inputs import SlotMapping
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from pallas_kernels.paged_attention import KVPages, RaggedBatch
from pallas_kernels.ring_attention import choose_scheme
from sharding_rules import SEQ

RANKS, QUERY_HEADS, KV_HEADS, DIM, ITEM_BYTES = 8, 32, 8, 128, 4
PAGE_SIZE = 512
FLOPS_PER_S, LINK_BYTES_PER_S = 989e12, 450e9
MB = 1e6

# What a rank sends of what a collective gives it (of a reduction, of what it takes), by rings.
_SENT = {
    "all-gather": (RANKS - 1) / RANKS,
    "reduce-scatter": RANKS - 1.0,
    "all-reduce": 2 * (RANKS - 1) / RANKS,
    "collective-permute": 1.0,
}
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(_SENT)})\(")
_ARRAY = re.compile(r"[a-z]+(\d+)\[([\d,]*)\]")


def sent_bytes(new: int, cached: int, ring: bool) -> float:
    """Bytes that a rank sends in the attention of one layer, from the compiled program."""
    width = (new + cached) // PAGE_SIZE
    layout = StepLayout(
        key=ProgramKey(0, new, ring),
        max_seqs=1,
        max_pages=width,
        kv=KVLayout(PAGE_SIZE),
        seq=RANKS,
        ring_pages=width if ring else 0,
    )

    def attend(pages, heads, slot_mapping):
        return context_parallel.attend(layout, slot_mapping, pages, *heads, scale=1.0, window=None)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def int32(*shape):
        return array(*shape, dtype=jnp.int32)

    pages = KVPages(
        array(width + 1, KV_HEADS, DIM, PAGE_SIZE), array(width + 1, KV_HEADS, PAGE_SIZE, DIM)
    )
    of_pages = KVPages(P(None, None, None, SEQ), P(None, None, SEQ))
    heads = tuple(array(new, count, DIM) for count in (QUERY_HEADS, KV_HEADS, KV_HEADS))
    batch = RaggedBatch(int32(1, width), int32(1), int32(1), int32(1))
    mapped = jax.shard_map(
        attend,
        mesh=Mesh(np.array(jax.devices()), (SEQ,)),
        in_specs=(of_pages, P(SEQ), P()),
        out_specs=(P(SEQ), of_pages),
        check_vma=False,
    )
    slot_mapping = SlotMapping(int32(new), int32(new), batch)
    program = jax.jit(mapped, donate_argnums=0).lower(pages, heads, slot_mapping).compile()
    return sum(
        _SENT[kind] * (int(bits) // 8) * math.prod(int(size) for size in shape.split(",") if size)
        for result, kind in _COLLECTIVE.findall(program.as_text())
        for bits, shape in _ARRAY.findall(result)
    )


def formula_bytes(new: int, cached: int, ring: bool) -> float:
    """The same, by the formulas above."""
    keys = 2 * KV_HEADS * DIM * ITEM_BYTES
    own = (RANKS - 1) / RANKS * new
    if ring:
        return own * keys + (RANKS - 1) * (new + cached) / RANKS * keys
    return own * (keys + QUERY_HEADS * (DIM * ITEM_BYTES + (DIM + 3) * 4))


def modelled_us(new: int, cached: int) -> dict[str, float]:
    """Time of a layer's attention by what travels."""
    width = QUERY_HEADS * DIM
    computing = 4 * new * (new + cached) * width / (RANKS**2 * FLOPS_PER_S)
    queries = new / RANKS * width * ITEM_BYTES / LINK_BYTES_PER_S
    keys = 2 * (new + cached) / RANKS * KV_HEADS * DIM * ITEM_BYTES / LINK_BYTES_PER_S
    hops = RANKS - 1
    return {
        "pass_kv": 1e6 * (RANKS * computing + hops * max(0.0, keys - computing)),
        "pass_q": 1e6 * (RANKS * computing + hops * (max(0.0, queries - computing) + queries)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[2048, 4096])
    chunks = parser.parse_args().new_tokens
    make_devices(RANKS)
    rows = []
    for new, times_cached in itertools.product(chunks, (0, 1, 2, 4, 32)):
        cached = times_cached * new
        counted, ratios = [], []
        for ring in (True, False):
            counted.append(sent_bytes(new, cached, ring))
            ratios.append(counted[-1] / formula_bytes(new, cached, ring))
        chosen = choose_scheme(
            new_tokens=new,
            cached_tokens=cached,
            ranks=RANKS,
            query_heads=QUERY_HEADS,
            kv_heads=KV_HEADS,
            element_bytes=ITEM_BYTES,
            flops_per_s=FLOPS_PER_S,
            link_bytes_per_s=LINK_BYTES_PER_S,
        )
        times = modelled_us(new, cached)
        rows.append(
            (
                new,
                f"{new / (new + cached):.3f}",
                counted[0] / MB,
                ratios[0],
                counted[1] / MB,
                ratios[1],
                times["pass_kv"],
                times["pass_q"],
                chosen,
                times[chosen] / min(times.values()),
            )
        )
    print_table(
        f"{RANKS} ranks: MB that a rank sends for one layer, and microseconds as modelled",
        (
            "new tokens",
            "of all",
            "pass-KV MB",
            "/ formula",
            "pass-Q MB",
            "/ formula",
            "pass-KV us",
            "pass-Q us",
            "chosen",
            "chosen / best",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
