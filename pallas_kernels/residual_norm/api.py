"""Signatures of the sum of a residual and a product's parts, with the norm that follows.

A product of few tokens has too few outputs for all multiprocessors of a GPU, so XLA splits the
inputs and adds up the parts (split-K). It adds the residual in the same kernel, and norms in
another. With the parts made here, one kernel does all three.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backends
from pallas_kernels.residual_norm import check_case, xla

_ADD_AND_NORM = backends.Operation(
    name="add_and_norm",
    xla=xla.add_and_norm,
    kernels={"gpu": "pallas_kernels.residual_norm.mosaic_gpu", "tpu": None},
    shapes_class=check_case.shapes_class,
    check_case=check_case.check_case,
)

_TILE = 64
_TILES_PER_SM = 4
_MIN_INPUTS = 512
MAX_TOKENS = 64
"""Tokens of a product that is split; steps of more have not been counted."""


def add_and_norm(
    x: jax.Array,
    parts: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    backend: backends.Backend = "auto",
) -> tuple[jax.Array, jax.Array]:
    """x [tokens, hidden] plus the sum of `parts` [n, tokens, hidden], and its RMS norm over the
    features (1910.07467) times `weight` [hidden], both in the dtype of x.

    Parts, of the dtype of x or float32, are summed in float32, and their sum is rounded to the
    dtype of x before it is added, as a product would be. The norm is computed in float32 and
    rounded before it is multiplied. backend: see `backends.Backend`. Raises ValueError for
    inconsistent shapes, without parts, and where `backend` is "pallas" for what the device's kernel
    does not support.
    """
    tokens, hidden = x.shape
    if parts.ndim != 3 or len(parts) == 0 or parts.shape[1:] != x.shape:
        raise ValueError(f"parts have shape {parts.shape}; it must be (n, {tokens}, {hidden}).")
    if weight.shape != (hidden,):
        raise ValueError(f"weight has shape {weight.shape}; it must be ({hidden},).")
    if tokens == 0:
        return x, x
    return _ADD_AND_NORM.run(backend, x, parts, weight, eps=eps)


def product_parts(x: jax.Array, weight: jax.Array, residual: jax.Array) -> jax.Array | None:
    """x [tokens, in] times `weight` [out, in] transposed, as float32 [n, tokens, out]: each part is
    of a share of the inputs, for `add_and_norm` to `residual` [tokens, out].

    None where the product is better whole: the target device has no kernel to add such parts, or
    outputs enough to be busy with; for more than `MAX_TOKENS`; and for one token, whose parts XLA
    would compute by reductions and not as products. n depends on shapes and the device only.
    """
    tokens, inputs = x.shape
    outputs = len(weight)
    one = jax.ShapeDtypeStruct((1, tokens, outputs), jnp.float32)
    norm = jax.ShapeDtypeStruct((outputs,), residual.dtype)
    if not 2 <= tokens <= MAX_TOKENS or not _ADD_AND_NORM.supports(residual, one, norm, eps=0.0):
        return None
    from pallas_kernels.compat import gpu  # needs absl-py, as its kernels do

    n = num_parts(tokens, outputs, inputs, gpu.num_sms())
    if n == 1:
        return None
    both = (((2,), (2,)), ((1,), (1,)))
    return jax.lax.dot_general(
        x.reshape(tokens, n, -1),
        weight.reshape(outputs, n, -1),
        both,
        preferred_element_type=jnp.float32,
    )


def num_parts(tokens: int, outputs: int, inputs: int, sms: int) -> int:
    """The largest power of two of parts, of equally many inputs and no less than 512, of which
    `sms` multiprocessors have at most four tiles of 64 by 64 each."""
    tiles, n = -(-tokens // _TILE) * -(-outputs // _TILE), 1
    while (
        2 * n * tiles <= _TILES_PER_SM * sms
        and inputs % (2 * n) == 0
        and inputs // (2 * n) >= _MIN_INPUTS
    ):
        n *= 2
    return n
