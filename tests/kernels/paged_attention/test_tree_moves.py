"""Trees as decodes, and the moves of what is kept of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import combination
from test_paged_attention import SCALE, Case

from pallas_kernels.paged_attention import (
    KVPages,
    LatentPages,
    Paths,
    RaggedBatch,
    move_kv,
    paged_attention,
    reference,
    tree_attention,
)
from pallas_kernels.paged_attention.layout import packed_int4

PARENTS = [-1, 0, 0, 1, 1, 2, 3]
WIDTH = len(PARENTS)


def mask_of(case) -> np.ndarray:
    """The mask of rows of the tokens of PARENTS, the first ones where they are fewer."""
    mask = np.zeros((len(case.q), WIDTH), bool)
    for start, length in zip(case.batch.starts, case.batch.lengths):
        for token in range(min(length, WIDTH)):
            node = token
            while node >= 0:
                mask[start + token, node] = True
                node = PARENTS[node]
    return mask


SIZES = [(20, 7), (13, 1), (4, 4)]
"""A full tree, one token, and a tree without context."""


def of_trees(case, num_trees: int) -> tuple[RaggedBatch, RaggedBatch, dict[str, np.ndarray]]:
    """The rows of `case` with a row for each token of the first ones, which are trees; the trees;
    and the positions and paths of all tokens, and what they see."""
    page_size = case.pages.k.shape[3]
    lengths, mask = case.batch.lengths, mask_of(case)
    count, owner = int(lengths[:num_trees].sum()), np.repeat(np.arange(len(lengths)), lengths)
    first = (case.batch.context - lengths)[owner]
    index = np.arange(len(owner)) - case.batch.starts[owner]
    depths = np.where(owner < num_trees, mask.sum(axis=1) - 1, index)
    slots = np.zeros((2, count, 1 + max(depths[:count])), np.int32)
    for token in range(count):
        for place, node in enumerate(np.flatnonzero(mask[token])):
            page, offset = divmod(first[token] + node, page_size)
            slots[:, token, place] = case.batch.tables[owner[token], page], offset
    rows = [*owner[:count], *range(num_trees, len(lengths))]
    batch = RaggedBatch(
        case.batch.tables[rows],
        case.batch.context[rows],
        np.array([*range(count), *case.batch.starts[num_trees:]], np.int32),
        np.array([1] * count + [*lengths[num_trees:]], np.int32),
    )
    trees = RaggedBatch(*(field[:num_trees] for field in case.batch))
    positions = (first + depths).astype(np.int32)
    paths = Paths(first[:count].astype(np.int32), *slots)
    return batch, trees, {"positions": positions, "until": positions + 1, "paths": paths}


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": np.float32([-5, 0, 3, 8])},
        {"window": 2, "soft_cap": 2.0},
        combination({"window": 2, "backend": "pallas"}),
    ],
    ids=["sinks", "window", "kernel"],
)
def test_trees_as_decodes(options):
    """Trees, and then a chunk too long to be one."""
    case = Case([], [*SIZES, (30, 12)], page_size=4)
    of_kernel, mask = dict(options), mask_of(case)
    options = {name: value for name, value in options.items() if name != "backend"}
    expected, _ = reference.paged_attention(
        case.q, case.pages, case.batch, num_decodes=0, scale=SCALE, tree_mask=mask, **options
    )
    batch, trees, own = of_trees(case, len(SIZES))
    count = len(own["paths"].first)
    arrays = jax.tree.map(jnp.asarray, (case.q, case.pages, batch, trees, mask))
    own = jax.tree.map(jnp.asarray, own)
    out, _ = tree_attention(*arrays, num_decodes=count, scale=SCALE, **own, **of_kernel)
    np.testing.assert_allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "in_tiles"),
    [
        *[("bfloat16", False), ("bfloat16", True), ("int8", True), ("latents", False)],
        *[("float8_e4m3fn", False), ("int4", False)],
    ],
)
def test_a_path_is_attended_to_as_if_it_were_alone_to_the_last_bit(kind, in_tiles):
    """By decodes, or by rows of one token as in tiles."""
    case = Case([], SIZES, page_size=4)
    case.pages = jax.tree.map(np.nan_to_num, case.pages)
    batch, trees, own = of_trees(case, len(SIZES))
    count = len(own["paths"].first)
    pages = jax.tree.map(lambda array: jnp.asarray(array, jnp.bfloat16), case.pages)
    if kind in ("int8", "float8_e4m3fn", "int4"):
        shape = (*case.pages.k.shape[:2], 2, 4)
        scales = jnp.asarray(np.random.default_rng(1).uniform(0.01, 0.1, shape), jnp.float32)
        if kind == "int4":
            k, v = (jnp.asarray(3 * array, jnp.int8).clip(-7, 7) for array in case.pages[:2])
            packed = packed_int4(k.swapaxes(2, 3)).swapaxes(2, 3), packed_int4(v)
        else:
            packed = tuple(jnp.asarray(40 * array, kind) for array in case.pages[:2])
        pages = KVPages(*packed, scales)
    if kind == "latents":
        pages = LatentPages(pages.k, 8)

    # For every token pages of its own, where its path follows what is before it.
    width = batch.tables.shape[1]
    position = np.arange(4 * width)
    page_ids, offsets = batch.tables[:, position // 4], np.tile(position % 4, (count, 1))
    for token, first in enumerate(own["paths"].first):
        place = slice(first, own["until"][token])
        length = own["until"][token] - first
        page_ids[token, place] = own["paths"].page_ids[token, :length]
        offsets[token, place] = own["paths"].offsets[token, :length]
    tables = np.arange(count * width, dtype=np.int32).reshape(count, width)
    to = tables[:, position // 4].reshape(-1), np.tile(position % 4, count)
    own_pages = jax.tree.map(
        lambda array: jnp.concatenate([jnp.zeros_like(array[:1]).repeat(count * width, 0), array]),
        pages,
    )
    sources = page_ids.reshape(-1) + count * width, offsets.reshape(-1)
    own_pages = move_kv(own_pages, sources, to)
    alone = RaggedBatch(tables, own["until"], np.arange(count, dtype=np.int32), batch.lengths)

    options = {"num_decodes": 0 if in_tiles else count, "scale": SCALE, "window": 9}
    q = jnp.asarray(case.q, jnp.bfloat16)
    arrays = jax.tree.map(jnp.asarray, (batch, trees, mask_of(case)))
    own = jax.tree.map(jnp.asarray, own)
    found = jax.jit(functools.partial(tree_attention, **options))(q, pages, *arrays, **own)
    attend = jax.jit(functools.partial(paged_attention, **options))
    expected = attend(q, own_pages, jax.tree.map(jnp.asarray, alone))
    for mine, other in zip(found, expected, strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "float8_e4m3fn", "latents"])
def test_moves(kind):
    """A target that is a source, one outside the pool, one on another page."""
    rng = np.random.default_rng(0)
    dtype = jnp.float32 if kind == "latents" else jnp.dtype(kind)
    k = jnp.asarray(rng.normal(size=(5, 2, 8, 4)) * 9).astype(dtype)
    v = jnp.asarray(rng.normal(size=(5, 2, 4, 8)) * 9).astype(dtype)
    pages = LatentPages(k, 4) if kind == "latents" else KVPages(k, v)
    if kind in ("int8", "float8_e4m3fn"):
        scales = jnp.asarray(rng.uniform(size=(5, 2, 2, 4)), jnp.float32)
        pages = pages._replace(scales=scales)
    sources = np.array([[3, 1], [3, 3], [4, 0], [2, 2]], np.int32).T
    targets = np.array([[3, 0], [3, 1], [1, 2], [-1, 0]], np.int32).T
    expected = jax.tree.map(lambda array: np.array(array), pages)
    before = jax.tree.map(np.copy, expected)
    for (page, offset), (to, at) in list(zip(sources.T, targets.T))[:3]:
        expected.k[to, :, :, at] = before.k[page, :, :, offset]
        if kind != "latents":
            expected.v[to, :, at] = before.v[page, :, offset]
        if pages.scales is not None:
            expected.scales[to, :, :, at] = before.scales[page, :, :, offset]
    moved = jax.jit(move_kv)(pages, tuple(sources), tuple(targets))
    for found, array in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
        assert np.asarray(found).tobytes() == np.asarray(array).tobytes()
