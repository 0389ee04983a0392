"""Self-check of kernels: whether a kernel gives correct results on a device.

A kernel that is wrong on some device, or miscompiled for it, fails silently. It is used without a
self-check only where `verified.json` lists it as correct: for this kind of device, these compilers
and sources (`fingerprint`) and this class of shapes. Elsewhere, before its first use, it and XLA
run a small random problem; if they disagree, the kernel is not used.

A kernel can also abort its process, leave the device unusable, or never end. So on GPUs a process
of its own tries it (`self_check_process`). A TPU has room for one process, which tries it itself.

`verified.json` is written on real devices by the project's kernel benchmark. It is a tree:
{device kind: {fingerprint: {operation: [classes of shapes]}}}.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import self_check_process

VERIFIED = Path(__file__).with_name("verified.json")

FEW_SMS = 4
"""Multiprocessors of a second check on GPUs: with so few, each takes several units of work."""


class CheckCase(NamedTuple):
    """A small problem of the same shapes class as a call, and the allowed error.

    An operation has two functions of a call's positional arguments, which may be tracers or only
    shapes, and its keyword arguments. `shapes_class(*arguments, **options)` is a string; calls with
    equal strings share one self-check. `check_case(arguments, options, rng)` is a problem, random
    by a numpy Generator. `tolerance` is relative to a result's size and to 1.
    """

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    tolerance: float


class SelfCheck(NamedTuple):
    """One self-check, of a call with such arguments, of which only shapes and dtypes are used.

    Can be pickled if its functions are found by their names.
    """

    platform: str
    kernel: Callable[..., Any]
    xla: Callable[..., Any]
    check_case: Callable[[tuple[Any, ...], dict[str, Any], np.random.Generator], CheckCase]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> str | None:
        """Run the check case with both on the default device: why the kernel is wrong, else None.

        On a GPU the kernel runs twice, the second time on FEW_SMS multiprocessors.
        """
        arguments, options, tolerance = self.check_case(
            self.arguments, self.options, np.random.default_rng(0)
        )
        expected = _run(self.xla, arguments, options)
        for limited, where in self._runs():
            try:
                with limited:
                    found = _run(self.kernel, arguments, options)
            except Exception as error:  # any compiler or driver error: fall back to XLA
                return f"its self-check{where} raised: {error}"
            errors = map(_error, jax.tree.leaves(expected), jax.tree.leaves(found))
            worst = max(errors, default=0.0)
            if worst > tolerance:
                return (
                    f"its self-check on this device{where} was wrong by {worst:.2g}; rounding "
                    f"explains {tolerance:.2g}. Please report it."
                )
        return None

    def _runs(self):
        """Context managers to run the kernel within, and how to say which it was."""
        yield contextlib.nullcontext(), ""
        if self.platform == "gpu":
            from pallas_kernels.compat import gpu

            yield gpu.limited_to(FEW_SMS), f" on {FEW_SMS} multiprocessors"


class Failure(NamedTuple):
    """A failed self-check: which, and why the kernel must not be used."""

    operation: str
    device_kind: str
    shapes: str
    why: str


def why_not(operation: str, device_kind: str, shapes: str, check: SelfCheck) -> str | None:
    """Why the kernel must not be used on the default device for this class of shapes, else None.

    Runs the self-check unless its result is known. May be called during tracing.
    """
    key = operation, device_kind, shapes
    with _lock:
        if key in _tried:
            return _tried[key]
        known = verified().get(device_kind, {})
        if shapes in known.get(fingerprint(), {}).get(operation, ()) if known else False:
            return None
        # Only shapes: tracers cannot leave this thread, nor arrays this process cheaply.
        bare = jax.tree.map(_shape, check.arguments)
        check = check._replace(arguments=bare)
        if check.platform == "gpu":
            _tried[key] = self_check_process.run(check)
        else:
            # Trace and mesh contexts are thread-local: a new thread has neither.
            with ThreadPoolExecutor(1) as thread:
                _tried[key] = thread.submit(check.run).result()
        return _tried[key]


def failures() -> list[Failure]:
    """The self-checks that failed so far."""
    with _lock:
        return [Failure(*key, why) for key, why in sorted(_tried.items()) if why is not None]


def adopt(others: Iterable[Failure]) -> None:
    """Take over what failed on other hosts, where it did not fail here."""
    with _lock:
        for *which, why in others:
            _tried[tuple(which)] = _tried.get(tuple(which)) or why


def finish() -> None:
    """End the process that checks run in, and free its memory on the device. The next check starts
    another."""
    with _lock:
        self_check_process.end()


_lock = threading.Lock()
_tried: dict[tuple[str, str, str], str | None] = {}


def _shape(array):
    return jax.ShapeDtypeStruct(jnp.shape(array), array.dtype)


def _run(function, arguments, options):
    program = jax.jit(functools.partial(function, **options)).lower(*arguments).compile()
    return jax.block_until_ready(program(*arguments))


def _error(expected, found) -> float:
    """The largest difference of two arrays, relative to `expected` and to 1."""
    expected, found = (np.asarray(array).astype(np.float64) for array in (expected, found))
    same = (expected == found) | (np.isnan(expected) & np.isnan(found))
    with np.errstate(invalid="ignore"):
        errors = np.abs(expected - found) / (1 + np.abs(expected))
    return float(np.max(np.where(same, 0, np.nan_to_num(errors, nan=np.inf)), initial=0))


def verified() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Contents of `verified.json`."""
    return _read(VERIFIED)


@functools.cache
def _read(path: Path):
    return json.loads(path.read_text())


@functools.cache
def fingerprint() -> str:
    """What decides a kernel's machine code: the versions of JAX and of the assembler for GPUs
    ("absent" without one), and a digest of this library's sources."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return f"jax {jax.__version__}, ptxas {ptxas_version()}, sources {digest.hexdigest()[:16]}"


def ptxas_version() -> str:
    """Of the assembler that JAX takes: that of the installed packages, else the toolkit's."""
    packages = Path(jax.__file__).parents[1] / "nvidia"
    found = [*sorted(packages.glob("*/bin/ptxas")), shutil.which("ptxas")]
    for ptxas in filter(None, [*found, "/usr/local/cuda/bin/ptxas"]):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=30)
            if version := said.stdout.rpartition(", V")[2].split():
                return version[0]
    return "absent"


def random_like(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Normal numbers; for integer dtypes rounded, with a tenth of the range as the deviation."""
    dtype = jnp.dtype(dtype)
    values = rng.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.integer):
        values = np.clip(np.round(values * jnp.iinfo(dtype).max / 10), *_range(dtype))
    return values.astype(dtype)


def _range(dtype):
    return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max


def eps(dtype: Any) -> float:
    """Distance from 1 to the next number of a floating dtype."""
    return float(jnp.finfo(dtype).eps)
