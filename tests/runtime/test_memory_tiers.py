"""Memory for the tiers below the device: what is planned, and which budgets are refused."""

from __future__ import annotations

import dataclasses
import os

import jax
import numpy as np
import pytest

from jaxserve.core.errors import ConfigError, MemoryPlanError
from jaxserve.core.model_config import ModelConfig, RopeConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.kv.layout import TRANSFER_PAGES, KVLayout
from jaxserve.models.loading.params import params_bytes
from jaxserve.models.registry import param_specs
from jaxserve.runtime.hardware import device_memory
from jaxserve.runtime.hardware.device_memory import host_memory
from jaxserve.runtime.hardware.devices import DescribedDevice
from jaxserve.runtime.planning.memory import STAGING_BUFFERS, plan_memory

MODEL = ModelConfig("LlamaForCausalLM", 64, 32, 64, 2, 2, 2, 16, 128, RopeConfig())
PAGE_SIZE = 4
PAGE_BYTES = MODEL.kv_bytes_per_token(4) * PAGE_SIZE


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device with memory of its own, as far as a plan looks at it."""

    num_bytes: int = 1 << 30
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"

    def memory_stats(self):
        return {"bytes_limit": self.num_bytes}


def plan(device=None, **settings):
    device = device or jax.devices("cpu")[0]
    settings = {"page_size": PAGE_SIZE, "kv_cache_memory_bytes": 50 * PAGE_BYTES} | settings
    config = EngineConfig(**settings).resolve(MODEL, device.platform)
    config = dataclasses.replace(config, dtype="float32")
    layout = KVLayout.of(MODEL.kv_specs, PAGE_SIZE, config.max_model_len, max_chunk=32)
    weights_bytes = params_bytes(param_specs(MODEL), np.dtype(config.dtype))
    return plan_memory(config, MODEL, layout, weights_bytes, 0, PAGE_BYTES, device)


# What is planned


def test_on_cpus_there_is_no_tier_unless_asked_for():
    planned = plan()
    assert (planned.host_pages, planned.disk_pages, planned.staging_bytes) == (0, 0, 0)


def test_an_accelerator_gets_as_much_of_the_hosts_memory_as_its_pool():
    assert plan(Accelerator()).host_pages == 50
    assert plan(Accelerator(), host_kv_bytes=0).host_pages == 0
    assert plan(Accelerator(), host_kv_bytes=7 * PAGE_BYTES).host_pages == 7


def test_a_pool_of_all_that_is_left_leaves_room_for_the_buffers_of_a_default_tier():
    memory = plan(Accelerator(40 << 20), kv_cache_memory_bytes=None, max_num_seqs=10_000)
    assert memory.host_pages and memory.staging_bytes
    assert memory.num_pages < 10_000 * 128 // PAGE_SIZE
    assert 0 <= memory.limit_bytes - memory.total_bytes < memory.page_bytes


def test_an_accelerator_larger_than_the_host_gets_a_share_of_what_is_free():
    large = plan(Accelerator(1 << 50), kv_cache_memory_bytes=1 << 48)
    assert 0 < large.host_bytes <= host_memory() // 3


@pytest.mark.parametrize("name", ["host", "disk"])
@pytest.mark.parametrize("odd", [0, PAGE_BYTES - 1])
def test_a_budget_is_rounded_down_to_pages(tmp_path, name, odd):
    settings = {f"{name}_kv_bytes": 9 * PAGE_BYTES + odd}
    if name == "disk":
        settings["disk_kv_dir"] = tmp_path
    memory = plan(**settings)
    assert getattr(memory, f"{name}_pages") == 9
    assert getattr(memory, f"{name}_bytes") == 9 * PAGE_BYTES
    assert memory.staging_bytes == 2 * STAGING_BUFFERS * TRANSFER_PAGES * PAGE_BYTES


def test_only_on_cpus_the_host_is_the_device(tmp_path):
    """Where the pool is itself in the host's memory, a tier there counts; a disk nowhere."""
    both = {"host_kv_bytes": 9 * PAGE_BYTES, "disk_kv_bytes": 1 << 40, "disk_kv_dir": tmp_path}
    for device, counted in ((None, 9 * PAGE_BYTES), (Accelerator(), 0)):
        without = plan(device, host_kv_bytes=0)
        memory = plan(device, **both)
        staging = 2 * STAGING_BUFFERS * TRANSFER_PAGES * PAGE_BYTES
        assert memory.total_bytes - without.total_bytes == staging + counted
        assert memory.kv_bytes == without.kv_bytes


def test_the_pool_gets_what_the_tiers_leave():
    """Asked for no size of the pool, what is taken by a tier in the same memory is not the pool's:
    all together stay within the limit."""
    share = {"kv_cache_memory_bytes": None, "max_num_seqs": 4096, "max_num_batched_tokens": 4112}
    device = Accelerator(1 << 27)
    memory = plan(device, **share, host_kv_bytes=0)
    tiered = plan(device, **share, host_kv_bytes=1 << 20)
    assert tiered.staging_bytes > 0
    for each in (memory, tiered):
        assert each.total_bytes <= each.limit_bytes
        assert each.total_bytes > each.limit_bytes - PAGE_BYTES
    assert memory.num_pages > tiered.num_pages


# What is refused


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES - 1])
@pytest.mark.parametrize("name", ["host_kv_bytes", "disk_kv_bytes"])
def test_a_budget_of_less_than_a_page_is_refused_with_the_size_of_one(tmp_path, name, num_bytes):
    settings = {name: num_bytes} | ({"disk_kv_dir": tmp_path} if "disk" in name else {})
    with pytest.raises(MemoryPlanError) as refusal:
        plan(**settings)
    assert f"{name} is {num_bytes}, less than one page of {PAGE_BYTES} bytes" in str(refusal.value)


def test_more_than_the_host_has_is_refused():
    with pytest.raises(MemoryPlanError, match=r"host_kv_bytes is \d+.*bytes of the host's memory"):
        plan(Accelerator(), host_kv_bytes=1 << 60)


def test_what_does_not_fit_says_that_tiers_are_part_of_it():
    memory = plan(Accelerator(num_bytes=1 << 30), host_kv_bytes=1 << 20)
    memory = dataclasses.replace(memory, limit_bytes=memory.fixed_bytes)
    with pytest.raises(
        MemoryPlanError, match=r"transfer buffers 0\.\d+ GiB.*host_kv_bytes is needed"
    ):
        memory.check()


def test_a_pool_that_would_fit_is_named():
    memory = plan(host_kv_bytes=9 * PAGE_BYTES)
    memory = dataclasses.replace(memory, limit_bytes=memory.fixed_bytes + 6 * PAGE_BYTES + 1)
    with pytest.raises(MemoryPlanError, match=f"at most {6 * PAGE_BYTES} would fit"):
        memory.check()


# Through a whole start


@pytest.mark.parametrize("where", ["nowhere", "a file", "sealed"])
def test_a_directory_that_cannot_be_written_to_is_refused_by_name(llama, tmp_path, where):
    directory = tmp_path / where
    if where == "a file":
        directory.write_text("")
    if where == "sealed":
        directory = "/proc/self"
    with pytest.raises(ConfigError, match=f"directory '{directory}'"):
        llama.load(disk_kv_dir=directory, disk_kv_bytes=1 << 20)


def test_a_disk_budget_that_no_file_can_have_is_refused(llama, tmp_path):
    with pytest.raises(ConfigError, match=r"disk budget.*smaller budget"):
        llama.load(disk_kv_dir=tmp_path, disk_kv_bytes=1 << 62)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["host_kv_bytes", "disk_kv_bytes"])
def test_an_engine_refuses_less_than_a_page_before_it_reads_a_weight(llama, tmp_path, name):
    settings = {name: 1} | ({"disk_kv_dir": tmp_path} if "disk" in name else {})
    parts = []
    with pytest.raises(MemoryPlanError, match=f"{name} is 1, less than one page"):
        llama.load(**settings, progress=lambda part, done, total: parts.append(part))
    assert parts == []


@pytest.mark.parametrize("pages", [1, 2])
def test_tiers_of_a_page_work(llama, tmp_path, pages):
    num_bytes = pages * llama.config.kv_bytes_per_token(4) * 4
    settings = {"host_kv_bytes": num_bytes, "disk_kv_bytes": num_bytes, "disk_kv_dir": tmp_path}
    with llama.load(**settings, preemption="swap", debug_kv=True) as llm:
        assert llm.plan().memory.host_pages == llm.plan().memory.disk_pages == pages
        outputs = llm.generate(llama.prompts[8:11] * 2, use_tqdm=False)
        assert all(output.finished and output.error is None for output in outputs)
    assert list(tmp_path.iterdir()) == []


# How much of a GPU is planned with


@pytest.mark.parametrize(
    ("reserved", "share", "usable"),
    [
        (None, 0.9, 0.75 * 0.97),  # JAX was used before: three quarters are its own
        ("0.930", 0.9, 0.9),
        ("0.930", 0.5, 0.5),
        ("0.4", 0.9, 0.4 * 0.97),
    ],
)
def test_the_share_is_of_the_whole_gpu_within_what_jax_reserved(
    monkeypatch, reserved, share, usable
):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    if reserved:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", reserved)
    device = Accelerator(int(float(reserved or 0.75) * 10**12))
    assert device_memory.usable_memory(device, share) == pytest.approx(usable * 10**12, rel=1e-6)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95, 1.0])
def test_a_described_gpu_has_what_an_engine_there_may_use(monkeypatch, share):
    """Also if it is described by a profile: what JAX has reserved there is a share already."""
    for name in device_memory._FRACTIONS:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(device_memory, "devices_are_open", lambda: False)
    device_memory.reserve_memory(share)
    reserved = float(os.environ["XLA_CLIENT_MEM_FRACTION"])
    there = Accelerator(int(reserved * 10**12))
    assert device_memory.device_memory(there) == pytest.approx(10**12, rel=1e-6)
    described = DescribedDevice("gpu", "NVIDIA H200", device_memory.device_memory(there))
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")  # Of this machine.
    usable = device_memory.usable_memory(described, share)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", str(reserved))
    assert usable == pytest.approx(device_memory.usable_memory(there, share), rel=1e-6)


@pytest.mark.parametrize(
    ("was_used", "theirs", "expected"),
    [(False, None, "0.930"), (False, "0.5", None), (True, None, None)],
)
def test_jax_reserves_what_the_plan_may_use(monkeypatch, was_used, theirs, expected):
    """If no device was used before, and the caller did not decide."""
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", theirs or "")
    monkeypatch.setattr(device_memory, "devices_are_open", lambda: was_used)
    device_memory.reserve_memory(0.9)
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == expected
