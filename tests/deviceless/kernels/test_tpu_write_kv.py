"""The TPU kernel that writes keys and values, compiled for TPUs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from exhaustive import combination
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu import CHIPS, array, compiled, mesh, sharding

from pallas_kernels.paged_attention import KVPages
from pallas_kernels.paged_attention.tpu.write import MAX_TOKENS, unsupported, write_kv

pytestmark = pytest.mark.deviceless

NUM_PAGES, TOKENS = 1024, 64 + 512

KINDS = {
    "llama": {},
    "small heads": {"head_dim": 64, "heads": 4},
    "small heads, large pages": {"head_dim": 64, "page_size": 256},
    "large heads, large pages": {"head_dim": 256, "page_size": 256, "heads": 4},
    "float32": {"dtype": jnp.float32, "heads": 2},
    "int8": {"dtype": jnp.int8},
    "int8, small heads": {"dtype": jnp.int8, "head_dim": 64},
    "float8": {"dtype": jnp.float8_e4m3fn, "page_size": 256},
}


def arguments(on, heads=8, head_dim=128, page_size=128, dtype=jnp.bfloat16, tokens=TOKENS):
    """A mixed batch. `on`: where everything lies, or where heads and integers do."""
    of_pool, of_new, of_ints = on if isinstance(on, tuple) else (on, on, on)
    new = array(of_new, tokens, heads, head_dim, dtype=dtype)
    where = array(of_ints, tokens, dtype=jnp.int32)
    k = array(of_pool, NUM_PAGES, heads, head_dim, page_size, dtype=dtype)
    v = array(of_pool, NUM_PAGES, heads, page_size, head_dim, dtype=dtype)
    return KVPages(k, v), new, new, where, where


def check_in_place(executable, pages, shards=1):
    """One kernel, and nothing is copied but new tokens, into the orders they are merged in."""
    text, memory = executable.as_text(), executable.memory_analysis()
    pool = 2 * pages.k.size * pages.k.dtype.itemsize // shards
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', text)) == 1
    assert memory.alias_size_in_bytes == pool
    assert memory.temp_size_in_bytes < pool / 32


@pytest.mark.parametrize(
    ("chip", "kind"),
    [(CHIPS[0], kind) for kind in KINDS]
    + [(CHIPS[-1], "float8")]
    + [combination(c, k) for c in CHIPS[1:-1] for k in ("llama", "float8")]
    + [combination(CHIPS[-1], "llama")],
)
def test_the_pool_is_written_where_it_lies(chip, kind):
    described = arguments(sharding(chip), **KINDS[kind])
    check_in_place(compiled(write_kv, *described, donate=(0,)), described[0])


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": jnp.float32, "head_dim": 256, "page_size": 1024, "heads": 40},
        {"dtype": jnp.int8, "head_dim": 256, "heads": 37},
        {"heads": 1, "tokens": MAX_TOKENS},
        {"tokens": 1},
    ],
)
def test_the_largest_and_smallest_of_everything_fit(kind):
    described = arguments(sharding("tpu7x:2x2x1"), **kind)
    assert unsupported(*described) is None
    compiled(write_kv, *described, donate=(0,))


@pytest.mark.parametrize("topology", ["v6e:4x4", combination("v5e:4x4")])
def test_heads_are_shared_by_the_devices_of_a_mesh(topology):
    """Under `shard_map` over 4 x 4: two KV heads a device on one axis, batches on the other."""
    over = mesh(topology, (4, 4), ("data", "tensor"))
    of_heads, of_batch = P("data", "tensor"), P("data")
    specs = (of_heads, of_heads, of_heads, of_batch, of_batch)
    sharded = jax.shard_map(
        lambda *arguments: write_kv(*arguments),
        mesh=over,
        in_specs=specs,
        out_specs=of_heads,
        check_vma=False,
    )
    on = tuple(NamedSharding(over, spec) for spec in (of_heads, of_heads, of_batch))
    described = arguments(on)
    executable = compiled(sharded, *described, donate=(0,))
    check_in_place(executable, described[0], shards=16)
    assert not re.search(r"all-|collective", executable.as_text())
