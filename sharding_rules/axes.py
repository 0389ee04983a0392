"""The names that sharding is written in: axes of a device mesh, and dimensions of arrays."""

from __future__ import annotations

from collections.abc import Mapping

DATA = "data"
"""Mesh axis of replicas, which share nothing."""

STAGE = "stage"
"""Mesh axis of consecutive layers (pipeline parallelism): activations are handed on."""

SEQ = "seq"
"""Mesh axis of a sequence's tokens (ring attention, KV split by tokens): once a layer, keys and
values go around, or queries and partial results."""

TENSOR = "tensor"
"""Mesh axis of heads, of the MLP's inner dimension, of the vocabulary (Megatron): one sum a
sublayer."""

MESH_AXES = (DATA, STAGE, SEQ, TENSOR)
"""Axes of every mesh, outermost first: the further in, the more its devices say to each other.

The name `expert` is kept for mixtures of experts.
"""

DIMENSIONS: Mapping[str, str] = {
    # Parameters.
    "layers": "layers of one shape, stacked",
    "vocab": "token ids: rows of the embedding and of the output head",
    "embed": "the hidden state, as parameters see it",
    "kv_heads": "KV heads; what belongs to one lies with it, its queries too",
    "qkv": "of a KV head: its query heads, its key head, its value head",
    "queries": "query heads that read one KV head",
    "head_dim": "entries of a head",
    "gate_up": "the two halves of a gated MLP, gate and up",
    "mlp": "inner dimension of the MLP",
    # Activations.
    "tokens": "tokens of a step, of all its sequences",
    "features": "the hidden state, of a token",
    # The KV cache, besides layers, kv_heads and head_dim.
    "pages": "pages of the pool",
    "page_tokens": "tokens of a page",
}
"""Dimension -> what it counts. Rule tables may name others: a model may have its own."""
