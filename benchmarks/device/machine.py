"""What is said of the machine itself, and what a step costs outside its kernels."""

from __future__ import annotations

import importlib.metadata
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import self_check

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "torch", "transformers")
LEAVES = (1, 10, 100, 500)
COPY_BYTES = (8 << 20, 512 << 20)
DISPATCHES = 200


def save_target_config(path: Path) -> None:
    """What to compile by, for this very device, where it is not."""
    from jax._src.lib import xla_client

    topology = xla_client.get_topology_for_devices(jax.devices()[:1])
    path.write_text(str(topology.target_config))


def versions() -> dict[str, str]:
    device = jax.devices()[0]
    found = {"platform": device.platform, "device": device.device_kind}
    found["python"] = sys.version.split()[0]
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    query = "nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit"
    found["nvidia-smi"] = _said(*query.split(), "--format=csv,noheader")
    found["ptxas"] = self_check.ptxas_version()
    return found


def _said(*command: str) -> str:
    """The last line of what a command says."""
    program = shutil.which(command[0]) or f"/usr/local/cuda/bin/{command[0]}"
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=30)
    except OSError:
        return "absent"
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def dispatch_program(leaves: int) -> tuple[Any, dict[str, Any]]:
    """A jitted function of a dict of so many small arrays, which it changes in place."""
    function = jax.jit(
        lambda arrays: {name: array + 1 for name, array in arrays.items()}, donate_argnums=0
    )
    return function, {f"leaf {i}": jax.ShapeDtypeStruct((8,), jnp.float32) for i in range(leaves)}


def dispatch_us(leaves: int) -> dict[str, dict[str, float]]:
    """{"us": host microseconds of a call of a program with so many leaves, by how it is called}.

    Each call is made when the device has nothing to do, and none waits for it.
    """
    function, shapes = dispatch_program(leaves)
    compiled = function.lower(shapes).compile()
    found = {}
    for name, call in (("jit", function), ("compiled ahead", compiled)):
        arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        times = []
        for _ in range(DISPATCHES):
            begin = time.perf_counter()
            arrays = call(arrays)
            times.append(time.perf_counter() - begin)
            jax.block_until_ready(arrays)
        found[name] = 1e6 * statistics.median(times)
    return {"us": found}


def host_copy_gb_s(num_bytes: int) -> dict[str, dict[str, float]]:
    """{"gb_s": rates of copies between device and host, by where from and to}."""
    device = jax.devices()[0]
    here = jax.sharding.SingleDeviceSharding(device)
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    array = jnp.ones(num_bytes // 2, jnp.bfloat16)
    on_host = jax.block_until_ready(jax.device_put(array, pinned))
    plain = np.asarray(array)
    copies = {
        "device to pinned": lambda: jax.device_put(array, pinned),
        "pinned to device": lambda: jax.device_put(on_host, here),
        "device to numpy": lambda: np.asarray(array + 0),
        "numpy to device": lambda: jax.device_put(plain, here),
        "pinned to numpy": lambda: np.asarray(jax.device_put(array, pinned)),
        "both ways, pinned": lambda: (jax.device_put(array, pinned), jax.device_put(on_host, here)),
    }
    rates = {}
    for name, copy in copies.items():
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            jax.block_until_ready(copy())
            times.append(time.perf_counter() - begin)
        moved = num_bytes * (2 if name.startswith("both") else 1)
        rates[name] = moved / statistics.median(times[1:]) / 1e9
    return {"gb_s": rates}
