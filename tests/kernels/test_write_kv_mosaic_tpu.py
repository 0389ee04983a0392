"""The TPU kernel that writes keys and values, interpreted, against loops of numpy.

Mostly compiled to XLA, which is fast; and in small by the simulator that detects races and begins
copies as late as it may.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_page_copy import random_bits, without_payloads
from unoptimised import UNOPTIMISED

from pallas_kernels.compat import tpu as compat
from pallas_kernels.paged_attention import PageLayout
from pallas_kernels.paged_attention.tpu import write
from pallas_kernels.paged_attention.tpu.write import find_runs, unsupported, write_kv

pytestmark = pytest.mark.interpreted

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
ANYWHERE = [-(2**31), -1, 10**6, 2**31 - 1]
"""Ids outside any pool."""


@functools.cache
def jitted(cores):
    """Compiled for so many cores that share the heads; unoptimised, which is ready sooner."""
    write = functools.partial(write_kv, interpret=True)
    return jax.jit(write, compiler_options=UNOPTIMISED)


def places(segments):
    """page_ids and offsets of segments (page, first offset, tokens)."""
    ids = [page for page, _, tokens in segments for _ in range(tokens)]
    offsets = [first + n for _, first, tokens in segments for n in range(tokens)]
    return np.int32(ids), np.int32(offsets)


def check(segments, dtype="bfloat16", *, heads=2, head_dim=16, page_size=4, pages=12, cores=1,
          write=None):  # fmt: skip
    """Every bit of the pool, but for page 0; `write` is what the simulator of races runs."""
    rng = np.random.default_rng(0)
    ids, offsets = places(segments)
    layout = PageLayout(pages, page_size, heads, head_dim, jnp.dtype(dtype))
    shapes = (layout.shapes, jax.ShapeDtypeStruct((2, len(ids), heads, head_dim), layout.dtype))
    bits = jax.tree.map(lambda like: random_bits(like.shape, like.dtype, rng).copy(), shapes)
    pool, (k, v) = without_payloads(bits) if write else bits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "tpu_cores", lambda: cores)
        written = (write or jitted(cores))(*jax.tree.map(jnp.asarray, (pool, k, v, ids, offsets)))
    for token, (page, offset) in enumerate(zip(ids, offsets)):
        if 0 < page < pages:
            pool.k[page, :, :, offset] = k[token]
            pool.v[page, :, offset] = v[token]
    for found, expected in zip(*map(jax.tree.leaves, (written, pool))):
        found = np.asarray(found)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found[1:].view(np.uint8), expected[1:].view(np.uint8))
    return written


STEP = [
    *((page, offset, 1) for page, offset in zip((3, 9, 1, 7), (0, 3, 2, 1))),
    (-1, 0, 1),
    (5, 1, 3), (2, 0, 4), (11, 0, 2),
    (8, 3, 1), (6, 0, 4), (4, 0, 4), (10, 0, 1),
    *[(0, 0, 1)] * 9,
]  # fmt: skip
"""Decodes, one of them outside the pool, two chunks that begin within a page, and padding."""


@pytest.mark.parametrize(("dtype", "cores"), [*((dtype, 1) for dtype in DTYPES), ("bfloat16", 2)])
def test_decodes_chunks_and_padding(dtype, cores):
    check(STEP, dtype, cores=cores)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [*((dtype, 128) for dtype in DTYPES), ("bfloat16", 64)]
)
def test_tiles_as_large_as_on_a_device(head_dim, dtype):
    """Values in rows, which words have several of, or turned; from any place to any other."""
    segments = [(1, 255, 1), (2, 100, 156), (3, 0, 131), (4, 7, 1), (5, 33, 60), (6, 1, 3)]
    check(segments, dtype, heads=1, head_dim=head_dim, page_size=256, pages=7)


@settings(max_examples=10, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["float32", "bfloat16", "int8"]))
def test_any_batch(data, dtype):
    """Each page at most once in a row; what is left of 40 tokens goes nowhere."""
    segments, left = [], 40
    for page in data.draw(st.permutations(range(1, 12))):
        first = data.draw(st.integers(0, 7))
        tokens = data.draw(st.integers(0, min(8 - first, left)))
        segments.append((page, first, tokens))
        left -= tokens
        if left and data.draw(st.booleans()):
            segments.append((data.draw(st.sampled_from([0, 12, *ANYWHERE])), 3, 1))
            left -= 1
    segments.append((data.draw(st.sampled_from([0, 12, *ANYWHERE])), 0, left))
    check(segments, dtype, heads=1, head_dim=128, page_size=8)


@pytest.mark.oldest_jax
@pytest.mark.parametrize("head_dim", [16, 128])
def test_no_copy_races_with_another(head_dim, monkeypatch):
    """More runs than slots, two groups of heads, and runs that meet in a tile."""
    monkeypatch.setattr(write, "TILE_BYTES", 2 * head_dim * 4)
    again = [(3, 2, 1), (3, 0, 1), (9, 0, 1), (3, 1, 1)]
    with compat.tpu_interpreter() as interpreter:
        check(
            STEP + again,
            head_dim=head_dim,
            write=functools.partial(write_kv, interpret=interpreter),
        )


def test_runs_that_meet_in_a_page_wait_for_each_other():
    """Tokens of a page that do not follow one another, in every order and at every distance."""
    order = np.random.default_rng(1).permutation(32)
    check([(1 + place // 8, place % 8, 1) for place in order], page_size=8, pages=6)
    waits = find_runs(*places([(1, 0, 2), (2, 0, 1), (1, 3, 1), (3, 0, 1), (2, 1, 1), (4, 0, 1)]),
                      num_pages=9, page_size=4, span=4, depth=3)[0].waits  # fmt: skip
    np.testing.assert_array_equal(waits[:6], [0, 0, 1, 0, 0, 0])


def test_padding_is_no_work():
    runs, until = find_runs(*places([(0, 0, 5), (4, 2, 3), (-1, 0, 4)]), num_pages=9, page_size=8,
                            span=4, depth=4)  # fmt: skip
    np.testing.assert_array_equal(until, [0, 2, 2])
    for field, expected in zip(runs, ([5, 7], [2, 1], [4, 4], [2, 4], [0, 0])):
        np.testing.assert_array_equal(field[:2], expected)
    assert not np.any(runs.length[2:])


def arguments(dtype="bfloat16", new_dtype=None, tokens=4, **kind):
    sizes = {"num_pages": 4, "page_size": 128, "num_kv_heads": 2, "head_dim": 128} | kind
    pages = PageLayout(**sizes, dtype=jnp.dtype(dtype)).shapes
    new = jax.ShapeDtypeStruct((tokens, 2, sizes["head_dim"]), new_dtype or dtype)
    where = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    return pages, new, new, where, where


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"dtype": "float16"}, "keys are float16; they can be of bfloat16, float32"),
        ({"new_dtype": "float32"}, "new keys are float32; they must be bfloat16"),
        ({"head_dim": 80}, "head_dim is 80; it can be one of"),
        ({"page_size": 64}, "page_size is 64; it can be a multiple of 128"),
        ({"tokens": 40000}, "there are 40000 tokens; there can be up to 16384"),
        ({"page_size": 3, "interpret": True}, "pages have 3 tokens and head_dim 128; interpreted"),
    ],
)
def test_what_it_cannot_do_is_refused(kind, message):
    interpret = kind.pop("interpret", None)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(write_kv, interpret=interpret), *arguments(**kind))


def test_nothing_else_is_refused():
    for kind in ({}, {"head_dim": 64, "page_size": 256}, {"dtype": "int8", "tokens": 16384}):
        assert unsupported(*arguments(**kind)) is None
