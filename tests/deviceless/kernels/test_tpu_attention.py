"""The TPU kernel of paged attention compiled for TPUs."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from exhaustive import combination
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu import CHIPS, array, compiled, mesh, sharding

from pallas_kernels.paged_attention import KVPages, RaggedBatch, Visible
from pallas_kernels.paged_attention.tpu.attention import paged_attention, unsupported

pytestmark = pytest.mark.deviceless

DECODES, CHUNK = 16, 512


def arguments(
    on,
    heads=(32, 8),
    head_dim=128,
    page_size=128,
    dtype=jnp.bfloat16,
    kv_dtype=None,
    tokens=DECODES + CHUNK,
    rows=DECODES + 2,
    context=8192,
    num_pages=512,
):
    """A mixed batch. `on`: where everything lies, or where q, keys and values, and integers do."""
    query_heads, kv_heads = heads
    of_q, of_kv, of_ints = on if isinstance(on, tuple) else (on, on, on)
    ints = functools.partial(array, of_ints, dtype=jnp.int32)
    kv = functools.partial(array, of_kv, num_pages, kv_heads, dtype=kv_dtype or dtype)
    return (
        array(of_q, tokens, query_heads, head_dim, dtype=dtype),
        KVPages(kv(head_dim, page_size), kv(page_size, head_dim)),
        RaggedBatch(ints(rows, context // page_size), ints(rows), ints(rows), ints(rows)),
        Visible(ints(tokens), ints(tokens)),
    )


def attend(num_decodes=DECODES, **options):
    return functools.partial(paged_attention, num_decodes=num_decodes, scale=0.1, **options)


def kernels(executable):
    return len(re.findall(r'custom_call_target="tpu_custom_call"', executable.as_text()))


def check_nothing_large_is_copied(executable, queries):
    """Temporary memory is queries and results in another order, and limits padded to 128 lanes."""
    tokens, heads, dim = queries.shape
    ordered = tokens * heads * max(dim, 128) * queries.dtype.itemsize
    spread = tokens * 128 * 4
    assert executable.memory_analysis().temp_size_in_bytes < 4 * (ordered + spread)


KINDS = {
    "llama": {},
    "small heads, large pages": {"head_dim": 64, "page_size": 256},
    "large heads": {"heads": (16, 8), "head_dim": 256},
    "int8": {"kv_dtype": jnp.int8},
    "float8": {"kv_dtype": jnp.float8_e4m3fn, "page_size": 256},
}


EACH_ONCE = {
    ("v5e:2x2", "small heads, large pages"),
    ("v5e:2x2", "int8"),
    ("v5p:2x2x1", "large heads"),
    ("v6e:2x2", "llama"),
    ("tpu7x:2x2x1", "float8"),
}


@pytest.mark.parametrize(
    ("chip", "kind"),
    [
        (chip, kind) if (chip, kind) in EACH_ONCE else combination(chip, kind)
        for chip in CHIPS
        for kind in KINDS
    ],
)
def test_decodes_and_a_chunk_compile_and_copy_no_pages(chip, kind):
    described = arguments(sharding(chip), **KINDS[kind])
    executable = compiled(attend(), *described)
    assert kernels(executable) == 2
    check_nothing_large_is_copied(executable, described[0])


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ({"dtype": jnp.float32, "head_dim": 256, "page_size": 1024}, {}),
        ({"heads": (128, 1)}, {"soft_cap": 30.0}),
        combination({"heads": (40, 40)}, {}),
        combination({"heads": (7, 1), "head_dim": 64}, {}),
        ({"heads": (1024, 8), "head_dim": 256}, {}),
    ],
)
def test_the_largest_of_everything_fits_the_smallest_memory(shapes, options):
    """VMEM of tpu7x and v5p is 64 MiB, half of the others'."""
    described = arguments(sharding("tpu7x:2x2x1"), **shapes)
    assert unsupported(*described, num_decodes=DECODES, scale=0.1, **options) is None
    compiled(attend(**options), *described)


def test_tables_of_a_million_tokens_fit_scalar_memory():
    """16 rows go together, so 40 take three kernels."""
    described = arguments(sharding("v6e:2x2"), tokens=40, rows=40, context=2**20)
    assert kernels(compiled(attend(num_decodes=40), *described)) == 3


@pytest.mark.parametrize(("chip", "grid"), [("v5e:2x2", (1, 16)), ("v5p:2x2x1", (2, 16))])
def test_both_cores_of_a_chip_share_the_heads(chip, grid):
    """Where two cores are one device, the grid has twice the programs, each with half the heads."""
    described = arguments(sharding(chip), tokens=16, rows=16)
    with jax.sharding.use_abstract_mesh(sharding(chip).mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(attend())(*described)
    (kernel,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call")
    assert kernel.params["grid_mapping"].grid == grid


@pytest.mark.parametrize("topology", ["v6e:4x4", combination("v5e:4x4")])
def test_heads_are_shared_by_the_devices_of_a_mesh(topology):
    """Under `shard_map` over 4 x 4: two KV heads a device on one axis, batches on the other."""
    over = mesh(topology, (4, 4), ("data", "tensor"))

    def each(q, pages, batch, visible):
        return attend()(q, pages, batch, visible)

    of_heads, of_batch = P("data", "tensor"), P("data")
    specs = of_heads, of_heads, of_batch, of_batch
    sharded = jax.shard_map(
        each, mesh=over, in_specs=specs, out_specs=(of_heads, of_heads), check_vma=False
    )
    on = tuple(NamedSharding(over, spec) for spec in (of_heads, of_heads, of_batch))
    described = arguments(on, tokens=4 * (DECODES + CHUNK), rows=4 * (DECODES + 2), num_pages=2048)
    executable = compiled(sharded, *described)
    assert kernels(executable) == 2
    assert not re.search(r"all-|collective", executable.as_text())
    pool = 2 * 512 * 2 * 128 * 128 * 2
    memory = executable.memory_analysis()
    assert memory.argument_size_in_bytes < 1.2 * pool
    assert memory.temp_size_in_bytes < pool / 16
