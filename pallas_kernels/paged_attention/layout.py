"""Inputs of paged attention: pages, and which tokens belong to which row of a ragged batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

PAGE_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "uint8")
"""Dtypes of the elements of pages. A uint8 has two features of 4 bits (`packed_int4`)."""

QUANTIZED = ("int8", "float8_e4m3fn", "uint8")
"""Those of them that are a scale's multiples."""


def features_per_element(dtype: jnp.dtype) -> int:
    """How many features of a key or value an element of pages has."""
    return 2 if dtype == jnp.uint8 else 1


def rotated(x: jax.Array) -> jax.Array:
    """x [..., head_dim] times a symmetric orthogonal matrix, in float32: a Hadamard matrix of the
    largest power of two that divides head_dim, in blocks. It is its own inverse.

    Keys and values of 4 bits are kept rotated, which spreads large features over the others of
    their token (QuaRot, 2404.00456). Queries are rotated likewise, which leaves scores as they are,
    and results are rotated back. By additions of pairs, whose order does not depend on the batch.
    """
    dim = x.shape[-1]
    size = dim & -dim
    x, half = x.astype(jnp.float32), 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], dim // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([low + high, low - high], axis=-2).reshape(x.shape)
        half *= 2
    return x / math.sqrt(size)


def packed_int4(values: jax.Array) -> jax.Array:
    """Whole numbers from -7 to 7 [..., head_dim] as bytes uint8 [..., head_dim / 2]: byte f has
    feature f in its low bits and feature f + head_dim / 2 in its high ones, each plus 8."""
    low, high = jnp.split((values + 8).astype(jnp.uint8), 2, axis=-1)
    return low | high << 4


def unpacked_int4(packed: jax.Array, axis: int) -> jax.Array:
    """int8 with the features of `packed_int4` along `axis`."""
    features = jnp.concatenate([packed & 15, packed >> 4], axis=axis)
    return features.astype(jnp.int8) - jnp.int8(8)


class KVPages(NamedTuple):
    """Pages of one layer: k [pages, kv_heads, head_dim, page_size], v with the last two swapped.

    Both orders put the dimension that should be vectorized last: positions when computing scores
    from keys, features when computing outputs from values. Page 0 is the trash page: padding is
    written there and nothing reads it.

    scales: float32 [pages, kv_heads, 2, page_size], of quantized pages: what the elements of a
    token's key, and then of its value, are multiplied with. None: elements are the values.

    Of uint8 the arrays have head_dim / 2 bytes in the place of head_dim elements, and keys and
    values are `rotated`.
    """

    k: jax.Array
    v: jax.Array
    scales: jax.Array | None = None

    @property
    def elements(self) -> KVPages:
        """The pages without their scales."""
        return KVPages(self.k, self.v)

    @property
    def head_dim(self) -> int:
        """Features of a key."""
        return self.k.shape[2] * features_per_element(self.k.dtype)

    @property
    def value_dim(self) -> int:
        """Features of a value."""
        return self.v.shape[3] * features_per_element(self.v.dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k"], meta_fields=["value_dim"])
@dataclasses.dataclass(frozen=True)
class LatentPages:
    """Pages of one layer with multi-head latent attention (2405.04434): k as in `KVPages`, and the
    value of a token is the first `value_dim` features of its key."""

    k: jax.Array
    value_dim: int

    scales: ClassVar[None] = None

    @property
    def head_dim(self) -> int:
        """Features of a key."""
        return self.k.shape[2]

    @property
    def elements(self) -> LatentPages:
        """The pages, which have no scales."""
        return self


Pages = KVPages | LatentPages


def as_keys(x: jax.Array, pages: Pages) -> jax.Array:
    """Queries as the keys of these pages are, `rotated` or not; or results back from there."""
    return rotated(x).astype(x.dtype) if pages.k.dtype == jnp.uint8 else x


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Shape and dtype of the pages of one layer, and whether elements have scales. With a
    `value_dim` they are LatentPages."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    scaled: bool = False
    value_dim: int | None = None

    @property
    def shapes(self) -> Pages:
        """ShapeDtypeStructs of one layer's pages."""
        k = (self.num_pages, self.num_kv_heads, self.elements_per_head, self.page_size)
        if self.value_dim is not None:
            return LatentPages(jax.ShapeDtypeStruct(k, self.dtype), self.value_dim)
        v = (self.num_pages, self.num_kv_heads, self.page_size, self.elements_per_head)
        pages = KVPages(*(jax.ShapeDtypeStruct(shape, self.dtype) for shape in (k, v)))
        if not self.scaled:
            return pages
        scales = (self.num_pages, self.num_kv_heads, 2, self.page_size)
        return pages._replace(scales=jax.ShapeDtypeStruct(scales, jnp.float32))

    @property
    def elements_per_head(self) -> int:
        """Elements of a token's key or value in a head."""
        return self.head_dim // features_per_element(self.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer: keys, values and their scales."""
        arrays = jax.tree.leaves(self.shapes)
        return sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in arrays)


class RaggedBatch(NamedTuple):
    """Which tokens belong to which row, and the pages of each row's context.

    Rows are sequences. The first `num_decodes` of them (static, given at the call) have exactly
    one token each, at the same index; the others own tokens `starts[r]` to `starts[r] + lengths[r]`
    of the flat batch, in increasing order of start. A padding row has context length 0.

    tables [rows, max_pages] int32: page table, the pages of each row in order; unused entries 0.
    context [rows] int32: tokens the row can see, its own new tokens included.
    starts [rows] int32, lengths [rows] int32: the row's tokens in the flat batch.
    """

    tables: jax.Array
    context: jax.Array
    starts: jax.Array
    lengths: jax.Array

    def after_decodes(self, num_decodes: int) -> RaggedBatch:
        """The other rows, with the tokens after those of decodes as their flat batch."""
        rows = RaggedBatch(*(field[num_decodes:] for field in self))
        return rows._replace(starts=rows.starts - num_decodes)


class DecodeGroups(NamedTuple):
    """Groups of neighbouring decodes whose page tables begin with the same pages, int32 [groups].

    Group g is the `lengths[g]` decodes from `starts[g]` on, in increasing order of start. The first
    `context[g]` positions, a multiple of the page size and at most the context of each of its
    decodes but for padding rows, are on pages that they share. Groups of no decodes come last.
    """

    starts: jax.Array
    lengths: jax.Array
    context: jax.Array


class Paths(NamedTuple):
    """Tokens that are on paths through trees of drafts: where the keys and values of the last
    positions of their rows are, in whatever order the trees were written.

    Of token t, position `first[t] + i` is in slot (page_ids[t, i], offsets[t, i]) and not where the
    page table has it. int32 [tokens], [tokens, most] and [tokens, most]; `first` is beyond every
    context for a token of no tree.
    """

    first: jax.Array
    page_ids: jax.Array
    offsets: jax.Array


class Visible(NamedTuple):
    """Visible range of each token: since <= position < until of its row, int32 [tokens] each.

    Neither limit decreases from one token of a row to the next. If since >= until, the range is
    empty; tokens of no row have until = 0.
    """

    since: jax.Array
    until: jax.Array
