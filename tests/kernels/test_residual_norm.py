"""A residual, the parts of a product, and their norm: one contract, in XLA and interpreted."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described_h200 import described_h200
from exhaustive import combination

from pallas_kernels.compat import gpu as compat
from pallas_kernels.residual_norm import add_and_norm, api, mosaic_gpu, product_parts, reference
from pallas_kernels.self_check import eps

EPS = 1e-5


def arguments(tokens, hidden, parts, dtype="bfloat16", of_parts="float32"):
    rng = np.random.default_rng(hidden + parts)
    x, weight = rng.normal(size=(tokens, hidden)), rng.normal(size=hidden)
    parts = rng.normal(size=(parts, tokens, hidden)) / parts
    return jnp.asarray(x, dtype), jnp.asarray(parts, of_parts), jnp.asarray(weight, dtype)


class Contract:
    @pytest.mark.parametrize(
        ("tokens", "hidden", "parts", "dtype", "of_parts"),
        [
            (3, 768, 4, "bfloat16", "float32"),
            (2, 512, 1, "float16", "float16"),
            combination(1, 1024, 8, "float16", "float32"),
            combination(5, 256, 3, "bfloat16", "bfloat16"),
        ],
    )
    def test_against_the_reference(self, tokens, hidden, parts, dtype, of_parts):
        """The sum of float32 parts is rounded as a product is, then added and rounded again."""
        given = arguments(tokens, hidden, parts, dtype, of_parts)
        expected = reference.add_and_norm(*given, eps=EPS)
        for found, exact in zip(self.implementation(*given, eps=EPS), expected):
            assert found.dtype == dtype and found.shape == (tokens, hidden)
            error = np.abs(np.asarray(found, np.float64) - exact)
            assert np.max(error / (1 + np.abs(exact))) < 2 * eps(dtype)

    def test_a_token_of_nan_and_one_of_zeros_keep_to_themselves(self):
        x, parts, weight = arguments(3, 768, 4)
        x, parts = x.at[2].set(0), parts.at[:, 2].set(0)
        alone = self.implementation(x, parts, weight, eps=EPS)
        beside = self.implementation(x, parts.at[1, 1, 5].set(jnp.nan), weight, eps=EPS)
        for one, other in zip(alone, beside):
            np.testing.assert_array_equal(one[::2], other[::2])
            assert not one[2].any()
        added, normed = beside
        assert np.isnan(added[1]).sum() == 1 and np.isnan(normed[1]).all()


class TestXLA(Contract):
    implementation = staticmethod(functools.partial(add_and_norm, backend="xla"))


@pytest.mark.interpreted
@pytest.mark.oldest_jax
class TestInterpreted(Contract):
    def implementation(self, x, parts, weight, *, eps):
        with compat.gpu_interpreter(detect_races=True) as interpreter:
            kernel = functools.partial(mosaic_gpu.add_and_norm, eps=eps, interpret=interpreter)
            return jax.tree.map(np.asarray, jax.jit(kernel)(x, parts, weight))


@pytest.mark.parametrize(
    ("x", "parts", "message"),
    [
        ((2, 576), "float32", "hidden is 576; it can be a multiple of 256 up to 8192"),
        ((2, 16_384), "float32", "hidden is 16384"),
        ((2, 512), "float16", "parts are float16; they can be bfloat16 or float32"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(x, parts, message):
    given = [jax.ShapeDtypeStruct(x, "bfloat16"), jax.ShapeDtypeStruct((4, *x), parts)]
    given.append(jax.ShapeDtypeStruct(x[1:], "bfloat16"))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(mosaic_gpu.add_and_norm, eps=EPS), *given)


def test_inconsistent_shapes_are_refused():
    x, parts, weight = arguments(3, 8, 2)
    for given, message in (
        ((x, parts[:0], weight), r"parts have shape \(0, 3, 8\); it must be \(n, 3, 8\)"),
        ((x, parts[0], weight), r"parts have shape \(3, 8\)"),
        ((x, parts, weight[:4]), r"weight has shape \(4,\); it must be \(8,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            add_and_norm(*given, eps=EPS)


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "parts"),
    [
        (8, 4096, 4096, 8),  # as many as keep 512 inputs
        (64, 4096, 14_336, 8),
        (65, 4096, 14_336, 4),  # a second tile of tokens
        (2048, 4096, 14_336, 1),
        (8, 4096, 3 * 1024, 4),  # of 768 inputs
        (8, 28_672, 4096, 1),
    ],
)
def test_how_many_parts_a_product_has(tokens, outputs, inputs, parts):
    assert api.num_parts(tokens, outputs, inputs, 132) == parts


def test_parts_of_a_product_add_up_to_it():
    """Traced for a Hopper GPU, and computed here."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=(n, 2048)), jnp.bfloat16) for n in (3, 256))
    residual = jnp.zeros((3, 256), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(described_h200()):
        traced = jax.make_jaxpr(product_parts)(x, weight, residual)
    (parts,) = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, x, weight, residual)
    assert parts.shape == (4, 3, 256) and parts.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(parts.sum(axis=0), exact, atol=1e-3)


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA A100"])
def test_without_a_kernel_products_stay_whole(kind):
    """On CPUs, on other GPUs, for sizes and dtypes it does not take; of one token, and of many."""
    x, weight = jnp.zeros((3, 2048), jnp.bfloat16), jnp.zeros((256, 2048), jnp.bfloat16)
    residual = jnp.zeros((3, 256), jnp.bfloat16)
    assert product_parts(x, weight, residual) is None
    cases = [(weight[:96], residual[:, :96]), (weight, residual.astype(jnp.float32))]
    if "H200" not in kind:
        cases.append((weight, residual))
    with jax.sharding.use_abstract_mesh(described_h200(kind)):
        for own, its_residual in cases:
            assert product_parts(x, own, its_residual) is None
        for tokens in (1, api.MAX_TOKENS + 1):
            more, sums = jnp.zeros((tokens, 2048), x.dtype), jnp.zeros((tokens, 256), x.dtype)
            assert product_parts(more, weight, sums) is None
