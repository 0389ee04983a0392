"""Shards of a job over several hosts: the part each host writes, and merging the parts."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from jaxserve.core.errors import BatchError
from jaxserve.offline.journal import BatchJournal, Result, in_use, read_results

_APPEND_RESULTS = 1024


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of `count` equal parts of a job, numbered from 0. 0/1 is the whole job."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        """Raises BatchError for an index out of range."""
        if not 0 <= self.index < self.count:
            raise BatchError(
                f"the shard is {self.index}/{self.count}; give I/N with I from 0 to N - 1."
            )

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse `I/N`. Raises BatchError for anything else."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text, re.ASCII)
        if found is None:
            raise BatchError(f"the shard is {text!r}; give I/N, such as 0/4 for the first of four.")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def file(self, output: Path) -> Path:
        """The file for this part's results: the output itself if there is one part."""
        if self.count == 1:
            return output
        return output.with_name(f"{output.name}.part-{self.index:05}-of-{self.count:05}")


def results_so_far(output: Path, own: BatchJournal) -> Iterator[Result]:
    """All results so far, for any number of hosts, each line once. Truncates an incomplete line in
    this host's own file.

    Raises BatchError if the job is running with another number of hosts.
    """
    done: set[int] = set()
    count = _count(own.path)
    for path in (output, *parts_of(output)):
        if path == own.path:
            results = own.results()
        else:
            if _count(path) != count and in_use(path):
                raise BatchError(
                    f"another process is writing to {path}; all hosts must use the same number of "
                    "shards. Stop the others, and start all with the same N."
                )
            results = read_results(path)
        for result in results:
            if result.number not in done:
                done.add(result.number)
                yield result


def merge(output: Path, num_lines: int) -> bool:
    """Merge all parts into the output if all lines are done. Returns whether they are.

    Safe to call from several hosts concurrently and again after a kill, as the output is a journal.
    """
    with contextlib.closing(BatchJournal(output, wait=True)) as journal:
        done = {result.number for result in journal.results()}
        parts = parts_of(output)
        missing = {result.number for part in parts for result in read_results(part)} - done
        if len(done) + len(missing) < num_lines:
            return False
        batch: list[Result] = []
        for part in parts:
            for result in read_results(part):
                if result.number in missing:
                    missing.remove(result.number)
                    batch.append(result)
                if len(batch) == _APPEND_RESULTS:
                    journal.append(batch)
                    batch = []
        journal.append(batch)
        journal.sync()
        for part in parts:
            part.unlink(missing_ok=True)
    return True


def parts_of(output: Path) -> list[Path]:
    """The part files next to an output, for any number of hosts."""
    pattern = re.compile(re.escape(output.name) + r"\.part-[0-9]{5,}-of-[0-9]{5,}")
    return sorted(path for path in output.parent.iterdir() if pattern.fullmatch(path.name))


def _count(path: Path) -> int:
    """The number of parts that a file is one of."""
    found = re.search(r"\.part-[0-9]+-of-([0-9]+)$", path.name)
    return 1 if found is None else int(found[1])
