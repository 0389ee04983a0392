"""The host's CPU as a device of its own, beside the accelerators: how fast it attends."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxserve.core.arithmetic import cdiv
from jaxserve.runtime.hardware.arrays import placed
from jaxserve.runtime.hardware.link_rates import copy_rates, median_seconds
from pallas_kernels.paged_attention import PageLayout, Pages, RaggedBatch, Visible, attend

_DECODE_BYTES, _CHUNK_BYTES = 32 << 20, 2 << 20
"""KV that is attended to: by a decode, for which it is larger than caches, and by a chunk."""
_CHUNK = 128


class HostRates(NamedTuple):
    """Bytes a second of copies to the device and to the host, and of the KV that a token attends to
    on the host: a decode, and a token of a prefill chunk, whose tokens share each read."""

    to_device: float
    to_host: float
    decode: float
    chunk: float


def host_device() -> jax.Device | None:
    """The CPU as a JAX device; None where JAX has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


@functools.cache
def measure(device: jax.Device, layout: PageLayout, heads: int, dtype: jnp.dtype) -> HostRates:
    """Rates between a device and the host, and of the host's attention to pages like those of
    `layout` by `heads` query heads of `dtype`. Takes a few seconds, most of it for compilation."""
    return HostRates(
        *copy_rates(device),
        decode=_attention_rate(layout, heads, dtype, 1, _DECODE_BYTES),
        chunk=_attention_rate(layout, heads, dtype, _CHUNK, _CHUNK_BYTES),
    )


def _attention_rate(
    layout: PageLayout, heads: int, dtype: jnp.dtype, tokens: int, num_bytes: int
) -> float:
    """Bytes of KV a second that a token attends to, if so many tokens of a sequence do together."""
    count = cdiv(num_bytes, layout.page_bytes)
    layout = dataclasses.replace(layout, num_pages=count)
    host, decodes = SingleDeviceSharding(host_device()), int(tokens == 1)
    until = np.full(tokens, count * layout.page_size, np.int32)
    one, tables = np.zeros(1, np.int32), np.arange(count, dtype=np.int32)[None]
    batch = RaggedBatch(tables, one, one, one + tokens)

    def attention(q: jax.Array, pages: Pages) -> tuple[jax.Array, jax.Array]:
        visible = Visible(jnp.zeros_like(until), until)
        batched = RaggedBatch(*map(jnp.asarray, batch))
        options = {"num_decodes": decodes, "scale": 1.0, "backend": "xla"}
        return attend(q, pages, batched, visible, **options)

    q = jax.ShapeDtypeStruct((tokens, heads, layout.head_dim), dtype)
    shapes = jax.tree.map(lambda array: placed(array, host), (q, layout.shapes))
    arrays = jax.tree.map(
        lambda array: jax.device_put(np.zeros(array.shape, array.dtype), host), shapes
    )
    compiled = jax.jit(attention).lower(*shapes).compile()
    seconds = median_seconds(lambda: jax.block_until_ready(compiled(*arrays)))
    return tokens * count * layout.page_bytes / seconds
