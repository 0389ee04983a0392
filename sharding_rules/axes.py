"""Names used for sharding: axes of a device mesh, and dimensions of arrays."""

from __future__ import annotations

from collections.abc import Mapping

STAGE = "stage"
"""Mesh axis of consecutive layers (pipeline parallelism): stages pass on activations."""

SEQ = "seq"
"""Mesh axis of a sequence's tokens (ring attention, KV split by tokens): once per layer, keys and
values are sent around, or queries and partial results."""

TENSOR = "tensor"
"""Mesh axis of heads, of the MLP's inner dimension, of the vocabulary (Megatron): one reduction per
sublayer."""

MESH_AXES = (STAGE, SEQ, TENSOR)
"""Axes of every mesh, outermost first: the inner axes communicate most."""

DIMENSIONS: Mapping[str, str] = {
    # Parameters.
    "layers": "layers of one shape, stacked",
    "vocab": "token ids: rows of the embedding and of the output head",
    "embed": "the hidden state, as a dimension of parameters",
    "kv_heads": "KV heads, each with its query heads",
    "qkv": "query heads, key head and value head of a KV head",
    "queries": "query heads that read one KV head",
    "head_dim": "entries of a head",
    "gate_up": "the two halves of a gated MLP, gate and up",
    "mlp": "inner dimension of the MLP",
    "experts": "experts of a mixture",
    "expert_mlp": "inner dimension of an expert",
    # Activations.
    "tokens": "tokens of a step, of all its sequences",
    "features": "the hidden state of a token",
    # The KV cache, in addition to layers, kv_heads and head_dim.
    "pages": "pages of the pool",
    "page_tokens": "tokens of a page",
}
"""Dimension -> description. Rule tables may use others: models can define their own."""
