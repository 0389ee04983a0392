"""The table of what lands where, against arithmetic and against what devices hold."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from scripts import on_eight_devices

from sharding_rules import KV, MEGATRON, NamedArray, make_mesh, named_sharding, placement

LAYER = {
    "norm": NamedArray((16,), "bfloat16", ("embed",)),
    "qkv": NamedArray((4, 6, 8, 16), "bfloat16", ("kv_heads", "qkv", "head_dim", "embed")),
}
POOL = ("layers", "pages", "kv_heads", None, "page_tokens")
MODEL = {
    "embed": NamedArray((64, 16), "bfloat16", ("vocab", "embed")),
    "layers": [LAYER, LAYER, LAYER],
    "pool": NamedArray((2, 10, 4, 8, 32), "float32", POOL),
}


def mesh(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def test_what_is_alike_is_put_together_and_counted():
    table = placement(MODEL, mesh(stage=1, seq=2, tensor=4))
    by_name = {placed.name: placed for placed in table.arrays}
    assert set(by_name) == {"embed", "layers.*.norm", "layers.*.qkv", "pool"}
    assert by_name["layers.*.qkv"].count == 3
    assert by_name["layers.*.qkv"].bytes_per_device == 3 * (1 * 6 * 8 * 16) * 2
    assert by_name["layers.*.norm"].bytes_per_device == 3 * 16 * 2
    assert by_name["pool"].shard_shape == (2, 10, 1, 8, 16)
    assert table.bytes_per_device == sum(placed.bytes_per_device for placed in table.arrays)
    layer_bytes = (16 + 4 * 6 * 8 * 16) * 2
    assert table.global_bytes == 64 * 16 * 2 + 3 * layer_bytes + 2 * 10 * 4 * 8 * 32 * 4


def test_arrays_that_differ_have_rows_of_their_own():
    wide = NamedArray((32,), "bfloat16", ("embed",))
    table = placement([LAYER["norm"], wide], mesh(tensor=2))
    assert [(placed.name, placed.count) for placed in table.arrays] == [("*", 1), ("*", 1)]


def test_the_table():
    rules = MEGATRON | KV | {"layers": None, "vocab": ("stage", "tensor")}
    lines = str(placement(MODEL, mesh(stage=2, seq=1, tensor=4), rules)).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "ARRAY COUNT DTYPE SHAPE SPLIT SHARD BYTES PER DEVICE",
        "embed 1 bfloat16 vocab=64 embed=16 vocab over stage x tensor 8 16 256",
        "layers.*.norm 3 bfloat16 embed=16 - 16 96",
        "layers.*.qkv 3 bfloat16 kv_heads=4 qkv=6 head_dim=8 embed=16 kv_heads over tensor "
        "1 6 8 16 4,608",
        "pool 1 float32 layers=2 pages=10 kv_heads=4 8 page_tokens=32 kv_heads over tensor "
        "2 10 1 8 32 20,480",
        "each of 8 devices (stage 2 x seq 1 x tensor 4): 25,440 bytes; "
        "every array once: 102,496 bytes",
    ]
    assert len({len(line) for line in lines[:-1]}) == 1


def test_what_does_not_divide_is_named():
    with pytest.raises(ValueError, match=r"^layers\.\*\.qkv: dimension 'kv_heads' has 4 .* 8 dev"):
        placement({"layers": [LAYER]}, mesh(tensor=8))


@on_eight_devices
def test_devices_hold_what_the_table_says():
    on = make_mesh(stage=2, seq=2, tensor=2)
    table = placement(MODEL, on)

    def zeros(array: NamedArray) -> jax.Array:
        sharding = named_sharding(on, array.names, array.shape, MEGATRON | KV)
        return jax.device_put(jnp.zeros(array.shape, array.dtype), sharding)

    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.tree.leaves(jax.tree.map(zeros, MODEL)):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {table.bytes_per_device}


def test_the_documents_example_prints_what_it_says():
    document = Path(__file__).parents[2].joinpath("docs", "sharding.md").read_text(encoding="utf-8")
    example, table = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", document, re.S).groups()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(example, {})
    assert printed.getvalue() == table
