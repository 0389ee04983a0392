"""Devices by their data sheets: memory, rates, links. One TOML file describes one device.

The files here have public figures, each with its source. The engine chooses the programs of a mesh
by them, and plans and simulations use them in place of target devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from jaxserve.core.errors import ConfigError

_DIRECTORY = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """One device and its links. Rates are peaks, per second; efficiencies are the shares of them
    that programs are assumed to reach.

    Attributes:
        name: human-readable.
        kind: how JAX's `device_kind` begins.
        platform: JAX's name of the platform.
        source: where the figures are from.
        memory_bytes: of the device, as JAX reports it, and not as its data sheet says.
        memory_bytes_per_s: reading it.
        flops: dense floating-point operations per second, by dtype.
        link_bytes_per_s: to a neighbouring device, one way.
        both_ways: whether there is a separate link to each of two neighbours (a torus), and not one
            link for all (a switch).
        hop_latency_s: of an empty message between devices.
        network_bytes_per_s: to a device of another host, one way, by this device's share of the
            network; not needed by engines of one host, and of TPUs, which are linked over hosts as
            within one.
        host_bytes_per_s: between host memory and the device, one way.
        disk_bytes_per_s: between a disk and host memory, one way.
        launch_s: host and launch time of a step, and of each of its layers, that nothing hides.
        compute_efficiency: share of `flops` that matrix products reach.
        memory_efficiency: share of `memory_bytes_per_s` that programs reach.
        link_efficiency: share of the bandwidth of links that messages reach.
        devices_per_host: of the usual machine; an engine of more is on several.
        gke_accelerator: of TPUs, GKE's name of their nodes.
        gke_topologies: of TPUs, GKE's topologies of single hosts by their number of chips.
        libtpu_name: of TPUs, what their compiler calls them.
        xla_target: of GPUs, the file in this directory that describes them to their compiler.
    """

    name: str
    kind: str
    platform: Literal["gpu", "tpu", "cpu"]
    source: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops: Mapping[str, float]
    link_bytes_per_s: float
    both_ways: bool = False
    hop_latency_s: float = 10e-6
    network_bytes_per_s: float | None = None
    host_bytes_per_s: float = 32e9
    disk_bytes_per_s: float = 2e9
    launch_s: float = 5e-6
    compute_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    devices_per_host: int = 8
    gke_accelerator: str = ""
    gke_topologies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    libtpu_name: str = ""
    xla_target: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a field of a wrong type or out of range."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "str" and not isinstance(value, str):
                raise ValueError(f"{field.name} is {value!r}; it must be a text")
            if field.type in ("int", "float"):
                _check_positive(field.name, value, most=1 if "efficiency" in field.name else None)
        if self.network_bytes_per_s is not None:
            _check_positive("network_bytes_per_s", self.network_bytes_per_s)
        if self.platform not in ("gpu", "tpu", "cpu"):
            raise ValueError(f"platform is {self.platform!r}; it must be gpu, tpu or cpu")
        if type(self.both_ways) is not bool:
            raise ValueError(f"both_ways is {self.both_ways!r}; it must be true or false")
        if not isinstance(self.flops, dict) or not self.flops:
            raise ValueError("flops must be a table, such as flops.bfloat16 = 989e12")
        if type(self.devices_per_host) is not int:
            raise ValueError(f"devices_per_host is {self.devices_per_host!r}; it must be whole")
        topologies = self.gke_topologies
        if not isinstance(topologies, dict) or not all(
            isinstance(topology, str) for topology in topologies.values()
        ):
            raise ValueError('gke_topologies must be a table of texts, such as {4 = "2x2"}')
        if topologies and not self.gke_accelerator:
            raise ValueError("gke_topologies needs gke_accelerator, such as tpu-v6e-slice")
        for dtype, rate in self.flops.items():
            _check_positive(f"flops.{dtype}", rate)

    def check_network(self, num_devices: int) -> None:
        """Raises ConfigError where so many devices are on several hosts, and the rate of the
        network between them is unknown."""
        missing = self.network_bytes_per_s is None and self.platform != "tpu"
        if missing and num_devices > self.devices_per_host:
            raise ConfigError(
                f"{num_devices} x {self.name} are on several hosts of {self.devices_per_host}, and "
                "the file of the device does not say how fast their network is; add "
                "network_bytes_per_s, a device's share of it, or set devices_per_host."
            )

    def all_reduce_s(self, num_devices: int, num_bytes: float) -> float:
        """Seconds of a sum over so many devices, each of which has `num_bytes`: by rings, of which
        each crosses between hosts by the network of another device."""
        if num_devices == 1:
            return 0.0
        rate, hops = self._link_rate, 1
        if self._spans_hosts(num_devices):
            rate, hops = min(rate, self.devices_per_host * self.network_bytes_per_s), 2
        sent = 2 * (num_devices - 1) / num_devices * num_bytes
        return hops * self.hop_latency_s + sent / (rate * self.link_efficiency)

    def send_s(self, num_devices: int, num_bytes: float) -> float:
        """Seconds of a message from each of so many devices to the next."""
        rate, hops = self._link_rate, 1
        if self._spans_hosts(num_devices):
            rate, hops = min(rate, self.network_bytes_per_s), 2
        return hops * self.hop_latency_s + num_bytes / (rate * self.link_efficiency)

    @property
    def _link_rate(self) -> float:
        return (2 if self.both_ways else 1) * self.link_bytes_per_s

    def _spans_hosts(self, num_devices: int) -> bool:
        return self.network_bytes_per_s is not None and num_devices > self.devices_per_host

    def is_called(self, kind: str) -> bool:
        """Whether JAX calls such a device `kind`."""
        # "NVIDIA L40" is no "NVIDIA L4".
        return re.match(rf"{re.escape(self.kind)}(?!\d)", kind) is not None

    def flops_of(self, dtype: str) -> float:
        """Peak of one dtype. Raises ConfigError where the device has none."""
        if dtype not in self.flops:
            raise ConfigError(
                f"dtype is {dtype!r}, of which {self.name} has no FLOP/s; use one of "
                f"{', '.join(self.flops)}, or add flops.{dtype} to the file of the device."
            )
        return self.flops[dtype]

    @classmethod
    def of(cls, device: str) -> Self:
        """The device of a name, such as "h200", or of a TOML file.

        Raises ConfigError for an unknown name, or a file that is no device.
        """
        path = Path(device).expanduser()
        if not path.suffix:
            path = _DIRECTORY / f"{device.lower()}.toml"
            if not path.is_file():
                raise ConfigError(
                    f"device is {device!r}; it must be one of {', '.join(device_names())}, or a "
                    "TOML file with the fields of one of those."
                )
        try:
            return cls._read(path)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError) as error:
            raise ConfigError(f"device {device!r} cannot be read: {error}.") from error

    @classmethod
    def _read(cls, path: Path) -> Self:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        fields = dataclasses.fields(cls)
        if unknown := sorted(values.keys() - {field.name for field in fields}):
            raise ValueError(f"unknown field {unknown[0]!r}")
        needed = (
            field.name
            for field in fields
            if field.default is field.default_factory is dataclasses.MISSING
        )
        if missing := [name for name in needed if name not in values]:
            raise ValueError(f"it has no field {missing[0]!r}")
        return cls(**values)


def xla_target(spec: DeviceSpec) -> str:
    """XLA's description of a GPU, in the text format of protocol buffers."""
    return (_DIRECTORY / spec.xla_target).read_text(encoding="utf-8")


def device_names() -> list[str]:
    """The devices that are described here."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.toml"))


@functools.cache
def device_of_kind(kind: str) -> DeviceSpec | None:
    """The device that JAX calls `kind`; None if it is not described here."""
    specs = (DeviceSpec.of(name) for name in device_names())
    found = [spec for spec in specs if spec.is_called(kind)]
    return max(found, key=lambda spec: len(spec.kind), default=None)


def _check_positive(name: str, value: Any, most: float | None = None) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf or value > (most or value):
        limit = "" if most is None else f", at most {most}"
        raise ValueError(f"{name} is {value!r}; it must be a number above 0{limit}")
