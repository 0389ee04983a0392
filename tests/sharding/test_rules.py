"""Names to shardings. Meshes are abstract: what lands where needs no devices."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec
from oracle import tiny_model

from jaxserve.models.registry import get_family
from sharding_rules import MEGATRON, named_sharding


def mesh(**axes: int) -> jax.sharding.AbstractMesh:
    return jax.sharding.AbstractMesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )


def test_a_named_dimension_is_split_over_its_axis():
    sharding = named_sharding(mesh(data=2, tensor=4), ("embed", "mlp"), (64, 96))
    assert sharding.spec == PartitionSpec(None, "tensor")
    assert sharding.shard_shape((64, 96)) == (64, 24)


def test_an_axis_the_mesh_lacks_splits_nothing():
    assert named_sharding(mesh(data=2), ("embed", "mlp"), (64, 96)).spec == PartitionSpec(
        None, None
    )


def test_a_dimension_that_does_not_divide_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"'kv_heads' has 3 .* 2 devices"):
        named_sharding(mesh(tensor=2), ("kv_heads", None), (3, 8))


def test_two_dimensions_cannot_share_an_axis():
    with pytest.raises(ValueError, match="'tensor' would split two"):
        named_sharding(mesh(tensor=2), ("mlp", "vocab"), (4, 4))


def test_every_large_parameter_of_a_family_is_split():
    """Tensor parallelism halves all matrices; only norms are whole on every device."""
    _, config, _ = tiny_model()
    specs = jax.tree.leaves(get_family(config.architecture).param_specs(config))
    for spec in specs:
        sharding = named_sharding(mesh(tensor=2), spec.axes, spec.shape, MEGATRON)
        held = sharding.shard_shape(spec.shape)
        split = len(spec.shape) > 1
        assert (spec.size == 2 * jax.numpy.prod(jax.numpy.array(held))) == split, spec
