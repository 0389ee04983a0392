"""The Hopper kernel for packed weights, compiled for an H200 without one."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest
from gpu import array

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
    (GGUF["Q4_1"], (14336, 4096), 1, F16),
    (GGUF["Q4_1"], (14336, 4096), 4096, BF16),
    (Format("int4", 64), (4096, 14336), 2048, F16),
    (Format("int4", 128, minimum=True), (3584, 18944), 300, BF16),
    (Format("int4", 128, scale_dtype="bfloat16"), (576, 1536), 30, BF16),
    (GGUF["Q4_1"], (1152, 1024), 32, BF16),
    (Format("int4", None), (1088, 576), 16, BF16),
    (GGUF["Q4_1"], (1088, 1536), 32, F16),
    (GGUF["Q8_0"], (4096, 14336), 16, BF16),
    (GGUF["Q8_0"], (1536, 576), 1000, BF16),
    (Format("int8", 64, minimum=True), (4096, 4096), 1024, F16),
    (Format("int8", 128), (4096, 4096), 64, BF16),
    (Format("int8", None), (128256, 4096), 8, BF16),
    (FP8, (4096, 14336), 16, BF16),
    (FP8, (4096, 14336), 4096, F16),
    (FP8, (4096, 14336), 16, E4M3),
    (FP8, (14336, 4096), 4096, E4M3),
]


@pytest.mark.parametrize(("format", "shape", "tokens", "dtype"), CASES)
def test_quantized_matmul(compiled, format, shape, tokens, dtype):
    """Nothing spills, the blocks of a multiprocessor fit, and tensor cores and copies are used."""
    x = array(shape[1], tokens, dtype=dtype)
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
    assert_operands_stay(code)


def assert_operands_stay(code):
    """No register that tensor cores read is written before they have been waited for.

    Assemblers before CUDA 13.3 could do that (triton-lang/triton issues 9433 and 11781).
    """
    reading = set()
    for line in code.splitlines():
        found = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line)
        if not found:
            continue
        name, operands = found.groups()
        if name.startswith(("WARPGROUP.DEPBAR", "BRA", "EXIT")):
            reading.clear()
        elif name.startswith("HGMMA") and (left := re.match(r"R\d+, R(\d+)\b", operands)):
            reading.update(range(int(left[1]), int(left[1]) + 4))
        elif target := re.match(r"R(\d+)\b", operands):
            wide = re.search(r"\.(64|128|WIDE)", name)
            count = {"64": 2, "128": 4, "WIDE": 2}[wide[1]] if wide else 1
            written = set(range(int(target[1]), int(target[1]) + count))
            assert not written & reading, line


def test_a_pair_of_values_takes_four_instructions(compiled):
    """What the kernel's arithmetic for few tokens says: for 64 pairs, or 128 values of a thread."""
    arguments = packed(GGUF["Q4_0"], 4096, 4096), array(4096, 16)
    code = compiled(quantized_matmul, arguments).machine_code()
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", code, re.MULTILINE)
    assert names.count("HGMMA") == 16
    assert names.count("HADD2") + names.count("HMUL2") + names.count("HFMA2") <= 2 * 64 + 16
    assert names.count("LOP3") + names.count("SHF") + names.count("PRMT") <= 2 * 64 + 32


@pytest.mark.parametrize("format", [GGUF["Q4_1"], GGUF["Q8_0"], FP8], ids=str)
def test_neither_weights_nor_x_are_copied(compiled, format):
    """Temporary memory is the eight parts of each tile."""
    arguments = packed(format, 4096, 14336), array(14336, 16)
    executable = compiled(quantized_matmul, arguments).executable
    assert executable.memory_analysis().temp_size_in_bytes == 8 * 4096 * 16 * 4
