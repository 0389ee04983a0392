"""The same work by what else there is for JAX. Whatever fails here says nothing about us."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from device.attention import Attention
from device.packed_weights import PackedMatmul
from device.problem import Make


class Peer(NamedTuple):
    """inputs and compute as a Problem's inputs and kernel, without a carry."""

    name: str
    inputs: Callable[[Make], object]
    compute: Callable[[object], jax.Array]


def peers(spec: object) -> Iterator[Peer]:
    """Those that can do a case, imported when they are made."""
    if isinstance(spec, Attention) and spec.is_plain_decode:
        yield Peer("cuDNN", functools.partial(_together, spec), functools.partial(_cudnn, spec))
        yield Peer(
            "cuDNN, paged",
            functools.partial(_paged, spec, 2),
            functools.partial(_cudnn_paged, spec),
        )
        yield Peer(
            "JAX's Triton kernel, paged",
            functools.partial(_paged, spec, 0),
            functools.partial(_triton_paged, spec),
        )
    if isinstance(spec, Attention) and spec.is_plain_prefill:
        yield Peer("cuDNN", functools.partial(_together, spec), functools.partial(_cudnn, spec))
        yield Peer(
            "JAX's Mosaic kernel, float16",
            functools.partial(_together, dataclasses.replace(spec, dtype="float16")),
            functools.partial(_mosaic, spec),
        )
    if isinstance(spec, PackedMatmul):
        yield Peer(
            "bfloat16 weight, cuBLAS",
            lambda make: (
                make.random(spec.num_outputs, spec.num_inputs, dtype="bfloat16"),
                make.random(spec.num_inputs, spec.tokens, dtype="bfloat16"),
            ),
            lambda inputs: jnp.matmul(*inputs),
        )


def _together(spec, make):
    """q, k, v [rows, tokens, heads, head_dim]: each row's keys in one piece."""
    rows, context, new = len(spec.contexts), spec.contexts[0], spec.lengths[0]
    q = make.random(rows, new, spec.heads, spec.head_dim, dtype=spec.dtype)
    kv = (rows, context, spec.kv_heads, spec.head_dim)
    return q, make.random(*kv, dtype=spec.dtype), make.random(*kv, dtype=spec.dtype)


def _cudnn(spec, inputs):
    return jax.nn.dot_product_attention(
        *inputs, scale=spec.scale, is_causal=bool(spec.chunks), implementation="cudnn"
    )


def _mosaic(spec, inputs):
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=True
    )
    q, k, v = inputs
    return attention_mgpu.attention(q * spec.scale, k, v, config)


def _paged(spec, heads_axis, make):
    """q [rows, heads, head_dim], two pools of pages with heads at that axis and no trash page,
    tables, and contexts."""
    q = make.random(len(spec.contexts), spec.heads, spec.head_dim, dtype=spec.dtype)
    num_pages = spec.pages.num_pages - 1
    shape = [num_pages, spec.page_size, spec.head_dim]
    shape.insert(heads_axis, spec.kv_heads)
    k, v = (make.random(*shape, dtype=spec.dtype) for _ in range(2))
    tables = make.rng.permutation(num_pages).reshape(len(spec.contexts), -1)
    return q, k, v, make.known(tables), make.known(spec.contexts)


def _cudnn_paged(spec, inputs):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    q, k, v, tables, contexts = inputs
    tables = tables[:, None, :, None]
    return cudnn.paged_attention(
        q[:, None],
        k,
        v,
        jnp.ones_like(contexts),
        contexts,
        tables,
        tables,
        scale=spec.scale,
        mask_type=cudnn.MaskType.PADDING,
    )


def _triton_paged(spec, inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    q, *paged = inputs
    # Blocks of 128 tokens; what it does unasked, 8 pages, does not fit into shared memory.
    return paged_attention(
        q * spec.scale, *paged, pages_per_compute_block=max(1, 128 // spec.page_size)
    )
