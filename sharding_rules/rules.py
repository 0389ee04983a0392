"""Rule tables, and the sharding of arrays by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sharding_rules.axes import SEQ, STAGE, TENSOR

MeshAxes = str | tuple[str, ...] | None
Rules = Mapping[str, MeshAxes]
"""Name of a dimension -> mesh axis it is split over, or several, outermost first.

A name without a rule, or whose rule is None, is not split. Tables are plain dicts and combine as
such: `MEGATRON | KV`, `MEGATRON | {"vocab": ("stage", "tensor")}`.
"""

MEGATRON: dict[str, MeshAxes] = {
    "layers": STAGE,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "expert_mlp": TENSOR,
    "vocab": TENSOR,
}
"""Parameters. Tensor parallelism with one reduction per sublayer (Megatron-LM, 1909.08053): heads
and the MLP's inner dimension are split and the following projection's outputs are summed; the
vocabulary is split too. Stacked layers are split over stages."""

EXPERT_PARALLEL: dict[str, MeshAxes] = {"experts": (SEQ, TENSOR), "expert_mlp": None}
"""Parameters of a mixture, in addition to `MEGATRON`: each rank of a stage has some of the experts,
instead of a part of every expert's inner dimension, which the ranks of `seq` all have."""

ACTIVATIONS: dict[str, str | tuple[str, ...] | None] = {"tokens": "seq"}
"""Activations between layers: features are not split, and the tokens of a prefill are split over
the `seq` ranks."""

KV: dict[str, MeshAxes] = {"layers": STAGE, "kv_heads": TENSOR, "page_tokens": SEQ}
"""The KV cache: layers and heads are placed like their parameters, and each `seq` rank holds its
part of every page, so all ranks share one page table."""


def partition_spec(
    names: Sequence[str | None], rules: Rules, mesh: Mesh | AbstractMesh | None = None
) -> PartitionSpec:
    """PartitionSpec of an array with dimensions `names`; None is not split.

    With a `mesh`, axes that it does not have are left out. Raises ValueError when two dimensions
    claim the same mesh axis.
    """
    claimed: dict[str, str] = {}
    entries: list[MeshAxes] = []
    for name in names:
        axes = _mesh_axes(name, rules, mesh)
        for axis in axes:
            if axis in claimed:
                raise ValueError(
                    f"mesh axis {axis!r} would split two dimensions of {tuple(names)}, "
                    f"{claimed[axis]!r} and {name!r}; give one of them another rule."
                )
            claimed[axis] = name
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*entries)


def _mesh_axes(name: str | None, rules: Rules, mesh: Mesh | AbstractMesh | None) -> tuple[str, ...]:
    """Axes of `mesh` (any axes if None) that the dimension `name` is split over."""
    rule = rules.get(name) if name is not None else None
    axes = rule if isinstance(rule, tuple) else () if rule is None else (rule,)
    return axes if mesh is None else tuple(axis for axis in axes if axis in mesh.shape)


def named_sharding(
    mesh: Mesh | AbstractMesh,
    names: Sequence[str | None],
    shape: Sequence[int],
    rules: Rules = MEGATRON,
) -> NamedSharding:
    """Sharding of an array of `shape` with dimensions `names`.

    A mesh axis that `mesh` does not have splits nothing. Raises ValueError when mesh axes do not
    divide the dimension that they split, or two dimensions claim the same axis.
    """
    for name, size in zip(names, shape, strict=True):
        axes = _mesh_axes(name, rules, mesh)
        degree = math.prod(mesh.shape[axis] for axis in axes)
        if size % degree:
            over = f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {axes}"
            raise ValueError(
                f"dimension {name!r} has {size} entries, which do not divide by the "
                f"{degree} devices of mesh {over}; choose a degree that divides it, or pad to "
                f"{math.ceil(size / degree) * degree}."
            )
    return NamedSharding(mesh, partition_spec(names, rules, mesh))
