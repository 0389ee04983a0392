"""Hosts of one engine agree on which kernels they use."""

from __future__ import annotations

import collections
import dataclasses
import json
import threading

import pytest
from patience import PATIENCE_S

from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.hardware.devices import DescribedDevice
from jaxserve.runtime.startup import engine_plan
from jaxserve.runtime.startup import start as startup
from jaxserve.runtime.startup.start import alike_on_all, compile_programs
from pallas_kernels.self_check import Failure

ATTENTION = Failure("paged_attention", "NVIDIA H200", "decode", "its self-check was wrong by 3")
COPIES = Failure("gather_pages", "NVIDIA H200", "pages", "its self-check ended its process")


class Host:
    """One host among threads: what failed there, and the programs compiled since."""

    def __init__(self, host, job):
        self.host, self.job = host, job
        self.failed = {}
        self.compiled = 0

    def gather(self, name, value):
        self.job.ballots[name][self.host] = json.loads(json.dumps(value))
        self.job.turn.wait(PATIENCE_S)
        return [self.job.ballots[name][host] for host in range(self.job.turn.parties)]

    def failures(self):
        return [Failure(*which, why) for which, why in sorted(self.failed.items())]

    def adopt(self, failures):
        for *which, why in failures:
            self.failed.setdefault(tuple(which), why)

    def fail(self, failure):
        self.failed[failure[:3]] = failure.why

    def compile_again(self):
        """Kernels that were not asked for before are, once others are not used: they fail too."""
        self.compiled += 1
        if self.host == 1 and COPIES[:3] not in self.failed:
            self.fail(COPIES)
        return f"programs {self.compiled}"


class Job:
    def __init__(self, num_hosts):
        self.ballots = collections.defaultdict(dict)
        self.turn = threading.Barrier(num_hosts)
        self.hosts = [Host(host, self) for host in range(num_hosts)]

    def run(self, monkeypatch):
        """What each host ends with."""
        local = threading.local()
        monkeypatch.setattr(startup.self_check, "failures", lambda: local.host.failures())
        monkeypatch.setattr(startup.self_check, "adopt", lambda found: local.host.adopt(found))
        found = {}

        def of(host):
            local.host = host
            found[host.host] = alike_on_all("programs 0", host, host.compile_again)

        threads = [threading.Thread(target=of, args=(host,)) for host in self.hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return [found[host.host] for host in self.hosts]


@pytest.mark.parametrize("everywhere", [False, True])
def test_nothing_is_compiled_again_where_all_agree(monkeypatch, everywhere):
    job = Job(3)
    for host in job.hosts:
        if everywhere:
            host.fail(ATTENTION._replace(why=f"its self-check was wrong by {host.host}"))
    assert job.run(monkeypatch) == ["programs 0"] * 3


def test_what_failed_on_one_host_is_used_on_none(monkeypatch):
    """And what fails only then, too; a host compiles again if it used any of it."""
    job = Job(3)
    job.hosts[2].fail(ATTENTION)
    assert job.run(monkeypatch) == ["programs 2", "programs 1", "programs 1"]
    for host in job.hosts:
        assert {*host.failed} == {ATTENTION[:3], COPIES[:3]}
    why = "on another host its self-check was wrong by 3"
    assert [host.failed[ATTENTION[:3]] for host in job.hosts] == [why, why, ATTENTION.why]


@pytest.mark.parametrize(("num_hosts", "platform"), [(1, "gpu"), (2, "gpu"), (2, "cpu")])
def test_no_host_of_several_skips_its_self_checks(monkeypatch, llama, num_hosts, platform):
    """A program found by its name is not traced, so that nothing would be known of its kernels."""
    plan = engine_plan.plan_engine(EngineConfig.of(model=llama.path, **llama.settings()))
    plan = dataclasses.replace(plan, device=DescribedDevice(platform, "NVIDIA H200", 1 << 30))
    monkeypatch.setattr(startup.jax, "process_count", lambda: num_hosts)
    monkeypatch.setattr(startup, "Compilation", lambda specs, *_, **__: specs)
    by_name = {spec.cached_by_name for spec in compile_programs(plan)}
    assert by_name == {num_hosts == 1 or platform == "cpu"}
