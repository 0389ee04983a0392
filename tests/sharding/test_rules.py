"""Names to shardings. Most meshes are abstract: what lands where needs no devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from oracle import tiny_model
from scripts import on_eight_devices

from jaxserve.models.registry import get_family
from sharding_rules import (
    DIMENSIONS,
    KV,
    MEGATRON,
    MESH_AXES,
    make_mesh,
    named_sharding,
    partition_spec,
)


def mesh(**axes: int) -> jax.sharding.AbstractMesh:
    return jax.sharding.AbstractMesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )


def test_a_named_dimension_is_split_over_its_axis():
    sharding = named_sharding(mesh(stage=2, tensor=4), ("embed", "mlp"), (64, 96))
    assert sharding.spec == PartitionSpec(None, "tensor")
    assert sharding.shard_shape((64, 96)) == (64, 24)


def test_an_axis_the_mesh_lacks_splits_nothing():
    assert named_sharding(mesh(stage=2), ("embed", "mlp"), (64, 96)).spec == PartitionSpec(
        None, None
    )


def test_a_dimension_that_does_not_divide_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"'kv_heads' has 3 .* 2 devices"):
        named_sharding(mesh(tensor=2), ("kv_heads", None), (3, 8))


def test_two_dimensions_cannot_share_an_axis():
    with pytest.raises(ValueError, match="'tensor' would split two"):
        named_sharding(mesh(tensor=2), ("mlp", "vocab"), (4, 4))


def test_a_dimension_can_be_split_over_several_axes():
    rules = MEGATRON | {"vocab": ("stage", "tensor")}
    sharding = named_sharding(mesh(stage=2, tensor=4), ("vocab", "embed"), (64, 8), rules)
    assert sharding.spec == PartitionSpec(("stage", "tensor"), None)
    assert sharding.shard_shape((64, 8)) == (8, 8)
    without_stages = named_sharding(mesh(tensor=4), ("vocab", "embed"), (64, 8), rules)
    assert without_stages.shard_shape((64, 8)) == (16, 8)
    with pytest.raises(ValueError, match=r"'vocab' has 60 .* 8 devices .* pad to 64"):
        named_sharding(mesh(stage=2, tensor=4), ("vocab", "embed"), (60, 8), rules)
    with pytest.raises(ValueError, match=r"'stage' would split two .* 'layers' and 'vocab'"):
        partition_spec(("layers", "vocab"), rules)


def test_a_spec_needs_no_mesh():
    names = ("layers", "pages", "kv_heads", "page_tokens", None)
    assert partition_spec(names, MEGATRON | KV) == PartitionSpec(
        "stage", None, "tensor", "seq", None
    )
    assert partition_spec(names, KV | {"layers": None}, mesh(seq=2)) == PartitionSpec(
        None, None, None, "seq", None
    )


def test_names_need_one_size_each():
    with pytest.raises(ValueError, match="shorter"):
        named_sharding(mesh(tensor=2), ("embed", "mlp"), (64,))


def test_tables_speak_of_known_names():
    rules = MEGATRON | KV
    assert set(rules) <= set(DIMENSIONS)
    assert set(rules.values()) <= set(MESH_AXES)


@on_eight_devices
def test_shards_lie_where_the_tables_say():
    """A device holds its stage's layers, its rank's heads, and its part of every page."""
    names = ("layers", "pages", "kv_heads", "head_dim", "page_tokens")
    pool = np.arange(4 * 3 * 2 * 2 * 8).reshape(4, 3, 2, 2, 8)
    on = make_mesh(stage=2, seq=2, tensor=2)
    placed = jax.device_put(jnp.asarray(pool), named_sharding(on, names, pool.shape, KV))
    held = {shard.device: shard.data for shard in placed.addressable_shards}
    for (stage, seq, tensor), device in np.ndenumerate(on.devices):
        layers, tokens = slice(2 * stage, 2 * stage + 2), slice(4 * seq, 4 * seq + 4)
        np.testing.assert_array_equal(held[device], pool[layers, :, [tensor], :, tokens])


def test_every_large_parameter_of_a_family_is_split():
    """Tensor parallelism halves all matrices; only norms are whole on every device."""
    _, config, _ = tiny_model()
    specs = jax.tree.leaves(get_family(config.architecture).param_specs(config))
    assert {name for spec in specs for name in spec.axes} <= set(DIMENSIONS)
    for spec in specs:
        sharding = named_sharding(mesh(tensor=2), spec.axes, spec.shape, MEGATRON)
        held = sharding.shard_shape(spec.shape)
        split = len(spec.shape) > 1
        assert (spec.size == 2 * jax.numpy.prod(jax.numpy.array(held))) == split, spec
