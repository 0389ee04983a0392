"""A job divided among hosts: what each writes, and how that becomes one output again."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from jaxserve.errors import BatchError
from jaxserve.offline.journal import Journal, Result, in_use, read_results

_APPEND_RESULTS = 1024


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of `count` equal parts of a job, numbered from 0. The only one is the whole job."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        """Raises BatchError for a part that there is not."""
        if not 0 <= self.index < self.count:
            raise BatchError(
                f"the shard is {self.index}/{self.count}; give I/N with I from 0 to N - 1."
            )

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Of `I/N`. Raises BatchError for anything else."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text, re.ASCII)
        if found is None:
            raise BatchError(f"the shard is {text!r}; give I/N, such as 0/4 for the first of four.")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def file(self, output: Path) -> Path:
        """Where this part's results go: the output itself where there is one part."""
        if self.count == 1:
            return output
        return output.with_name(f"{output.name}.part-{self.index:05}-of-{self.count:05}")


def results_so_far(output: Path, own: Journal) -> Iterator[Result]:
    """All that is done, by whatever number of hosts, each line once. What was cut off when this
    host was killed is taken out of its own file.

    Raises BatchError when a job divided otherwise is under way.
    """
    done: set[int] = set()
    count = _count(own.path)
    for path in (output, *parts_of(output)):
        if path == own.path:
            results = own.results()
        else:
            if _count(path) != count and in_use(path):
                raise BatchError(
                    f"another process is writing to {path}; all hosts must agree on how many they "
                    "are. End the others, and start as many as you mean to have."
                )
            results = read_results(path)
        for result in results:
            if result.number not in done:
                done.add(result.number)
                yield result


def merge(output: Path, num_lines: int) -> bool:
    """Bring all parts into the output, if they are all there now; whether they are.

    May be called by several hosts at once and again after a kill, for the output is a journal too.
    """
    with contextlib.closing(Journal(output, wait=True)) as journal:
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
    """The files that hosts have written beside an output, of whatever number of hosts."""
    pattern = re.compile(re.escape(output.name) + r"\.part-[0-9]{5,}-of-[0-9]{5,}")
    return sorted(path for path in output.parent.iterdir() if pattern.fullmatch(path.name))


def _count(path: Path) -> int:
    """How many parts a file is one of."""
    found = re.search(r"\.part-[0-9]+-of-([0-9]+)$", path.name)
    return 1 if found is None else int(found[1])
