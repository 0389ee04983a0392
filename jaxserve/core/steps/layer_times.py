"""Modelled times of a layer, as one and in two halves, of which one computes beside the sums of the
other (runtime/programs/forward/dual_batch.py). Nothing is measured.

With c(t) the time that a layer computes t tokens without attention, s(t) that of a sum over the
devices that split it,

    whole  = c(t) + 2 s(t) + launch
    halves = c(t / 2) + 2 s(t / 2) + max(c(t / 2), 2 s(t / 2)) + 2 launch

for compiled programs hide two of a layer's four sums of halves.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.core.devices import DeviceSpec
from jaxserve.core.steps.work import StepWork


class LayerTimes(NamedTuple):
    """Seconds of one layer without attention: of all tokens at once, and in two halves."""

    whole: float
    halves: float


class DeviceRates(NamedTuple):
    """What programs reach of a device's peaks, per second, for one dtype."""

    flops: float
    memory_bytes: float

    @classmethod
    def of(cls, device: DeviceSpec, dtype: str) -> DeviceRates:
        """Raises ConfigError when the device has no rate for the dtype."""
        return cls(
            device.flops_of(dtype) * device.compute_efficiency,
            device.memory_bytes_per_s * device.memory_efficiency,
        )

    def part_s(self, flops: float, num_bytes: float) -> float:
        """A part of a step: its arithmetic or its memory traffic, the longer of the two."""
        return max(flops / self.flops, num_bytes / self.memory_bytes)


def layer_times(
    device: DeviceSpec, work: StepWork, num_tokens: float, real: float = 1.0
) -> LayerTimes:
    """The times of a layer in a step of so many tokens, of which the share `real` is no padding and
    takes experts.

    Raises ConfigError when the device has no rate for the dtype.
    """
    rates, layers = DeviceRates.of(device, work.dtype), max(1, work.num_layers)
    hidden_bytes = work.hidden_size * work.itemsize

    def compute_s(tokens: float) -> float:
        of_experts = work.expert_weights * work.expert_share * real
        flops = 2 * (work.layer_weights + of_experts) * tokens / layers
        # Each layer reads and writes activations around attention and around its MLP.
        moved = work.weight_bytes(real * tokens) / layers + 4 * hidden_bytes * tokens
        return rates.part_s(flops, moved)

    def sum_s(tokens: float) -> float:
        return device.all_reduce_s(work.tensor, tokens * hidden_bytes)

    half_s, sums_s = compute_s(num_tokens / 2), 2 * sum_s(num_tokens / 2)
    return LayerTimes(
        compute_s(num_tokens) + 2 * sum_s(num_tokens) + device.launch_s,
        half_s + sums_s + max(half_s, sums_s) + 2 * device.launch_s,
    )
