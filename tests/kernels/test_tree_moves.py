"""Trees as decodes, and the moves of what is kept of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_paged_attention import SCALE, Case

from pallas_kernels.paged_attention import (
    KVPages,
    LatentPages,
    RaggedBatch,
    move_kv,
    reference,
    tree_attention,
)

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


@pytest.mark.parametrize(
    "options",
    [{"sinks": np.float32([-5, 0, 3, 8])}, {"window": 2, "soft_cap": 2.0}],
    ids=["sinks", "window"],
)
def test_trees_as_decodes(options):
    """A full tree, one token, a tree without context, and then a chunk too long to be one."""
    sizes = [(20, 7), (13, 1), (4, 4)]
    case = Case([], [*sizes, (30, 12)], page_size=4)
    mask = mask_of(case)
    expected, _ = reference.paged_attention(
        case.q, case.pages, case.batch, num_decodes=0, scale=SCALE, tree_mask=mask, **options
    )
    trees = RaggedBatch(*(field[:3] for field in case.batch))
    count = sum(new for _, new in sizes)
    owner = np.repeat(np.arange(4), [new for _, new in (*sizes, (30, 12))])
    committed = np.array([context - new for context, new in (*sizes, (30, 12))])[owner]
    index = np.arange(len(owner)) - case.batch.starts[owner]
    depth = np.where(owner < 3, mask.sum(axis=1) - 1, index)
    positions = committed + depth
    until = np.where(owner < 3, committed, positions + 1)
    rows = [*owner[:count], 3]
    batch = RaggedBatch(
        case.batch.tables[rows],
        case.batch.context[rows],
        np.array([*range(count), count], np.int32),
        np.array([1] * count + [12], np.int32),
    )
    arrays = jax.tree.map(jnp.asarray, (case.q, case.pages, batch, trees, mask))
    out, _ = tree_attention(
        *arrays,
        positions=jnp.asarray(positions, jnp.int32),
        until=jnp.asarray(until, jnp.int32),
        num_decodes=count,
        scale=SCALE,
        **options,
    )
    np.testing.assert_allclose(out, expected, atol=2e-5)


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
