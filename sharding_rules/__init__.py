"""Sharding by name: which dimension of an array is split over which axis of a device mesh.

Parameters, activations and the KV cache name their dimensions (`kv_heads`, `mlp`, `page_tokens`);
a rule table says which mesh axis each name is split over. Usable without the rest of jaxserve.
"""

from sharding_rules.axes import DIMENSIONS, MESH_AXES, SEQ, STAGE, TENSOR
from sharding_rules.heads import HeadLayout, pad_to
from sharding_rules.mesh import make_mesh
from sharding_rules.report import NamedArray, PlacedArrays, Placement, placement
from sharding_rules.rules import (
    ACTIVATIONS,
    EXPERT_PARALLEL,
    KV,
    MEGATRON,
    Rules,
    named_sharding,
    partition_spec,
)

__all__ = [
    "ACTIVATIONS",
    "DIMENSIONS",
    "EXPERT_PARALLEL",
    "KV",
    "MEGATRON",
    "MESH_AXES",
    "SEQ",
    "STAGE",
    "TENSOR",
    "HeadLayout",
    "NamedArray",
    "PlacedArrays",
    "Placement",
    "Rules",
    "make_mesh",
    "named_sharding",
    "pad_to",
    "partition_spec",
    "placement",
]
