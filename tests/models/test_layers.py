"""Linear layers, and the order of their operands on CPUs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described_h200 import described_h200

from jaxserve.models import layers

OUTPUTS, INPUTS = 96, 32
few_and_many = pytest.mark.parametrize("tokens", [1, 5, layers.FEW_TOKENS, layers.FEW_TOKENS + 1])


def operands(tokens, dtype="float32"):
    rng = np.random.default_rng(tokens)
    weight, x = rng.normal(size=(OUTPUTS, INPUTS)), rng.normal(size=(tokens, INPUTS))
    return jnp.asarray(weight, dtype), jnp.asarray(x, dtype)


@few_and_many
def test_a_row_of_activations_is_a_token(tokens):
    weight, x = operands(tokens)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(jax.jit(layers.matmul)(weight, x), expected, rtol=1e-4, atol=1e-4)


def test_heads_and_biases_are_those_of_the_weight():
    weight, x = operands(3)
    bias = jnp.arange(OUTPUTS, dtype=jnp.float32)
    y = layers.column_parallel(weight.reshape(4, 24, 2, 16), x, bias.reshape(4, 24))
    np.testing.assert_allclose(y, layers.matmul(weight, x) + bias, rtol=1e-6)


@few_and_many
def test_cpus_multiply_few_tokens_with_the_weight_on_the_left(tokens):
    """As measured to be faster; without the barrier XLA turns the product around again."""
    program = jax.jit(lambda weight, x: jnp.tanh(layers.matmul(weight, x)))
    text = program.lower(*operands(tokens)).compile().as_text()
    few = tokens <= layers.FEW_TOKENS
    shape = (OUTPUTS, tokens) if few else (tokens, OUTPUTS)
    assert re.findall(r"f32\[(\d+),(\d+)\]\S* dot\(", text) == [tuple(map(str, shape))]


@pytest.mark.parametrize("tokens", [5, layers.FEW_TOKENS + 1])
def test_logits_are_float32_sums_of_bfloat16(tokens):
    head, hidden = operands(tokens, "bfloat16")
    logits = layers.tied_or_own_logits(head, hidden, OUTPUTS)
    assert logits.dtype == jnp.float32 and logits.shape == (tokens, OUTPUTS)
    expected = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, layers.FEW_TOKENS + 1])
def test_cpus_read_a_bfloat16_weight_as_it_is(tokens):
    """A decode step that makes a float32 copy of each weight first takes ten times as long."""
    compiled = jax.jit(layers.matmul).lower(*operands(tokens, "bfloat16")).compile()
    float32_results = 4 * tokens * OUTPUTS
    assert compiled.memory_analysis().temp_size_in_bytes <= float32_results


def test_the_norm_that_comes_next_adds_what_is_pending():
    x, parts = operands(3, "bfloat16")[1], operands(6)[1].reshape(2, 3, INPUTS)
    weight = jnp.linspace(0.5, 2, INPUTS, dtype=jnp.bfloat16)
    pending = layers.PendingSum(x, parts)
    whole = x + (parts[0] + parts[1]).astype(x.dtype)
    np.testing.assert_array_equal(layers.settled(pending), whole)
    for found in (layers.normed(pending, weight, 1e-5), layers.normed(whole, weight, 1e-5)):
        np.testing.assert_array_equal(found[0], whole)
        np.testing.assert_array_equal(found[1], layers.rms_norm(whole, weight, 1e-5))


def test_sums_are_pending_where_a_kernel_adds_them():
    """Traced for a Hopper GPU: within `pending_sums`, and without a bias."""
    weight, x = jnp.ones((256, 2048), jnp.bfloat16), jnp.ones((3, 2048), jnp.bfloat16)
    residual, bias = jnp.zeros((3, 256), jnp.bfloat16), jnp.zeros(256, jnp.bfloat16)

    def found(*bias):
        # What JAX has traced before it does not trace again, whatever the context.
        return jax.eval_shape(
            lambda *args: layers.add_row_parallel(*args), residual, weight, x, *bias
        )

    with jax.sharding.use_abstract_mesh(described_h200()):
        assert not isinstance(found(), layers.PendingSum)
        with layers.pending_sums():
            assert isinstance(found(), layers.PendingSum)
            assert not isinstance(found(bias), layers.PendingSum)
    with layers.pending_sums():
        assert not isinstance(found(), layers.PendingSum)
