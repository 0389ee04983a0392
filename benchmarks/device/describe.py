"""Problems compiled for an H200 that is only described, to see that all of them can be."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.mesh import AbstractDevice
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from device import cases, classes, machine, sweep
from device.parts import Task
from device.problem import Problem, Shapes, jitted

TARGET = Path(__file__).parents[2] / "jaxserve/core/devices/h200.txtpb"
HAS_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None
DONE = "compiled" if HAS_COMPILER else "lowered"
"""Without jax-cuda13-plugin, programs go as far as JAX itself takes them."""


@functools.cache
def h200() -> tuple[AbstractMesh, NamedSharding | None]:
    """The mesh to trace under, and where arguments lie if anywhere."""
    axes = {"axis_names": ("x",), "axis_types": (AxisType.Auto,)}
    if not HAS_COMPILER:
        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        return AbstractMesh((1,), **axes, abstract_device=device), None
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
    ).devices
    mesh = Mesh(np.array(devices), **axes)
    return mesh.abstract_mesh, NamedSharding(mesh, PartitionSpec())


def shapes() -> Shapes:
    return Shapes(h200()[1])


def compile_for_h200(jitted_function: Any, *arguments: Any) -> None:
    """Raises whatever tracing, lowering or compiling raises."""
    with jax.sharding.use_abstract_mesh(h200()[0]):
        traced = jitted_function.trace(*arguments)
        if HAS_COMPILER:
            traced.lower().compile()
        else:
            traced.lower(lowering_platforms=("cuda",))


def compile_problem(problem: Problem) -> None:
    """All that measuring it would run; raises likewise."""
    make = shapes()
    carry, calls = problem.carry(make), [problem.inputs(make) for _ in range(problem.calls)]
    for step in {problem.kernel, problem.xla, problem.exact} - {None}:
        compile_for_h200(jitted(step), carry, calls)
    if problem.exact:
        found, exact = (_results(step, carry, calls) for step in (problem.kernel, problem.exact))
        compile_for_h200(jax.jit(problem.worst), found, exact)


def _results(step, carry, calls):
    mesh, sharding = h200()
    with jax.sharding.use_abstract_mesh(mesh):
        results = jax.eval_shape(jitted(step), carry, calls)
    return jax.tree.map(
        lambda result: jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=sharding), results
    )


def tasks(only: tuple[str, ...]) -> Iterator[Task]:
    """What compiles each of all that is measured."""

    def task(function, *arguments):
        refusal = function(*arguments)
        return {"status": "refused", "why": refusal} if refusal else {"status": DONE}

    for case in cases.wanted(cases.ALL, only):
        yield Task(case.name, functools.partial(task, compile_problem, case.spec.problem()))
    if not only or "paged_attention" in only:
        for value in sweep.VALUES:
            problem = sweep.problem(sweep.CASES["1 x 8k"], value)
            yield Task(f"a split of {value}", functools.partial(task, compile_problem, problem))
    for leaves in machine.LEAVES:
        function, arrays = machine.dispatch_program(leaves)
        compiles = functools.partial(task, compile_for_h200, function, arrays)
        yield Task(f"dispatch, {leaves} leaves", compiles)
    for spec in classes.specs(only):
        yield Task(f"a class: {spec}", functools.partial(task, _compile_kernel, spec.problem()))


def _compile_kernel(problem):
    """Why the kernel refuses, or None."""
    make = shapes()
    kernel = jax.jit(problem.kernel, donate_argnums=0)
    try:
        compile_for_h200(kernel, problem.carry(make), problem.inputs(make))
    except ValueError as error:
        return str(error)
