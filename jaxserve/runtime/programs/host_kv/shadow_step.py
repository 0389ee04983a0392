"""Compressed KV of sequences longer than the pool (ShadowKV, 2410.21465), the functions of its
programs.

Of the pages on the host, the device keeps of each token its key before rotation, in a basis of
`rank` vectors that the sequence has in this layer, and of each chunk of tokens its mean key after
rotation, a landmark. A decode attends to the chunks whose landmarks its queries like best: their
keys are rebuilt and rotated, their values come from the host. Chunks with a key unlike its landmark
are outliers, which keep keys and values on the device and are always attended to.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.models import rope
from jaxserve.runtime.planning.shadow import CHUNK
from jaxserve.runtime.programs.host_kv.sparf_step import masked_softmax
from jaxserve.runtime.programs.host_kv.step import Partial
from pallas_kernels.merge import merge_two
from pallas_kernels.page_copy.rows import to_pages
from pallas_kernels.paged_attention import PageLayout

NO_CHUNK = -1


class ShadowLayer(NamedTuple):
    """What a layer keeps on the device. The last slot and the last host page are for padding.

    low [host pages + 1, page_size, rank], landmarks [host pages + 1, chunks, kv_heads, head_dim],
    bases [slots + 1, kv_heads, head_dim, rank], outlier_keys and outlier_values [slots + 1,
    kv_heads, outlier tokens, head_dim], outliers int32 [slots + 1, outliers] the chunks they are,
    values [slots + 1, kv_heads, recalled, CHUNK, head_dim].
    """

    low: jax.Array
    landmarks: jax.Array
    bases: jax.Array
    outlier_keys: jax.Array
    outlier_values: jax.Array
    outliers: jax.Array
    values: jax.Array


class Decodes(NamedTuple):
    """The decodes of a step, int32: `slots` [rows], the host pages of each in `tables` [rows, max
    pages], and the number of these in `counts` [rows], 0 for a sequence within the pool."""

    slots: jax.Array
    tables: jax.Array
    counts: jax.Array


def keys_of(
    config: ModelConfig, kind: LayerKind, pages: PageLayout, staged: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys float32 [pages, page_size, kv_heads, head_dim] of staged [pages, elements], as they are
    and before their rotation; `index` int32 [pages] are the places of the pages in the sequence."""
    shape = pages.shapes.k
    part = staged[:, : shape.shape[1] * shape.shape[2] * shape.shape[3]]
    keys = to_pages(part, shape.shape[1:], shape.dtype).transpose(0, 3, 1, 2).astype(jnp.float32)
    positions = index[:, None] * pages.page_size + jnp.arange(pages.page_size)
    return keys, _rotated(config, kind, keys, positions, back=True)


def _rotated(
    config: ModelConfig, kind: LayerKind, keys: jax.Array, positions: jax.Array, *, back: bool
) -> jax.Array:
    """Keys [..., heads, head_dim] at `positions` [...] rotated, or turned back."""
    if not kind.rotates:
        return keys
    of_layer = config.window_rope if kind.window and config.window_rope else config.rope
    cos, sin = rope.rotation(of_layer, config.max_position_embeddings, positions.reshape(-1))
    if back:  # Some methods stretch what they rotate.
        stretch = jnp.square(cos) + jnp.square(sin)
        cos, sin = cos / stretch, -sin / stretch
    flat = keys.reshape(-1, *keys.shape[-2:])
    return rope.rotate(flat, cos, sin).reshape(keys.shape)


def survey(
    config: ModelConfig,
    kind: LayerKind,
    pages: PageLayout,
    gram: jax.Array,
    landmarks: jax.Array,
    staged: jax.Array,
    index: jax.Array,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds a group of host pages to the Gram matrix [width, width] float32 of a sequence's keys
    before rotation, and writes their landmarks to the host pages `targets` int32 [pages], of which
    the last is padding. Also returns the least cosine between a key and its landmark, of all heads
    and tokens of each chunk, float32 [pages, chunks]."""
    rotated, keys = keys_of(config, kind, pages, staged, index)
    real = targets < len(landmarks) - 1
    flat = jnp.where(real[:, None, None, None], keys, 0).reshape(-1, len(gram))
    gram += jnp.matmul(flat.T, flat, precision=jax.lax.Precision.HIGHEST)
    chunked = rotated.reshape(len(staged), -1, CHUNK, *rotated.shape[2:])
    mean = chunked.mean(axis=2)
    norms = jnp.linalg.norm(chunked, axis=-1) * jnp.linalg.norm(mean, axis=-1)[:, :, None]
    cosines = (chunked * mean[:, :, None]).sum(-1) / jnp.maximum(norms, 1e-20)
    landmarks = landmarks.at[targets].set(mean.astype(landmarks.dtype))
    return gram, landmarks, cosines.min(axis=(2, 3))


def project(
    config: ModelConfig,
    kind: LayerKind,
    pages: PageLayout,
    low: jax.Array,
    bases: jax.Array,
    slot: jax.Array,
    staged: jax.Array,
    index: jax.Array,
    targets: jax.Array,
) -> jax.Array:
    """`low` with the keys of a group of host pages in the basis of `slot`."""
    _, keys = keys_of(config, kind, pages, staged, index)
    basis = bases[slot].astype(jnp.float32)
    found = jnp.einsum("pthd,hdr->ptr", keys, basis, precision=jax.lax.Precision.HIGHEST)
    return low.at[targets].set(found.astype(low.dtype))


def set_sequence(
    bases: jax.Array,
    outlier_keys: jax.Array,
    outlier_values: jax.Array,
    outliers: jax.Array,
    slot: jax.Array,
    *of_it: jax.Array,
) -> tuple[jax.Array, ...]:
    """The arrays of ShadowLayer with these names, with those of one sequence written to `slot`."""
    arrays = bases, outlier_keys, outlier_values, outliers
    return tuple(array.at[slot].set(own) for array, own in zip(arrays, of_it, strict=True))


def choose(
    config: ModelConfig,
    page_chunks: int,
    recalled: int,
    partial: Partial,
    landmarks: jax.Array,
    outliers: jax.Array,
    decodes: Decodes,
) -> jax.Array:
    """The chunks that each decode is to attend to, int32 [rows, kv_heads, recalled]: those whose
    landmarks have the largest weight for any query of the head, of equal ones the first; NO_CHUNK
    where there are fewer. Outliers are not among them."""
    rows, most_pages = decodes.tables.shape
    kv_heads, dim = landmarks.shape[2:]
    q = partial.q[:rows].reshape(rows, kv_heads, -1, dim).astype(jnp.float32)
    own = landmarks[decodes.tables].reshape(rows, -1, kv_heads, dim).astype(jnp.float32)
    scores = jnp.einsum("rhgd,rchd->rhgc", q, own) * config.attention_scale
    chunk = jnp.arange(most_pages * page_chunks)
    valid = chunk < decodes.counts[:, None] * page_chunks
    own_outliers = outliers[decodes.slots]
    valid &= (chunk[None, :, None] != own_outliers[:, None, :]).all(axis=2)
    valid = valid[:, None, None]
    shares = masked_softmax(scores, valid)
    best, chosen = jax.lax.top_k(jnp.where(valid[:, 0], shares.max(axis=2), -1.0), recalled)
    return jnp.where(best >= 0, chosen, NO_CHUNK).astype(jnp.int32)


def fill(values: jax.Array, places: jax.Array, staged: jax.Array) -> jax.Array:
    """`values` of ShadowLayer with chunks [n, CHUNK, head_dim] written to `places` int32 [n, 3]:
    the slot, the head, and which of its chunks."""
    slot, head, place = places.T
    return values.at[slot, head, place].set(staged)


def attend_recalled(
    config: ModelConfig,
    kind: LayerKind,
    page_size: int,
    partial: Partial,
    layer: ShadowLayer,
    decodes: Decodes,
    held: jax.Array,
) -> Partial:
    """Merges attention of decodes to their outliers, and to the chunks `held` int32 [rows,
    kv_heads, recalled], whose values are in place, into `partial`."""
    rows, kv_heads, recalled = held.shape
    dim, page_chunks = config.head_dim, page_size // CHUNK
    chunk = jnp.maximum(held, 0)
    page = jnp.take_along_axis(decodes.tables[:, None], chunk // page_chunks, axis=2)
    places = (chunk % page_chunks)[..., None] * CHUNK + jnp.arange(CHUNK)
    low = layer.low[page[..., None], places].reshape(rows, kv_heads, recalled * CHUNK, -1)
    bases = layer.bases[decodes.slots]
    keys = jnp.einsum("rhnk,rhdk->rhnd", low, bases, preferred_element_type=jnp.float32)
    positions = chunk[..., None] * CHUNK + jnp.arange(CHUNK)
    positions = positions.reshape(rows, kv_heads, -1)
    keys = _rotated(config, kind, keys[..., None, :], positions, back=False)[..., 0, :]
    seen = jnp.repeat(held >= 0, CHUNK, axis=2)
    values = layer.values[decodes.slots].reshape(rows, kv_heads, -1, dim)

    of_outliers = jnp.repeat(layer.outliers[decodes.slots] >= 0, CHUNK, axis=1)
    seen_outliers = jnp.broadcast_to(of_outliers[:, None], (rows, kv_heads, of_outliers.shape[1]))
    keys = jnp.concatenate([keys.astype(partial.q.dtype), layer.outlier_keys[decodes.slots]], 2)
    values = jnp.concatenate([values, layer.outlier_values[decodes.slots]], 2)
    seen = jnp.concatenate([seen, seen_outliers], 2) & (decodes.counts > 0)[:, None, None]

    q = partial.q[:rows].reshape(rows, kv_heads, -1, dim)
    scores = jnp.einsum("rhgd,rhnd->rhgn", q, keys, preferred_element_type=jnp.float32)
    scores *= config.attention_scale
    if config.attention_soft_cap is not None:
        scores = config.attention_soft_cap * jnp.tanh(scores / config.attention_soft_cap)
    lse = jax.nn.logsumexp(jnp.where(seen[:, :, None], scores, -jnp.inf), axis=-1)
    finite = jnp.where(jnp.isfinite(lse), lse, 0)
    weights = jnp.where(seen[:, :, None], jnp.exp(scores - finite[..., None]), 0)
    values = jnp.where(seen[..., None], values, 0)  # A former sequence's may be no numbers.
    out = jnp.einsum("rhgn,rhnd->rhgd", weights, values.astype(jnp.float32))
    heads = partial.q.shape[1]
    merged_out, merged_lse = merge_two(
        partial.out[:rows],
        partial.lse[:rows],
        out.reshape(rows, heads, dim),
        lse.reshape(rows, heads),
    )
    return Partial(
        partial.q,
        partial.out.at[:rows].set(merged_out),
        partial.lse.at[:rows].set(merged_lse),
    )
