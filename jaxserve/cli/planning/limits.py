"""Roofline of a device: measured peak rates, and the lower bound of a step's time at those rates.

A roofline (Williams et al., CACM 2009) of the matrix products with weights only. Attention, norms
and sampling are left out, so the bound is unreachable, and looser for long contexts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.core.events import Dispatched
from jaxserve.models.loading.params import params_bytes
from jaxserve.models.moe_specs import active_size
from jaxserve.runtime.startup.engine_plan import EnginePlan

_REPEATS = 5
_COLUMNS = 512


class Limits(NamedTuple):
    """Rates of one device: FLOP/s of a matrix product, and bytes/s of a matrix-vector product."""

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, plan: EnginePlan, step: Dispatched) -> float:
        """Lower bound of a step's time: each token goes through every layer and each sampled row
        through the LM head, and every weight is read once. Of experts, only those of one token are
        certainly read."""
        model, specs = plan.shapes.model, plan.shapes.specs
        head = model.vocab_size * model.hidden_size
        of_layers = jax.tree.leaves(specs["layers"])
        layers = sum(active_size(model, spec) for spec in of_layers)
        idle = [
            params_bytes(spec, plan.shapes.dtype) * (1 - active_size(model, spec) / spec.size)
            for spec in of_layers
        ]
        placement = plan.shapes.placement
        read_bytes = plan.memory.weights_bytes - placement.device_bytes + placement.model_bytes
        read_bytes -= sum(idle)
        if not model.tie_word_embeddings:  # Only a few rows of the embeddings are read.
            read_bytes -= params_bytes(specs["embed"], plan.shapes.dtype)
        tokens = step.decode_rows + step.prefill_tokens
        # Only the last chunk of a prompt samples; count decodes only.
        flops = 2 * (layers * tokens + head * step.decode_rows)
        return max(flops / self.flops_per_s, read_bytes / self.bytes_per_s)


def measure(device: jax.Device, dtype: jnp.dtype) -> Limits:
    """Measure both rates: best of a few runs, with a matrix larger than any cache."""
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
