"""The Hopper kernel for residuals and norms, compiled for an H200 without one."""

from __future__ import annotations

import functools
import re

import jax.numpy as jnp
import pytest
from exhaustive import combination
from gpu import array

from pallas_kernels.residual_norm import mosaic_gpu

pytestmark = pytest.mark.deviceless


@pytest.mark.parametrize(
    ("hidden", "parts", "dtype", "of_parts"),
    [
        (4096, 8, jnp.bfloat16, jnp.float32),
        (768, 1, jnp.float16, jnp.float16),
        combination(mosaic_gpu.MAX_HIDDEN, 8, jnp.bfloat16, jnp.float32),
        combination(2048, 4, jnp.bfloat16, jnp.float32),
    ],
)
def test_one_kernel_that_keeps_a_token_in_registers(compiled, hidden, parts, dtype, of_parts):
    arguments = (
        array(8, hidden, dtype=dtype),
        array(parts, 8, hidden, dtype=of_parts),
        array(hidden, dtype=dtype),
    )
    kernel = compiled(functools.partial(mosaic_gpu.add_and_norm, eps=1e-5), arguments)
    assert set(kernel.numbers(r"(\d+) bytes spill")) == {0}
    code = kernel.machine_code()
    assert not re.search(r"\b(LDL|STL)\b", code)
    elements = hidden // 128
    assert code.count("LDG.E.128") >= parts * elements // 4 or of_parts != jnp.float32
