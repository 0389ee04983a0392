"""What tests need to compile for an H200 that is not there, and to read what came of it.

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

TARGET = Path(__file__).with_name("h200.txtpb")


@functools.cache
def h200():
    """A sharding on one H200 that is only described."""
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
    ).devices
    return NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=h200())


class Compiled:
    """A function compiled for an H200, and what was written on the way: PTX and reports."""

    def __init__(self, function, arguments, dump: Path, monkeypatch):
        monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(dump))
        monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
        monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
        with jax.sharding.use_abstract_mesh(h200().mesh.abstract_mesh):
            lowered = jax.jit(function).lower(*arguments)
        self.executable = lowered.compile()
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
        """Disassembled; skips the test where the tools are not there."""
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
