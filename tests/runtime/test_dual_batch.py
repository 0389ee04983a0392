"""When a step is computed in two halves, by the rates of described devices."""

from __future__ import annotations

import dataclasses

import pytest
import round_numbers

from jaxserve.core.devices import DeviceSpec
from jaxserve.core.steps.layer_times import layer_times

DEVICE = dataclasses.replace(
    round_numbers.DEVICE, memory_bytes_per_s=1e12, link_bytes_per_s=1e9, hop_latency_s=1e-5
)
WORK = dataclasses.replace(round_numbers.WORK, tensor=2)


def test_halves_hide_sums_where_arithmetic_binds():
    compute_s, sum_s = 2 * 1e6 * 1024 / 1e12, 1e-5 + 1024 * 2000 / 1e9
    half_sum_s = 1e-5 + 512 * 2000 / 1e9
    found = layer_times(DEVICE, WORK, 1024)
    assert found.whole == pytest.approx(compute_s + 2 * sum_s + 1e-5)
    assert compute_s / 4 < half_sum_s  # The link is the limit, and hides half of the products.
    assert found.halves == pytest.approx(compute_s / 2 + 4 * half_sum_s + 2e-5)
    fast_link = dataclasses.replace(DEVICE, link_bytes_per_s=1e11)
    shown = 2 * (1e-5 + 512 * 2000 / 1e11)
    assert layer_times(fast_link, WORK, 1024).halves == pytest.approx(compute_s + shown + 2e-5)


@pytest.mark.parametrize("device", ["h100", "h200", "b200"])
def test_decodes_stay_whole_and_prompts_do_not(device):
    """Of a layer of Llama 70B on eight devices: each half of a decode would read the weights."""
    work = dataclasses.replace(
        WORK, hidden_size=8192, windows={None: 1}, layer_weights=107 * 10**6, tensor=8
    )
    work = dataclasses.replace(work, layer_bytes=2 * work.layer_weights)
    spec = DeviceSpec.of(device)
    few, many = layer_times(spec, work, 64), layer_times(spec, work, 2112)
    assert few.whole < few.halves
    assert many.halves < many.whole
