"""What a machine could do at best: rates measured on it, and the least time of a step by them.

A roofline (Williams et al., CACM 2009) of the matrix products with weights alone. Attention, norms
and sampling are left out, so nothing can reach the limit, and long contexts stay further from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.engine.events import Dispatched
from jaxserve.models.loading.params import params_bytes
from jaxserve.runtime.startup import EnginePlan

_REPEATS = 5
_COLUMNS = 512


class Limits(NamedTuple):
    """Rates of one device: a matrix product's arithmetic, and a matrix-vector product's reading."""

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, plan: EnginePlan, step: Dispatched) -> float:
        """The least time of a step: it multiplies each token with every layer and each sampled row
        with the vocabulary, and reads every weight once."""
        model, specs = plan.geometry.model, plan.geometry.specs
        head = model.vocab_size * model.hidden_size
        layers = sum(spec.size for spec in jax.tree.leaves(specs["layers"]))
        read_bytes = plan.memory.weights_bytes
        if not model.tie_word_embeddings:  # Of the embeddings only a few rows are read.
            read_bytes -= params_bytes(specs["embed"], plan.geometry.dtype)
        tokens = step.decode_rows + step.prefill_tokens
        # A chunk that does not end its prompt samples nothing; only decodes are certain to.
        flops = 2 * (layers * tokens + head * step.decode_rows)
        return max(flops / self.flops_per_s, read_bytes / self.bytes_per_s)


def measure(device: jax.Device, dtype: jnp.dtype) -> Limits:
    """The best of a few runs each, with a matrix too large for any cache."""
    side = 4096 if device.platform == "cpu" else 16384
    ones = jax.jit(jnp.ones, static_argnums=(0, 1))
    matrix = jax.device_put(ones((side, side), dtype), device)
    several = jax.device_put(ones((side, _COLUMNS), dtype), device)
    one = jax.device_put(ones((side,), dtype), device)
    multiply = jax.jit(jnp.matmul)
    return Limits(
        flops_per_s=2 * side * side * _COLUMNS / _best_s(lambda: multiply(matrix, several)),
        bytes_per_s=matrix.nbytes / _best_s(lambda: multiply(matrix, one)),
    )


def _best_s(run: Callable[[], jax.Array]) -> float:
    run().block_until_ready()  # compiles
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - begin)
    return min(times)
