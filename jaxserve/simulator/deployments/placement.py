"""How to divide devices among prefill and decode (DistServe, Zhong et al. 2024, section 4.2).

Goodput is the rate of requests that meet the SLO. Engines that do both disturb each other's phases;
engines apart do not, but one phase may have devices to spare while the other has too few. Both are
compared here, from the goodput of one engine in each role, which `phases.py` simulates.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class EngineGoodput:
    """What one engine of a mesh serves within the SLO, in requests per second, by its role.

    Attributes:
        prefill: when it only computes prompts.
        decode: when it only decodes, with KV computed elsewhere.
        both: when it does both: chunked prefill, in the same steps as decodes.
        tensor: devices that split each layer.
        stages: pipeline stages.
    """

    prefill: float
    decode: float
    both: float
    tensor: int = 1
    stages: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.stages


class Placement(NamedTuple):
    """Engines of a deployment, by role: how many, and of which mesh. Without prefill and decode
    engines all do `both`.

    Attributes:
        goodput: requests per second within the SLO, of all together.
        devices: that the engines use.
    """

    goodput: float
    devices: int
    num_prefill: int = 0
    num_decode: int = 0
    prefill: EngineGoodput | None = None
    decode: EngineGoodput | None = None
    both: EngineGoodput | None = None

    @property
    def disaggregated(self) -> bool:
        return self.num_prefill > 0


def best_placement(engines: Sequence[EngineGoodput], num_devices: int) -> Placement:
    """The placement of at most `num_devices` with the greatest goodput, where KV moves fast between
    any two devices: DistServe's algorithm 1, for a number of devices in place of a rate. Prefill
    and decode engines may differ in their mesh. Of equal ones that whose engines do both, then that
    of the fewest devices.

    Raises ValueError when no engine fits so many devices.
    """
    found = [_together(engine, num_devices // engine.devices) for engine in engines]
    found += itertools.chain.from_iterable(
        _splits(prefill, decode, num_devices)
        for prefill, decode in itertools.product(engines, repeat=2)
    )
    return _best(found, num_devices)


def _splits(prefill: EngineGoodput, decode: EngineGoodput, num_devices: int) -> Iterable[Placement]:
    """Every number of prefill engines, with as many decode engines as the rest has room for."""
    for num_prefill in range(1, num_devices // prefill.devices + 1):
        num_decode = (num_devices - num_prefill * prefill.devices) // decode.devices
        if num_decode:
            yield _apart(prefill, num_prefill, decode, num_decode)


def _apart(
    prefill: EngineGoodput, num_prefill: int, decode: EngineGoodput, num_decode: int
) -> Placement:
    return Placement(
        min(num_prefill * prefill.prefill, num_decode * decode.decode),
        num_prefill * prefill.devices + num_decode * decode.devices,
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill=prefill,
        decode=decode,
    )


def _together(engine: EngineGoodput, count: int) -> Placement:
    return Placement(count * engine.both, count * engine.devices, both=engine)


def _best(found: Iterable[Placement], num_devices: int) -> Placement:
    fitting = [placement for placement in found if placement.devices]
    if not fitting:
        raise ValueError(f"no engine fits {num_devices} devices")
    return min(
        fitting,
        key=lambda placement: (-placement.goodput, placement.disaggregated, placement.devices),
    )
