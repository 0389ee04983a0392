"""Mosaic GPU kernels compiled for an H200 without one: what the compiler and the assembler say.

Needs jax-cuda13-plugin and jax-cuda13-pjrt of JAX's version and a CUDA 13 toolkit, or the packages
nvidia-cuda-nvcc and nvidia-nvvm. Machine code is looked at where nvdisasm can be found too
(nvidia-cuda-nvdisasm, or the toolkit's). Where there is no GPU, run with JAX_PLATFORMS=cpu, or
the plugin will not load.
"""

from __future__ import annotations

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

from pallas_kernels.paged_attention import KVPages, RaggedBatch
from pallas_kernels.paged_attention.mosaic_gpu_decode import paged_decode

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-plugin")
pytestmark = pytest.mark.deviceless

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


def decode_arguments(rows, heads, kv_heads, head_dim, page_size, context=8192, dtype=jnp.bfloat16):
    ints = functools.partial(array, dtype=jnp.int32)
    pages = KVPages(
        array(512, kv_heads, head_dim, page_size, dtype=dtype),
        array(512, kv_heads, page_size, head_dim, dtype=dtype),
    )
    batch = RaggedBatch(ints(rows, context // page_size), ints(rows), ints(rows), ints(rows))
    return array(rows, heads, head_dim, dtype=dtype), pages, batch


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

    def dumped(self, suffix):
        (path,) = self.dump.glob(f"*{suffix}")
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


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    return functools.partial(Compiled, dump=tmp_path, monkeypatch=monkeypatch)


def decode_shapes(heads, kv_heads, head_dim, page_size, dtype=jnp.bfloat16):
    return locals()


DECODES = [
    *((decode_shapes(32, 8, 128, page_size), {}) for page_size in (16, 32, 64, 128)),
    (decode_shapes(8, 8, 64, 16, jnp.float16), {"window": 1000}),
    (decode_shapes(16, 1, 64, 64), {"soft_cap": 30.0}),
    (decode_shapes(64, 1, 128, 64), {"window": 128, "soft_cap": 30.0}),
    (decode_shapes(32, 8, 256, 16), {"window": 1000, "soft_cap": 30.0}),
    (decode_shapes(16, 8, 256, 64), {}),
]


@pytest.mark.parametrize(("shapes", "options"), DECODES)
def test_paged_decode(compiled, shapes, options):
    """Nothing spills, one block of threads fits, and the work is done by the units meant for it."""
    function = functools.partial(paged_decode, num_decodes=8, scale=0.1, **options)
    kernel = compiled(function, decode_arguments(8, **shapes))
    assert set(kernel.numbers(r"(\d+) bytes spill")) == {0}
    registers = max(kernel.numbers(r"Used (\d+) registers"))
    warpgroups = 2 if shapes["head_dim"] == 256 else 4
    assert registers * 128 * warpgroups <= 65_536
    assert "C75" not in kernel.report, "the assembler serialised wgmma or ignored setmaxnreg"
    ptx = kernel.dumped(".ptx").read_text()
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    code = kernel.machine_code()
    assert "HGMMA" in code and "UTMALDG" in code
    assert not re.search(r"\b(LDL|STL)\b", code)


def test_paged_decode_copies_no_pages_and_plans_once_for_all_layers(compiled):
    """Temporary memory is partial results; a second layer adds a kernel, a pad and a merge."""

    def layers(q, first, second, batch):
        decode = functools.partial(paged_decode, num_decodes=64, scale=0.1)
        out, _ = decode(q, first, batch)
        return decode(out, second, batch)

    q, pages, batch = decode_arguments(64, 32, 8, 128, 64)
    executable = compiled(layers, (q, pages, pages, batch)).executable
    splits = 8192 // 512
    partials = 64 * splits * 32 * (128 + 8) * 4
    assert executable.memory_analysis().temp_size_in_bytes < 2 * partials + 2**22
    kernels = re.findall(r"= .*\b(?:fusion|custom-call)\(", executable.as_text().split("ENTRY")[1])
    assert sum("custom-call(" in kernel for kernel in kernels) == 2
    assert sum("s32[1024,6]" in kernel for kernel in kernels) == 1
