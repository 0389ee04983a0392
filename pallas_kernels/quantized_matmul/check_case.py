"""Self-check case of quantized matmuls: a small random product in a given format."""

from __future__ import annotations

import jax
import numpy as np

from pallas_kernels.quantized_matmul.formats import quantize
from pallas_kernels.quantized_matmul.xla import FEW_TOKENS
from pallas_kernels.self_check import CheckCase, eps, random_like

_OUTPUTS = 256
_TOKENS = 300
_TOLERANCE = 4 * eps("bfloat16")
"""For any dtype: on some devices even float32 products default to bfloat16 passes."""


def shapes_class(weight, x) -> str:
    """The format, and whether tokens are few or many."""
    form = weight.format
    return (
        f"{form.values} in {f'groups of {form.group_size}' if form.group_size else 'rows'}"
        f"{' with minima' if form.minimum else ''}, {form.scale_dtype} scales, {x.dtype}, "
        f"{'few' if len(x) <= FEW_TOKENS else 'many'} tokens"
    )


def check_case(arguments, options, rng) -> CheckCase:
    """As many inputs as the call and, up to a limit, as many tokens; results are about 1."""
    weight, x = arguments
    num_inputs = weight.shape[1]
    wide = random_like(rng, (_OUTPUTS, num_inputs), "float32") / np.float32(num_inputs**0.5)
    packed = jax.tree.map(np.asarray, quantize(wide, weight.format))
    tokens = min(len(x), _TOKENS)
    return CheckCase((packed, random_like(rng, (tokens, num_inputs), x.dtype)), options, _TOLERANCE)
