"""An engine that is host 1 of a job, with the log of a host 0 that this process writes."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from jaxserve.core.errors import DistributedError, EngineClosedError, SnapshotError
from jaxserve.core.process.signals import STOPPED
from jaxserve.engine.engine import Engine
from jaxserve.engine.replication.log import ReplicatedLog
from jaxserve.resume import resumable


class Hosts:
    """Two hosts within this process. Host 0 agrees to what host 1 says, but for `host_0_says`."""

    num_hosts = 2

    def __init__(self, host, entries):
        self.host, self.entries = host, entries
        self.values = {}
        self.host_0_says = {}
        self.num_bounded = 0

    def publish(self, number, entry):
        self.entries[number] = entry

    def receive(self, number, wait):
        return self.entries[number]

    def gather(self, name, value, what_for):
        self.values[name] = value
        return [self.host_0_says.get(name, lambda same: same)(value), value]

    def forget(self, name):
        del self.values[name]

    @contextlib.contextmanager
    def with_timeout(self):
        self.num_bounded += 1
        yield

    def blame(self, error):
        return None

    def close(self):
        pass


@pytest.fixture
def job(llama):
    """The log of host 0, and host 1 with its view of both."""
    entries = {}
    hosts = Hosts(1, entries)
    with llama.load() as llm:
        alone = llm.engine
        parts = alone.plan, alone.tokenizer, alone._runner, alone.log, alone.metrics
        llm.engine = Engine(*parts, hosts)
        yield ReplicatedLog(Hosts(0, entries)), llm, hosts


def test_sigterm_on_a_host_without_open_calls_waits_for_host_0(job, tmp_path):
    first, llm, _ = job
    first.next_entry(0)
    first.end(checked=False)
    for _ in range(2):  # The second time its engine has nothing to wait for.
        with pytest.raises(SystemExit) as stopped, resumable(llm, tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stopped.value.code == STOPPED
        assert llm.engine._replicated.ended


def test_a_host_has_no_work_once_host_0_has_closed(job, llama):
    """Whatever it has dispatched, or queued, by then."""
    first, llm, _ = job
    stream = llm.stream({"prompt_token_ids": llama.prompts[0]})
    first.end(checked=False)
    assert llm.engine.has_work
    llm.engine.step()
    assert not llm.engine.has_work
    with pytest.raises(EngineClosedError, match="host 0 has closed its engine"):
        stream.result()


def test_what_a_snapshot_reads_is_bounded_and_what_it_agreed_on_is_deleted(job, tmp_path):
    first, llm, hosts = job
    first.next_entry(0, joint=["snapshot", True])
    llm.snapshot(tmp_path)
    # Steps that are on their way, the index, and that no KV follows.
    assert hosts.num_bounded == 3
    assert len(hosts.values) == 1


def test_an_engine_that_is_out_of_step_stops(job, tmp_path):
    first, llm, _ = job
    first.next_entry(0, joint=["restore", "elsewhere"])
    with pytest.raises(DistributedError, match="host 0 does restore"):
        llm.snapshot(tmp_path)
    with pytest.raises(EngineClosedError, match="host 0 does restore"):
        llm.engine.step()


@pytest.mark.parametrize("fails", ["this host", "host 0"])
def test_a_restore_for_which_one_host_cannot_read_kv_fails_on_all(job, llama, tmp_path, fails):
    """With an error that names the file, before the KV is written on any."""
    first, llm, hosts = job
    with llama.load() as other:
        stream = other.stream({"prompt_token_ids": llama.prompts[-2]})
        for _ in range(3):
            other.engine.step()
        other.snapshot(tmp_path)
        stream.close()
    (kv,) = tmp_path.glob("*kv-00000.safetensors")
    first.next_entry(0, joint=["restore", str(tmp_path)])
    if fails == "this host":
        hosts.host_0_says["gathered/2"] = lambda _: kv.unlink()  # It was whole at the beginning.
    else:
        hosts.host_0_says["gathered/3"] = lambda _: f"{kv} cannot be read"
    with pytest.raises(SnapshotError, match=f"{kv} cannot be read"):
        llm.restore(tmp_path)
    (said,) = hosts.values.values()
    assert (said is not None and "cannot be read" in said) == (fails == "this host")
    assert hosts.num_bounded == 1 and not llm.has_work
    first.next_entry(0)
    llm.engine.step()
