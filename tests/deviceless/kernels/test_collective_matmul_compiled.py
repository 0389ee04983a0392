"""Collective products compiled for TPUs and GPUs: what they wait for."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import combination
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.collective_matmul import (
    CollectiveRates,
    all_gather_matmul,
    matmul_reduce_scatter,
)

pytestmark = pytest.mark.deviceless

WORTH_IT = CollectiveRates(1.0, 1e15, 1e9, 0.0, both_ways=True)
TOKENS, WIDE, NARROW = 8192, 8192, 4096


def gather(weight, x, rates):
    return all_gather_matmul(weight, x, "tensor", rates=rates)


def scatter(weight, x, rates):
    return matmul_reduce_scatter(weight, x, "tensor", rates=rates)


ROWS, COLUMNS = P("tensor"), P(None, "tensor")
OPERATIONS = {
    gather: ((WIDE, NARROW), (ROWS, ROWS), COLUMNS),
    scatter: ((NARROW, WIDE), (COLUMNS, COLUMNS), ROWS),
}
"""Of each operation the shape of its weight, and how operands and result are split."""

operations = pytest.mark.parametrize("operation", OPERATIONS)


def schedule(operation, mesh, both_ways):
    """The instructions of the compiled program, in the order in which they are begun."""
    shape, in_specs, out_specs = OPERATIONS[operation]
    weight, x = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip((shape, (TOKENS, shape[1])), in_specs)
    )
    mapped = jax.shard_map(
        lambda weight, x: operation(weight, x, WORTH_IT._replace(both_ways=both_ways)),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(mapped).lower(weight, x).compile().as_text()
    assert "is_scheduled=true" in text
    assert not re.search(r"all-gather|all-reduce|all-to-all|reduce-scatter", text)
    return text[text.index("\nENTRY") :].splitlines()


def hops(lines):
    """First and last line of each hop: (start, done), where done names start."""
    starts = {
        match[1]: at
        for at, line in enumerate(lines)
        if (match := re.search(r"(%[\w.-]+) = .* collective-permute-start\(", line))
    }
    done = {
        match[1]: at
        for at, line in enumerate(lines)
        if (match := re.search(r" collective-permute-done\((%[\w.-]+)\)", line))
    }
    return [(at, done[name]) for name, at in starts.items()]


def num_hidden(lines, num_hops, num_products, product):
    """Hops with a product between their start and their end; checks how many of both there are."""
    products = [at for at, line in enumerate(lines) if re.search(product, line)]
    found = hops(lines)
    assert (len(found), len(products)) == (num_hops, num_products)
    return sum(any(start < at < done for at in products) for start, done in found)


@pytest.mark.parametrize(
    ("topology", "both_ways", "operation"),
    [
        ("v5e:4x4", True, gather),
        ("v6e:4x4", False, scatter),
        combination("v5e:4x4", True, scatter),
        combination("v6e:4x4", False, gather),
    ],
)
def test_every_hop_hides_behind_a_product_on_tpus(topology, operation, both_ways):
    """Rings of four, four of them side by side."""
    from tpu import mesh

    lines = schedule(operation, mesh(topology, (4, 4), ("data", "tensor")), both_ways)
    num_hops = 3 * (1 + both_ways)
    assert num_hidden(lines, num_hops, 4, "kind=kOutput") == num_hops


@operations
def test_hops_hide_behind_products_on_gpus(operation):
    """All but one, for XLA may begin the second hop before the first product."""
    from gpu import TARGET

    devices = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x8"
    ).devices
    lines = schedule(operation, Mesh(np.array(devices), ("tensor",)), both_ways=False)
    assert num_hidden(lines, 7, 8, r"^ *(ROOT )?%gemm_fusion|__cublas") >= 6
