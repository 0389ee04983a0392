"""Devices by their files."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.core.devices import DeviceSpec, device_names, device_of_kind
from jaxserve.core.errors import ConfigError

OWN = """
name = "own"
kind = "Own"
platform = "gpu"
source = "measured"
memory_bytes = 1_000
memory_bytes_per_s = 1e3
flops = {float32 = 1e6}
link_bytes_per_s = 1.0
"""


def test_every_device_is_read_and_found_by_its_kind():
    assert device_names() == ["a100", "b200", "h100", "h200", "l4", "v5e", "v5p", "v6e"]
    for name in device_names():
        spec = DeviceSpec.of(name)
        assert spec.source
        assert device_of_kind(f"{spec.kind} 80GB HBM3") == spec
        assert spec.flops_of("bfloat16") / spec.memory_bytes_per_s > 100


def test_kinds_that_only_begin_alike_are_others():
    assert device_of_kind("NVIDIA L40S") is None
    assert device_of_kind("cpu") is None
    assert device_of_kind("TPU v5 lite") == DeviceSpec.of("v5e")
    assert device_of_kind("TPU v5p") == DeviceSpec.of("v5p")


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    spec = DeviceSpec.of(str(path))
    assert (spec.name, spec.memory_bytes, spec.flops_of("float32")) == ("own", 1000, 1e6)
    assert dataclasses.replace(spec, launch_s=1e-3).launch_s == 1e-3
    with pytest.raises(ConfigError, match=r"'bfloat16'.*use one of float32, or add flops.bfloat16"):
        spec.flops_of("bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"gpu"', '"gpus"'), "platform is 'gpus'"),
        (("1_000", "-1"), "memory_bytes is -1; it must be a number above 0"),
        (("memory_bytes =", "memory ="), "unknown field 'memory'"),
        (("link_bytes_per_s = 1.0", ""), "no field 'link_bytes_per_s'"),
        (("{float32 = 1e6}", "1e6"), "flops must be a table"),
        (('"measured"', '"x"\ngke_topologies = 4'), "gke_topologies must be a table"),
        (('"measured"', '"x"\ngke_topologies = {4 = 4}'), "must be a table of texts"),
        (('"measured"', '"x"\ngke_topologies = {4 = "2x2"}'), "needs gke_accelerator"),
        (('"measured"', '"x"\ndevices_per_host = 2.5'), "devices_per_host is 2.5"),
        (("{float32 = 1e6}", '{float32 = "fast"}'), "flops.float32 is 'fast'"),
        (("link_bytes_per_s = 1.0", "link_bytes_per_s = nan"), "link_bytes_per_s is nan"),
        (('"own"', "own"), "cannot be read"),
        (('source = "measured"', 'source = "x"\nlink_efficiency = 2'), "at most 1"),
    ],
)
def test_a_bad_file_says_why(tmp_path, change, message):
    (tmp_path / "own.toml").write_text(OWN.replace(*change))
    with pytest.raises(ConfigError, match=message):
        DeviceSpec.of(str(tmp_path / "own.toml"))


def test_an_unknown_device_names_those_that_are_known(tmp_path):
    with pytest.raises(ConfigError, match=r"'h20'.*h100, h200, l4"):
        DeviceSpec.of("h20")
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        DeviceSpec.of(str(tmp_path / "missing.toml"))


def test_messages_between_hosts_take_their_network():
    """Sums by the network of all of a host's devices, messages by that of one."""
    one = DeviceSpec(
        **{"name": "round", "kind": "round", "platform": "gpu", "source": "", "memory_bytes": 1},
        **{"memory_bytes_per_s": 1.0, "flops": {"float32": 1.0}, "link_bytes_per_s": 100.0},
        **{"network_bytes_per_s": 10.0, "hop_latency_s": 1.0, "link_efficiency": 0.5},
        devices_per_host=4,
    )
    assert one.all_reduce_s(1, 200) == 0
    assert one.all_reduce_s(4, 200) == 1 + 2 * 3 / 4 * 200 / 50
    assert one.all_reduce_s(8, 200) == 2 + 2 * 7 / 8 * 200 / (4 * 10 * 0.5)
    assert one.send_s(4, 200) == 1 + 200 / 50
    assert one.send_s(8, 200) == 2 + 200 / 5
    torus = dataclasses.replace(one, network_bytes_per_s=None, both_ways=True)
    assert torus.all_reduce_s(8, 200) == 1 + 2 * 7 / 8 * 200 / 100
    assert torus.send_s(8, 200) == 1 + 200 / 100
