"""Pages of latents: the attention, writes and copies of pages with keys and values apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_paged_attention import SCALE, Case

from pallas_kernels.merge import merge_two
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.paged_attention import (
    KVPages,
    LatentPages,
    PageLayout,
    attend,
    attend_within_chunks,
    before_chunks,
    paged_attention,
    reference,
    write_kv,
)

DIM, VALUE_DIM = 8, 5
TREE = np.tril(np.ones((3, 3), bool))
"""A chain of three."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 6, "soft_cap": 1.5},
        {"sinks": np.float32([0.5, -1, 2, 0])},
        {"tree_mask": np.concatenate([np.zeros((16, 3), bool), TREE])},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_attention_is_that_to_keys_and_values_apart(options):
    """Whatever lies on unwritten slots. The last row is a tree where there is a mask."""
    case = Case([0, 1, 4, 9], [(17, 12), (7, 3)], page_size=4, heads=(4, 1), dim=DIM)
    latents = case.pages.k
    apart = KVPages(latents, latents.swapaxes(2, 3))
    named = {"num_decodes": case.num_decodes, "scale": SCALE} | options
    expected = reference.paged_attention(case.q, apart, case.batch, **named)
    pages = LatentPages(jnp.asarray(latents), VALUE_DIM)
    for implementation in (paged_attention, reference.paged_attention):
        out, lse = implementation(jnp.asarray(case.q), pages, case.batch, **named)
        assert out.shape == (len(case.q), 4, VALUE_DIM)
        np.testing.assert_allclose(out, expected[0][..., :VALUE_DIM], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse, expected[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"window": 6, "soft_cap": 1.5}], ids=["plain", "window"])
@pytest.mark.parametrize("padding", [0, 3])
def test_chunks_attend_to_what_is_before_them_and_to_themselves(options, padding):
    """In two parts, the second over keys and values that are on no pages. The second chunk has
    nothing before it, and values fewer features than keys."""
    case = Case([], [(17, 12), (5, 5), (300, 290)], page_size=4, heads=(4, 2), dim=DIM)
    tokens = len(case.q)
    expected = reference.paged_attention(
        case.q, case.pages, case.batch, num_decodes=0, scale=SCALE, **options
    )
    q = jnp.pad(jnp.asarray(case.q), ((0, padding), (0, 0), (0, 0)))
    k, v = new_of(case)
    visible = before_chunks(case.batch, len(q), options.get("window"))
    scores = {"scale": SCALE, "soft_cap": options.get("soft_cap")}
    before = attend(
        q, jax.tree.map(jnp.asarray, case.pages), case.batch, visible, num_decodes=0, **scores
    )
    k, v = (jnp.pad(array, ((0, padding), (0, 0), (0, 0))) for array in (k, v))
    own = attend_within_chunks(
        q, k, v[..., :VALUE_DIM], case.batch, window=options.get("window"), **scores
    )
    out, lse = merge_two(before[0][..., :VALUE_DIM], before[1], *own)
    assert out.shape == (tokens + padding, 4, VALUE_DIM)
    np.testing.assert_allclose(out[:tokens], expected[0][..., :VALUE_DIM], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse[:tokens], expected[1], rtol=2e-5, atol=2e-5)
    assert not out[tokens:].any() and (lse[tokens:] == -np.inf).all()


def new_of(case):
    """Keys and values [tokens, kv_heads, dim] of a batch's own tokens, from their pages."""
    k, v = [], []
    for table, context, _, length in zip(*map(np.asarray, case.batch)):
        for position in range(context - length, context):
            page, offset = table[position // 4], position % 4
            k.append(case.pages.k[page, :, :, offset])
            v.append(case.pages.v[page, :, offset])
    return jnp.asarray(np.stack(k)), jnp.asarray(np.stack(v))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latents_are_written_and_copied_as_keys_are(dtype):
    rng = np.random.default_rng(0)
    layout = PageLayout(5, 4, 1, DIM, jnp.dtype(dtype))
    k = jnp.asarray(rng.normal(size=layout.shapes.k.shape), dtype)
    new = jnp.asarray(rng.normal(size=(4, 1, DIM)), jnp.float32)
    places = jnp.int32([2, 4, -1, 9]), jnp.int32([3, 0, 1, 1])
    written = write_kv(LatentPages(k, VALUE_DIM), new, None, *places)
    expected = np.array(k)
    expected[2, :, :, 3], expected[4, :, :, 0] = np.asarray(new[:2].astype(dtype))
    assert written.value_dim == VALUE_DIM
    np.testing.assert_array_equal(written.k, expected)

    layers = [written, LatentPages(k, VALUE_DIM)]
    ids = jnp.int32([4, 1])
    rows = gather_pages(layers, ids)
    assert rows.shape == (2, 2 * 4 * DIM)
    for layer, page in zip(layers, copy_pages(layers, ids, jnp.int32([1, 3])), strict=True):
        moved = np.array(layer.k)
        moved[[1, 3]] = moved[[4, 1]]
        np.testing.assert_array_equal(page.k, moved)
    back = scatter_pages([LatentPages(jnp.zeros_like(k), VALUE_DIM)] * 2, ids, rows)
    np.testing.assert_array_equal(back[0].k[ids], written.k[ids])


def test_what_is_not_implemented_is_refused():
    case = Case([3], page_size=4, heads=(2, 1), dim=DIM)
    named = {"num_decodes": 1, "scale": SCALE}

    def attend(dtype="float32", value_dim=VALUE_DIM, **options):
        pages = LatentPages(jnp.asarray(case.pages.k, dtype), value_dim)
        paged_attention(jnp.asarray(case.q), pages, case.batch, **named, **options)

    with pytest.raises(ValueError, match=r"cpu kernel of latent_attention .*: there is none for"):
        attend(backend="pallas")
    with pytest.raises(ValueError, match="Latents are int8; they must be of a floating dtype"):
        attend("int8")
    with pytest.raises(ValueError, match="value_dim is 9; latents have 8 features"):
        attend(value_dim=9)
    with pytest.raises(ValueError, match="Latents have no scales"):
        attend(k_scale=jnp.ones(1))
