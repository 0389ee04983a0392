"""Rule tables, and the sharding they give an array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Rules = Mapping[str, str]
"""Name of a dimension -> mesh axis it is split over. A name without a rule is not split."""

MEGATRON: Rules = {"kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
"""Tensor parallelism with one reduction a sublayer (Megatron-LM, 1909.08053): heads and the MLP's
inner dimension are split, so that what follows them is summed; the vocabulary is split too."""


def named_sharding(
    mesh: Mesh | AbstractMesh,
    names: Sequence[str | None],
    shape: Sequence[int],
    rules: Rules = MEGATRON,
) -> NamedSharding:
    """Sharding of an array of `shape` whose dimensions are called `names`.

    A mesh axis that `mesh` does not have splits nothing. Raises ValueError when a dimension does
    not divide by the mesh axis it is to be split over, or two dimensions claim the same one.
    """
    axes: list[str | None] = []
    for name, size in zip(names, shape, strict=True):
        axis = rules.get(name) if name is not None else None
        if axis is None or axis not in mesh.shape:
            axes.append(None)
            continue
        if size % mesh.shape[axis]:
            raise ValueError(
                f"dimension {name!r} has {size} entries, which do not divide by the "
                f"{mesh.shape[axis]} devices of mesh axis {axis!r}; choose a degree that divides."
            )
        if axis in axes:
            raise ValueError(f"mesh axis {axis!r} would split two dimensions of {tuple(names)}.")
        axes.append(axis)
    return NamedSharding(mesh, PartitionSpec(*axes))
