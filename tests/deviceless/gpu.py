"""What tests need to compile for an H200, and to read what came of it.

Needs jax-cuda13-plugin and jax-cuda13-pjrt of JAX's version and a CUDA 13 toolkit, or the packages
nvidia-cuda-nvcc and nvidia-nvvm. Machine code is looked at where nvdisasm can be found too
(nvidia-cuda-nvdisasm, or the toolkit's). Where there is no GPU, run with JAX_PLATFORMS=cpu, or
the plugin will not load.
"""

from __future__ import annotations

import copy
import functools
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-plugin")

from jax._src.lib.mlir import ir
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.launch_context import LaunchContext

TARGET = Path(__file__).parents[2] / "jaxserve/core/devices/h200.txtpb"


@functools.cache
def h200():
    """A sharding on one H200 that is only described."""
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
    ).devices
    return NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=h200())


def check_box(box, bits, swizzle):
    """What the driver demands of a box that copies move, which it says only where it is: at most
    five dimensions of at most 256, the last whole 16 bytes and, if swizzled, within one swizzle.

    bits: of an element. swizzle: bytes; 16 are none.
    """
    assert 1 <= len(box) <= 5 and all(1 <= size <= 256 for size in box), box
    row_bits = box[-1] * bits
    assert row_bits % 128 == 0, (box, bits)
    assert swizzle in (None, 16) or row_bits <= 8 * swizzle, (box, bits, swizzle)


class Compiled:
    """A function compiled for an H200, and what was written on the way: PTX and reports."""

    def __init__(self, function, arguments, dump: Path, monkeypatch):
        monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(dump))
        monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
        monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
        self.boxes = []
        described = LaunchContext._get_tma_desc

        def describe(context, array, transforms, peer, box, swizzle, reduction):
            bits = utils.bitwidth(ir.MemRefType(array.type).element_type)
            self.boxes.append((box, bits, swizzle))
            return described(context, array, transforms, peer, box, swizzle, reduction)

        monkeypatch.setattr(LaunchContext, "_get_tma_desc", describe)
        with jax.sharding.use_abstract_mesh(h200().mesh.abstract_mesh):
            lowered = jax.jit(function).lower(*arguments)
        self.executable = lowered.compile()
        for box, bits, swizzle in self.boxes:
            check_box(box, bits, swizzle)
        self.dump = dump
        self.kernel = ""

    def of(self, kernel):
        """The same, of the one of its kernels whose name begins so."""
        one = copy.copy(self)
        one.kernel = kernel
        return one

    def dumped(self, suffix):
        (path,) = self.dump.glob(f"{self.kernel}*{suffix}")
        return path

    @property
    def report(self):
        return self.dumped(".ptxas").read_text()

    def numbers(self, pattern):
        """Every number that `pattern` finds in the assembler's report; there is at least one."""
        found = [int(number) for number in re.findall(pattern, self.report)]
        assert found, self.report
        return found

    def machine_code(self):
        """Disassembled; skips the test where the tools are missing."""
        packages = Path(jax.__file__).parents[1] / "nvidia"
        tools = {}
        for name in ("ptxas", "nvdisasm"):
            candidates = [*packages.glob(f"*/bin/{name}"), Path(f"/usr/local/cuda/bin/{name}")]
            tools[name] = shutil.which(name) or next(filter(Path.exists, candidates), None)
            if tools[name] is None:
                pytest.skip(f"{name} was not found")
        binary = self.dump / "kernel.cubin"
        assemble = [tools["ptxas"], "-arch=sm_90a", self.dumped(".ptx"), "-o", binary]
        subprocess.run(assemble, check=True)
        disassemble = [tools["nvdisasm"], binary]
        return subprocess.run(disassemble, check=True, capture_output=True, text=True).stdout


def products_with_registers(code: str) -> int:
    """How many wgmmas have their left operand in registers. None of these is written before the
    wait for the wgmma that reads it, or this fails.

    Assemblers before CUDA 13.3 may do that (triton-lang/triton issues 9433 and 11781).
    """
    reading, products = set(), 0
    for line in code.splitlines():
        found = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line)
        if not found:
            continue
        name, operands = found.groups()
        if name.startswith(("WARPGROUP.DEPBAR", "BRA", "EXIT")):
            reading.clear()
        elif name.startswith("HGMMA"):
            if left := re.match(r"R\d+, R(\d+)\b", operands):
                products += 1
                reading.update(range(int(left[1]), int(left[1]) + 4))
        elif target := re.match(r"R(\d+)\b", operands):
            wide = re.search(r"\.(64|128|WIDE)", name)
            count = {"64": 2, "128": 4, "WIDE": 2}[wide[1]] if wide else 1
            written = set(range(int(target[1]), int(target[1]) + count))
            assert not written & reading, f"{line.strip()} while a wgmma reads that"
    return products
