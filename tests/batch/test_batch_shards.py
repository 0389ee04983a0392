"""A job divided among changing numbers of hosts, any of which may be killed at any moment."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
from batch_files import SETTINGS, answer, answers, prompts, write_lines
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.core.errors import BatchError
from jaxserve.offline.job import BatchJob
from jaxserve.offline.shards import Shard, merge, parts_of

COUNTS = st.integers(1, 4)


def host(directory: Path, index: int, count: int, window_lines: int = 3) -> BatchJob:
    shard = Shard(index, count)
    return BatchJob(directory / "in.jsonl", directory / "out.jsonl", SETTINGS, shard, window_lines)


def left(job: BatchJob) -> list[int]:
    """Indices of what a host has to do."""
    mine = range(job.shard.index, job.num_windows, job.shard.count)
    return [index for window in mine for index in job.left_in(job.window(window))]


class Hosts(RuleBasedStateMachine):
    """Hosts that write parts of their shares, are killed, and come again in other numbers."""

    @initialize(num_lines=st.integers(1, 20))
    def begin(self, num_lines: int) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self.directory = Path(self._scratch.name)
        self.num_lines = num_lines
        self.written: set[int] = set()
        write_lines(self.directory / "in.jsonl", prompts(num_lines))

    @rule(count=COUNTS, data=st.data())
    def all_hosts_run(self, count: int, data: st.DataObject) -> None:
        """Each does some of its share; those that do all of it end well, the others are killed
        in the middle of a write."""
        jobs = [host(self.directory, index, count) for index in range(count)]
        shares = [left(job) for job in jobs]
        undone = set(range(self.num_lines)) - self.written
        assert sorted(itertools.chain(*shares)) == sorted(undone), "each line is one host's"
        ended = []
        for job, share in zip(jobs, shares):
            done = share[: data.draw(st.integers(0, len(share)))]
            job.append([answer(index + 1) for index in done])
            self.written |= set(done)
            if done == share:
                ended.append(job.end())
            else:
                job.close()
                with job.journal.path.open("ab") as file:
                    file.write(answer(share[-1] + 1).text[: data.draw(st.integers(0, 30))])
        if len(self.written) == self.num_lines and len(ended) == count:
            assert ended[-1], "the shard that ends last merges all"

    @rule()
    def merged_by_hand(self) -> None:
        done = merge(self.directory / "out.jsonl", self.num_lines)
        assert done == (len(self.written) == self.num_lines)
        assert not (done and parts_of(self.directory / "out.jsonl"))

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "written"):
            with host(self.directory, 0, 1) as job:
                assert set(left(job)) == set(range(self.num_lines)) - self.written
                assert job.totals.lines == len(self.written)

    def teardown(self) -> None:
        if hasattr(self, "written"):
            with host(self.directory, 0, 1) as job:
                job.append([answer(index + 1) for index in left(job)])
                assert job.end()
            found = answers(self.directory / "out.jsonl")
            assert sorted(found) == list(range(1, self.num_lines + 1))
            assert not parts_of(self.directory / "out.jsonl")
            self._scratch.cleanup()


TestHosts = Hosts.TestCase
TestHosts.settings = settings(max_examples=40, stateful_step_count=8, deadline=None)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("num_lines", [1, 2, 10, 100])
def test_shares_are_equally_large(tmp_path: Path, num_lines: int, count: int):
    write_lines(tmp_path / "in.jsonl", prompts(num_lines))
    sizes = []
    for index in range(count):
        with host(tmp_path, index, count, window_lines=8) as job:
            sizes.append(job.num_left())
            assert job.num_left() == len(left(job))
    assert sum(sizes) == num_lines
    assert max(sizes) - min(sizes) <= job.window_lines <= -(-num_lines // count)


def test_hosts_that_disagree_on_how_many_they_are_are_told(tmp_path: Path):
    write_lines(tmp_path / "in.jsonl", prompts(4))
    with host(tmp_path, 0, 2), pytest.raises(BatchError, match="must use the same number"):
        host(tmp_path, 0, 3)
    with host(tmp_path, 0, 1), pytest.raises(BatchError, match="must use the same number"):
        host(tmp_path, 1, 2)
    with host(tmp_path, 0, 2), pytest.raises(BatchError, match="another process is writing"):
        host(tmp_path, 0, 2)
    with host(tmp_path, 0, 3):
        pass


@pytest.mark.parametrize("text", ["1", "2/2", "-1/2", "0/0", "a/b", "1/2/3", "", "١/2"])
def test_a_shard_is_one_of_several(text: str):
    with pytest.raises(BatchError, match="shard is"):
        Shard.parse(text)
    assert Shard.parse("1/2") == Shard(1, 2)
