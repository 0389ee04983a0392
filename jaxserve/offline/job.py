"""A batch job: whose output a file is, what is done of it, and what is left for this host."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jaxserve
from jaxserve.errors import BatchError
from jaxserve.offline.custom_ids import duplicates
from jaxserve.offline.journal import Journal, Result, lock, read_results
from jaxserve.offline.lines import open_lines
from jaxserve.offline.shards import Shard, merge, parts_of, results_so_far
from jaxserve.offline.totals import Totals
from jaxserve.output_file import sync_directory

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.text import Tokenizer

WINDOW_LINES = 2048
"""Lines that are read, tokenized and put in order together."""

_VERSION = 1


def settings_of(
    config: EngineConfig, fingerprint: str, tokenizer: Tokenizer, names: Sequence[str] = ()
) -> dict[str, Any]:
    """What answers depend on besides their requests: a resolved `config`, the `fingerprint` of its
    checkpoint, its tokenizer and chat templates, the names the model is served by if not its own,
    and this version of the program."""
    return {
        "jaxserve": jaxserve.__version__,
        "model": fingerprint,
        "tokenizer": tokenizer.digest,
        "model_names": list(names) or [str(config.model)],
        "seed": config.seed,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "max_model_len": config.max_model_len,
    }


class BatchJob:
    """An input and its output, which is locked and known to be this job's. Close it, or use it in
    a `with`.

    `totals` count what is in the output, those of other hosts as they were when it was opened.
    `earlier` is how many lines that were. `created` is when the job was first started, in
    seconds since 1970, which all its answers carry.
    """

    def __init__(
        self,
        input: str | Path,
        output: str | Path,
        settings: Mapping[str, Any],
        shard: Shard = Shard(),  # noqa: B008  (it is frozen)
        window_lines: int = WINDOW_LINES,
    ) -> None:
        """`settings` are those of `settings_of`. With a `shard`, this host has a part of the work
        to do. Raises BatchError when the input cannot be read, or the output not be written, or is
        another job's."""
        self.input, self.output = Path(input), Path(output).absolute()
        self.settings, self.shard = dict(settings), shard
        self.lines = open_lines(self.input)
        self.window_lines = _window_lines(len(self.lines), shard.count, window_lines)
        identity = {
            "version": _VERSION,
            "input": self.lines.digest,
            "lines": len(self.lines),
            **settings,
        }
        # Before anything else is written: nothing is left beside a file that is refused.
        self.created = _claim(self.output, identity, str(self.input))
        self.journal = Journal(shard.file(self.output))
        try:
            self._done = bytearray(self.lines.number(len(self.lines) - 1) + 1)
            self.totals = Totals.of(self._noted(results_so_far(self.output, self.journal)))
        except BaseException:
            self.close()
            raise
        self.earlier = self.totals.lines
        self.duplicates = {} if self.finished else duplicates(self.lines)

    @property
    def finished(self) -> bool:
        """Whether every line has its result, as far as this host knows."""
        return self.totals.lines == len(self.lines)

    @property
    def num_windows(self) -> int:
        """Windows of all hosts; this one has every `shard.count`-th, from `shard.index` on."""
        return math.ceil(len(self.lines) / self.window_lines)

    def window(self, index: int) -> range:
        """Indices of the lines of a window."""
        first = index * self.window_lines
        return range(first, min(first + self.window_lines, len(self.lines)))

    def left_in(self, window: range) -> Iterator[int]:
        """Indices of a window's lines that have no result yet."""
        return (index for index in window if not self._done[self.lines.number(index)])

    def num_left(self) -> int:
        """Lines that this host has to do."""
        mine = range(self.shard.index, self.num_windows, self.shard.count)
        return sum(map(self.num_left_in, mine))

    def num_left_in(self, window: int) -> int:
        return sum(1 for _ in self.left_in(self.window(window)))

    def append(self, results: Sequence[Result]) -> None:
        """Write results of lines that are done. Raises BatchError."""
        self.journal.append(results)
        for result in results:
            self.totals.add(result)

    def sync_if_due(self) -> None:
        """Have results on the disk two seconds after they were appended, if called so often.
        Raises BatchError."""
        self.journal.sync_if_due()

    def end(self) -> bool:
        """Put the parts of all hosts together if they are all there; whether the job is done.
        Nothing can be appended any more. When it is done, `totals` are those of all hosts."""
        self.journal.sync()
        self.close()
        if self.shard.count == 1 and not parts_of(self.output):
            return self.finished
        if not merge(self.output, len(self.lines)):
            return False
        self.totals = Totals.of(read_results(self.output))
        return True

    def _noted(self, results: Iterable[Result]) -> Iterator[Result]:
        """The results, whose lines are done. Raises BatchError for one of a line there is not."""
        for result in results:
            if result.number >= len(self._done):
                raise BatchError(
                    f"{self.output} or a part of it has an answer to line {result.number}, but "
                    f"{self.input} ends with line {len(self._done) - 1}; remove that answer."
                )
            self._done[result.number] = 1
            yield result

    def close(self) -> None:
        """Let others write to the output. May be called twice."""
        self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def job_file(output: Path) -> Path:
    """Where it is written whose output a file is."""
    return output.with_name(output.name + ".job")


def _claim(output: Path, identity: dict[str, Any], name: str) -> int:
    """Makes an output a job's, or finds that it is; when it first was.

    Raises BatchError for an output of another job, or of none.
    """
    path = job_file(output)
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
    except OSError as error:
        raise BatchError(
            f"{path} cannot be written: {error.strerror}. Give an output in a directory that "
            "exists and that you can write to."
        ) from error
    with file:
        lock(file.fileno(), path)  # Hosts may start at once.
        text = file.read()
        known = _parse(text)
        if known is None:
            try:
                _check_nobodys(output, path)
            except BatchError:
                if not text:
                    path.unlink()
                raise
            known = {"created": int(time.time()), "input_file": name, **identity}
            file.seek(0)
            file.truncate()
            file.write(json.dumps(known, indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            sync_directory(output.parent)
            return known["created"]
    differing = [key for key in identity if known.get(key) != identity[key]]
    if differing:
        shown = "; ".join(
            f"{key} was {known.get(key)!r} and is {identity[key]!r}" for key in differing
        )
        raise BatchError(
            f"{output} belongs to another job, of {known.get('input_file')!r}: {shown}. Give "
            "another output; or that job's input and settings, to go on with it; or delete "
            f"{', '.join(file.name for file in (output, *parts_of(output), path))}, to start anew."
        )
    return known["created"]


def _parse(text: bytes) -> dict[str, Any] | None:
    """None for a file that is new, or that a process was killed while writing."""
    try:
        known = json.loads(text)
    except ValueError:
        return None
    return known if isinstance(known, dict) and isinstance(known.get("created"), int) else None


def _check_nobodys(output: Path, path: Path) -> None:
    if output.is_dir():
        raise BatchError(f"{output} is a directory; give a file as the output.")
    taken = [file.name for file in (output, *parts_of(output)) if _has_content(file)]
    if taken:
        raise BatchError(
            f"{output} is no output of a batch job: there is no good {path.name} beside it. Give "
            f"another output, or move {', '.join(taken)} away."
        )


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _window_lines(num_lines: int, count: int, most: int) -> int:
    """Lines of a window, such that the hosts have about equally many windows and lines."""
    rounds = math.ceil(num_lines / (most * count))
    return math.ceil(num_lines / (rounds * count))
