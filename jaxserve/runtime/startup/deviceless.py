"""Programs compiled for target devices, by the compilers of those alone."""

from __future__ import annotations

import dataclasses
import itertools
import os

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from jaxserve.core.devices import DeviceSpec, xla_target
from jaxserve.core.errors import ConfigError
from jaxserve.runtime.hardware.devices import engine_mesh
from jaxserve.runtime.program_kinds import ProgramKinds
from jaxserve.runtime.programs.compilation.executables import (
    Compilation,
    Program,
    Programs,
    ProgramSpec,
)
from jaxserve.runtime.startup.engine_plan import EnginePlan
from jaxserve.runtime.startup.start import StartupProgress, no_progress

_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
"""What libtpu would ask the machine where there is no TPU."""


def compile_programs_for(
    device: DeviceSpec, plan: EnginePlan, progress: StartupProgress = no_progress
) -> Programs:
    """Every program of a plan for such devices, which need not be here: for what their compiler
    says of them, since they cannot be run.

    Raises ConfigError where no compiler is installed, or it has no topology of so many devices.
    """
    config = plan.config
    devices = compiler_devices(device, config.num_devices)
    mesh = engine_mesh(config, devices)
    shapes = dataclasses.replace(plan.shapes, device=devices[0], mesh=mesh)
    specs = [_Deviceless.of(spec) for spec in ProgramKinds(shapes).specs()]
    done = itertools.count(1)

    def on_done(_: Program) -> None:
        progress("programs", next(done), len(specs))

    return Compilation(specs, None, on_done).result()


def use_compilers_alone() -> None:
    """Keeps JAX from looking for the accelerators whose compilers are installed. Call it before
    anything asks JAX for devices."""
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)


def compiler_devices(device: DeviceSpec, count: int) -> list[jax.Device]:
    """`count` devices as their compiler knows them, in one host's topology. Raises ConfigError."""
    if device.platform == "tpu":
        package, topology = "jax[tpu]", _smallest_topology(device, count)
        sides = [int(side) for side in topology.split("x")]
        described = {
            "platform": "tpu",
            "topology_name": f"{device.libtpu_name}:{topology}",
            "chips_per_host_bounds": (*sides, 1)[:3],
        }
    elif device.xla_target:
        package = "jax[cuda13]"
        described = {
            "platform": "cuda",
            "topology": f"1x1x{count}",
            "target_config": xla_target(device),
        }
    else:
        raise ConfigError(
            f"there is no description of {device.name} for its compiler; leave exact out, or plan "
            "for a TPU or an h200."
        )
    try:
        return topologies.get_topology_desc(**described).devices[:count]
    except RuntimeError as error:  # JAX raises it for a compiler that is missing or fails to start.
        raise ConfigError(
            f"exact needs the compiler of {device.name}, which cannot be used here ({error}); "
            f"pip install '{package}' of JAX {jax.__version__}, or leave exact out."
        ) from error


def _smallest_topology(device: DeviceSpec, count: int) -> str:
    """Name of the smallest topology of one host that has `count` chips. Raises ConfigError."""
    known = {int(chips): name for chips, name in device.gke_topologies.items()}
    fitting = [chips for chips in known if chips >= count]
    if not fitting or not device.libtpu_name:
        raise ConfigError(
            f"exact knows topologies of {device.name} of at most {max(known, default=0)} chips on "
            f"one host, and the parallel sizes make {count}; leave exact out."
        )
    return known[min(fitting)]


@dataclasses.dataclass(frozen=True)
class _Deviceless(ProgramSpec):
    """A program whose kernels are chosen for the devices of its arguments, not for those here."""

    @classmethod
    def of(cls, spec: ProgramSpec) -> _Deviceless:
        return cls(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)})

    def lower(self) -> jax.stages.Lowered:
        sharding = jax.tree.leaves(self.arguments())[0].sharding
        if isinstance(sharding, NamedSharding):
            mesh = sharding.mesh
        else:
            mesh = Mesh(np.array(list(sharding.device_set)), ("device",))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return super().lower()
