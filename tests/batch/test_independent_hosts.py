"""`jaxserve launch --independent`: hosts that are told their number, and not to join the others."""

from __future__ import annotations

import pytest

from jaxserve.cli import parse
from jaxserve.cli.launch import JobSettings, Launch
from jaxserve.core.errors import BatchError, ConfigError
from jaxserve.distributed.launch.slurm import Slurm

COMMAND = ("batch", "in.jsonl", "out.jsonl", "--shard={host}/{hosts}")


def launch(capsys, backend: str = "local", command: tuple[str, ...] = COMMAND, **settings) -> str:
    job = JobSettings(command=command, independent=True, **settings)
    assert Launch(job, backend, dry_run=True, slurm=Slurm()).run(parse) == 0
    return capsys.readouterr().out


def test_each_host_is_given_its_own_command(capsys):
    lines = launch(capsys, hosts=3, devices_per_host=2).splitlines()
    assert len(lines) == 3
    for host, line in enumerate(lines):
        assert line.endswith(f"-- batch in.jsonl out.jsonl --shard={host}/3")
        assert "--independent" in line and "--devices=2" in line
        assert "--coordinator" not in line


def test_a_mistake_in_the_command_is_found_before_anything_starts(capsys):
    with pytest.raises(BatchError, match="shard is '0-3'"):
        launch(capsys, hosts=3, command=(*COMMAND[:3], "--shard={host}-{hosts}"))


def test_independent_hosts_without_a_number_are_refused(capsys):
    with pytest.raises(ConfigError, match="SLURM_PROCID"):
        launch(capsys, "slurm", hosts=3, devices_per_host=1)


def test_hosts_that_join_are_given_the_command_as_it_is(capsys):
    command = ("generate", "{host}")
    assert Launch(JobSettings(command=command, hosts=2), dry_run=True).run(parse) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith("-- generate '{host}'") for line in lines) and len(lines) == 2
