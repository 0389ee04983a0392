"""The benchmark on an H200, rehearsed: what it would run there can be compiled here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from exhaustive import exhaustive

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-plugin")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from device import cases, describe, peers_jax  # noqa: E402  (found by the path above)
from device.problem import jitted  # noqa: E402

pytestmark = pytest.mark.deviceless


@pytest.mark.parametrize("name", ["decode 1 x 128k", "prefill 16k", "Q4_0, 16 tokens"])
def test_a_target_compiles(name):
    """With all that it is compared with."""
    case = next(case for case in cases.TARGETS if case.name == name)
    describe.compile_problem(case.spec.problem())


@pytest.mark.parametrize("name", ["JAX's Triton kernel, paged", "bfloat16 weight, cuBLAS"])
def test_a_peer_compiles(name):
    """Those that can be where cuDNN and a device are not."""
    found = [peer for case in cases.TARGETS for peer in peers_jax.peers(case.spec)]
    peer = next(peer for peer in found if peer.name == name)
    step = jitted(lambda carry, inputs: (carry, peer.compute(inputs)))
    describe.compile_for_h200(step, (), [peer.inputs(describe.shapes())])


def rehearse(before=""):
    """The command's --dry for moves of pages, and its last lines."""
    script = ROOT / "benchmarks" / "h200.py"
    run = f"import runpy, sys; {before}sys.argv[1:] = ['--dry', '--only', 'page_copy']; "
    run += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", run],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_the_command_says_what_compiled():
    done = rehearse()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"\| +gather 64 pages \| +compiled \|", done.stdout)
    assert re.search(r"^Of (\d+): \1 compiled\.$", done.stdout.splitlines()[-1])


@exhaustive
def test_the_command_fails_where_a_kernel_does():
    done = rehearse(before="sys.modules['pallas_kernels.page_copy.mosaic_gpu'] = None; ")
    assert done.returncode == 1
    assert "failed: dry: gather 64 pages: ValueError: The gpu kernel of gather_pages" in done.stdout
