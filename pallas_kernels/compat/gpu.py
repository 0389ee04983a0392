"""Differences among JAX 0.10.2 to 0.12, and between a GPU and its interpreter.

The Mosaic GPU interpreter runs a kernel on the host, warpgroup by warpgroup, with memories, copies
and barriers simulated. It supports no register layouts, and products only of two operands in shared
memory. Kernels call the functions below that take `interpret` instead; with anything but None they
compute the same values in plain JAX.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir as ir
from jax._src.lib.mlir.dialects import arith as arith
from jax._src.lib.mlir.dialects import llvm as llvm
from jax._src.pallas.mosaic.interpret import thread_map as _threads
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as _interpreter
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:  # not public before 0.11
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

HOPPER_SMS = 132
"""Streaming multiprocessors of an H100 or H200 SXM."""


_most_sms: contextvars.ContextVar[int | None] = contextvars.ContextVar("most_sms", default=None)


@contextlib.contextmanager
def limited_to(sms: int) -> Iterator[None]:
    """Within it, kernels are traced for so many streaming multiprocessors."""
    token = _most_sms.set(sms)
    try:
        yield
    finally:
        _most_sms.reset(token)


def num_sms() -> int:
    """Streaming multiprocessors of the target device, HOPPER_SMS if unknown."""
    if _most_sms.get() is not None:
        return _most_sms.get()
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.num_cores:
        return described.num_cores
    return getattr(jax.devices()[0], "core_count", None) or HOPPER_SMS


@contextlib.contextmanager
def gpu_interpreter(*, detect_races: bool = True) -> Iterator[Any]:
    """What to pass as `interpret` to run Mosaic GPU kernels on the host.

    Uninitialised memory holds NaNs. Raises RuntimeError at the end when a race was found; until
    0.12 the interpreter itself only prints it. Not thread-safe. The programs must have finished
    when the block ends.
    """
    # A simulated warpgroup that waits for another occupies a thread, and the CPU's thread pool can
    # be smaller than a kernel's number of warpgroups: without the pool each has its own thread.
    asynchronous = jax.config.values["jax_cpu_enable_async_dispatch"]
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    run_warpgroup, _threads._run_jaxpr = _threads._run_jaxpr, _run_warpgroup
    try:
        yield InterpretGPUParams(detect_races=detect_races, uninitialized_memory="nan")
        races = _interpreter.get_races()
        if detect_races and races is not None and races.races_found:
            raise RuntimeError("The interpreter found a race; see its output.")
    except BaseException:
        _interpreter.reset_gpu_interpret_mode_state()
        raise
    finally:
        _threads._run_jaxpr = run_warpgroup
        jax.config.update("jax_cpu_enable_async_dispatch", asynchronous)


_MAX_PROGRAMS = 16
_programs: dict[Any, Any] = {}
_compiling = threading.Lock()


def _run_warpgroup(jaxpr, consts, *arguments):
    """Replace the interpreter's function for each warpgroup of each block: compile once for all of
    them and cache the last `_MAX_PROGRAMS` programs."""

    def run(consts, *arguments):
        jax.core.eval_jaxpr(jaxpr, consts, *arguments)

    with _compiling:
        if jaxpr not in _programs:
            if len(_programs) == _MAX_PROGRAMS:
                del _programs[next(iter(_programs))]
            _programs[jaxpr] = jax.jit(run).lower(consts, *arguments).compile()
        program = _programs[jaxpr]
    program(consts, *arguments)


def in_layout(array: jax.Array, layout: Any, interpret: Any) -> jax.Array:
    """`array`, on a device in registers of layout `layout`."""
    return array if interpret else plgpu.layout_cast(array, layout)


def load_gmem(ref: Any, layout: Any, interpret: Any) -> jax.Array:
    """Load a reference to device memory into registers of layout `layout`."""
    if interpret:
        return ref[...]
    indexed = {"idx": ()} if jax.__version_info__ < (0, 11) else {}
    return plgpu.load(ref, **indexed, layout=layout, optimized=False)


def positions(shape: tuple[int, ...], axis: int, layout: Any, interpret: Any) -> jax.Array:
    """int32 `shape`: each element's index along `axis`, in registers of layout `layout`."""
    return in_layout(lax.broadcasted_iota(jnp.int32, shape, axis), layout, interpret)


def product(a: Any, b: Any) -> jax.Array:
    """float32 a @ b by the tensor cores, for two references to shared memory."""

    def multiply(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]  # waits

    shape = a.shape[0], b.shape[1]
    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def product_of_rows(a: Any, b: Any, interpret: Any) -> jax.Array:
    """float32 a @ b.T by the tensor cores, for two references to shared memory."""
    if interpret:
        result = jnp.dot(a[...].astype(jnp.float32), b[...].astype(jnp.float32).T)
        plgpu.commit_smem()  # as in `add_products`
        return result
    return product(a, b.transpose((1, 0)))


def side_by_side(parts: Sequence[jax.Array], layout: Any, interpret: Any) -> jax.Array:
    """Concatenate `parts` [rows, columns each] along columns, in registers of layout `layout`.

    The columns of each are a multiple of the layout's tiles; no data moves between threads.
    """
    if len(parts) == 1:
        return parts[0]
    if interpret:
        return jnp.concatenate(parts, axis=1)
    shape = parts[0].shape[0], sum(part.shape[1] for part in parts)

    @plgpu.inline_mgpu(
        arg_types=(layout,) * len(parts),
        return_type=plgpu.ShapeDtypeStruct(shape, parts[0].dtype, layout),
    )
    def join(_, *parts):
        registers = np.concatenate([part.registers for part in parts], axis=1)
        return FragmentedArray(_registers=registers, _layout=parts[0].layout, _is_signed=None)

    return join(*parts)


def add_products(
    total: jax.Array, lefts: Sequence[jax.Array], rights: Sequence[Any], interpret: Any
) -> jax.Array:
    """float32 total + sum of lefts[i] @ rights[i]: register arrays times shared memory.

    The tensor cores have read the registers when it returns: versions of ptxas before CUDA 13.3
    may otherwise reuse them too early (triton-lang/triton issues 9433 and 11781).
    """
    if interpret:
        for left, right in zip(lefts, rights):
            total += jnp.dot(left.astype(jnp.float32), right[...].astype(jnp.float32))
        # Plain reads, not the tensor cores': a copy that overwrites must come after them.
        plgpu.commit_smem()
        return total

    def multiply(accumulator):
        for left, right in zip(lefts, rights):
            plgpu.wgmma(accumulator, left, right)

    return pl.run_state(multiply)(plgpu.ACC.init(total))  # waits
