"""The Hopper kernel for packed weights, compiled for an H200 without one."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest
from exhaustive import combination
from gpu import array, products_with_registers

from pallas_kernels.quantized_matmul import FP8, GGUF, Format, QuantizedWeight
from pallas_kernels.quantized_matmul.mosaic_gpu import quantized_matmul

pytestmark = pytest.mark.deviceless

BF16, F16, E4M3 = jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn


def packed(format, num_outputs, num_inputs):
    columns = num_inputs // 2 if format.values == "int4" else num_inputs
    groups = num_outputs, format.num_groups(num_inputs)
    return QuantizedWeight(
        array(num_outputs, columns, dtype=format.dtype),
        array(*groups, dtype=jnp.dtype(format.scale_dtype)),
        array(*groups, dtype=jnp.dtype(format.scale_dtype)) if format.minimum else None,
        format,
    )


CASES = [
    (GGUF["Q4_0"], (4096, 14336), 16, BF16),
    combination(GGUF["Q4_1"], (14336, 4096), 1, F16),
    (GGUF["Q4_1"], (14336, 4096), 4096, BF16),
    combination(Format("int4", 64), (4096, 14336), 2048, F16),
    (Format("int4", 128, minimum=True), (3584, 18944), 300, BF16),
    (Format("int4", 128, scale_dtype="bfloat16"), (576, 1536), 30, BF16),
    combination(GGUF["Q4_1"], (1152, 1024), 32, BF16),
    (Format("int4", None), (1088, 576), 16, BF16),
    combination(GGUF["Q4_1"], (1088, 1536), 32, F16),
    (GGUF["Q8_0"], (4096, 14336), 16, BF16),
    (GGUF["Q8_0"], (1536, 576), 1000, BF16),
    (Format("int8", 64, minimum=True), (4096, 4096), 1024, F16),
    combination(Format("int8", 128), (4096, 4096), 64, BF16),
    combination(Format("int8", None), (128256, 4096), 8, BF16),
    (FP8, (4096, 14336), 16, BF16),
    combination(FP8, (4096, 14336), 4096, F16),
    combination(FP8, (4096, 14336), 16, E4M3),
    (FP8, (14336, 4096), 4096, E4M3),
]


@pytest.mark.parametrize(("format", "shape", "tokens", "dtype"), CASES)
def test_quantized_matmul(compiled, format, shape, tokens, dtype):
    """Nothing spills, the blocks of a multiprocessor fit, and tensor cores and copies are used."""
    x = array(tokens, shape[1], dtype=dtype)
    kernel = compiled(quantized_matmul, (packed(format, *shape), x))
    assert set(kernel.numbers(r"(\d+) bytes spill")) == {0}
    ptx = kernel.dumped(".ptx").read_text()
    (threads,) = (int(number) for number in re.findall(r"\.maxntid (\d+)", ptx))
    registers = max(kernel.numbers(r"Used (\d+) registers"))
    blocks = min(3, 4 // (threads // 128 - 1)) if tokens <= 32 else 1
    assert registers * threads * blocks <= 65_536
    if shifted := [int(number) for number in re.findall(r"setmaxnreg\..* (\d+);", ptx)]:
        # What is taken must have been given up, or threads wait for ever.
        taken, kept = shifted
        assert taken * (threads - 128) + kept * 128 <= registers * threads
    assert "C75" not in kernel.report, "the assembler serialised wgmma or ignored setmaxnreg"
    code = kernel.machine_code()
    assert ("QGMMA" if dtype == E4M3 else "HGMMA") in code and "UTMALDG" in code
    assert not re.search(r"\b(LDL|STL)\b", code)
    # Neither conversions nor moves between threads.
    assert not re.search(r"\b(I2F\S*|SHFL\.BFLY)", code)
    # Unpacked weights are the left operand; float8 ones are multiplied where they lie.
    assert bool(products_with_registers(code)) == (dtype != E4M3)


def test_a_pair_of_values_takes_four_instructions(compiled):
    """What the kernel's arithmetic for few tokens says: for 64 pairs, or 128 values of a thread."""
    arguments = packed(GGUF["Q4_0"], 4096, 4096), array(16, 4096)
    code = compiled(quantized_matmul, arguments).machine_code()
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", code, re.MULTILINE)
    assert names.count("HGMMA") == 16
    assert names.count("HADD2") + names.count("HMUL2") + names.count("HFMA2") <= 2 * 64 + 16
    assert names.count("LOP3") + names.count("SHF") + names.count("PRMT") <= 2 * 64 + 32


@pytest.mark.parametrize("format", [GGUF["Q4_1"], GGUF["Q8_0"], FP8], ids=str)
def test_weights_are_not_copied(compiled, format):
    """Temporary memory is the eight parts of each tile, and x with its tokens last."""
    arguments = packed(format, 4096, 14336), array(16, 14336)
    executable = compiled(quantized_matmul, arguments).executable
    temporary = executable.memory_analysis().temp_size_in_bytes
    assert temporary == 8 * 4096 * 16 * 4 + 14336 * 16 * 2
