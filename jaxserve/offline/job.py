"""A batch job: ownership of its output, completed lines, and lines left for this host."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import BatchError
from jaxserve.core.process.output_file import sync_directory
from jaxserve.core.settings.chat_settings import ChatSettings
from jaxserve.core.version import __version__
from jaxserve.offline.custom_ids import duplicates
from jaxserve.offline.journal import BatchJournal, Result, lock, read_results
from jaxserve.offline.lines import open_lines
from jaxserve.offline.shards import Shard, merge, parts_of, results_so_far
from jaxserve.offline.totals import JobTotals

if TYPE_CHECKING:
    from jaxserve.core.settings.config import EngineConfig
    from jaxserve.text import Tokenizer

WINDOW_LINES = 2048
"""Lines that are read, tokenized and reordered together."""

_VERSION = 1


def settings_of(
    config: EngineConfig,
    fingerprint: str,
    tokenizer: Tokenizer,
    names: Sequence[str] = (),
    chat: ChatSettings | None = None,
) -> dict[str, Any]:
    """Everything outputs depend on except the requests: a resolved `config`, the `fingerprint` of
    its checkpoint, its tokenizer and chat templates, served model names other than its own, the
    settings of chats, and the version of jaxserve."""
    return {
        "jaxserve": __version__,
        "model": fingerprint,
        "tokenizer": tokenizer.digest,
        "model_names": list(names) or [str(config.model)],
        "seed": config.seed,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_model_len": config.max_model_len,
        **dataclasses.asdict(chat or ChatSettings()),
    }


class BatchJob:
    """An input and its output, locked and verified to belong to this job. Close it, or use it as a
    context manager.

    `totals` count the results in the output, those of other hosts as of when it was opened.
    `earlier` is the number of lines done at that time. `created` is when the job was first started,
    as a Unix timestamp, which all its results carry.
    """

    def __init__(
        self,
        input: str | Path,
        output: str | Path,
        settings: Mapping[str, Any],
        shard: Shard = Shard(),  # noqa: B008  (it is frozen)
        window_lines: int = WINDOW_LINES,
    ) -> None:
        """`settings` are those of `settings_of`. With a `shard`, this host does a part of the work.
        Raises BatchError if the input cannot be read, or the output cannot be written or belongs to
        another job."""
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
        # Claim before anything is written, so that a rejected output leaves no files behind.
        self.created = _claim(self.output, identity, str(self.input))
        self.journal = BatchJournal(shard.file(self.output))
        try:
            self._done = bytearray(self.lines.number(len(self.lines) - 1) + 1)
            self.totals = JobTotals.of(self._noted(results_so_far(self.output, self.journal)))
        except BaseException:
            self.close()
            raise
        self.earlier = self.totals.lines
        self.duplicates = {} if self.finished else duplicates(self.lines)

    @property
    def finished(self) -> bool:
        """Whether every line has a result, as far as this host knows."""
        return self.totals.lines == len(self.lines)

    @property
    def num_windows(self) -> int:
        """Windows of all hosts; this host has every `shard.count`-th, from `shard.index` on."""
        return cdiv(len(self.lines), self.window_lines)

    def window(self, index: int) -> range:
        """Line indices of a window."""
        first = index * self.window_lines
        return range(first, min(first + self.window_lines, len(self.lines)))

    def left_in(self, window: range) -> Iterator[int]:
        """Indices of a window's lines without a result."""
        return (index for index in window if not self._done[self.lines.number(index)])

    def num_left(self) -> int:
        """Lines left for this host."""
        mine = range(self.shard.index, self.num_windows, self.shard.count)
        return sum(map(self.num_left_in, mine))

    def num_left_in(self, window: int) -> int:
        return sum(1 for _ in self.left_in(self.window(window)))

    def append(self, results: Sequence[Result]) -> None:
        """Append results of completed lines. Raises BatchError."""
        self.journal.append(results)
        for result in results:
            self.totals.add(result)

    def sync_if_due(self) -> None:
        """Sync results to disk if any were appended two seconds ago or earlier. Raises
        BatchError."""
        self.journal.sync_if_due()

    def end(self) -> bool:
        """Close the job, and merge the parts of all hosts if they are complete. Returns whether the
        job is done; if so, `totals` are those of all hosts."""
        self.journal.sync()
        self.close()
        if self.shard.count == 1 and not parts_of(self.output):
            return self.finished
        if not merge(self.output, len(self.lines)):
            return False
        self.totals = JobTotals.of(read_results(self.output))
        return True

    def _noted(self, results: Iterable[Result]) -> Iterator[Result]:
        """Mark lines of results as done. Raises BatchError for a line number out of range."""
        for result in results:
            if result.number >= len(self._done):
                raise BatchError(
                    f"{self.output} or a part of it has a result for line {result.number}, but "
                    f"{self.input} ends with line {len(self._done) - 1}; remove that result."
                )
            self._done[result.number] = 1
            yield result

    def close(self) -> None:
        """Release the lock on the output. Idempotent."""
        self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def job_file(output: Path) -> Path:
    """The file that identifies the job an output belongs to."""
    return output.with_name(output.name + ".job")


def _claim(output: Path, identity: dict[str, Any], name: str) -> int:
    """Claim an output for a job, or verify the existing claim. Returns the time of the first claim.

    Raises BatchError for an output of another job, or of no job.
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
        lock(file.fileno(), path)  # Hosts may start concurrently.
        text = file.read()
        known = _parse(text)
        if known is None:
            try:
                _check_output_is_free(output, path)
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
            "another output; or give that job's input and settings, to resume it; or delete "
            f"{', '.join(file.name for file in (output, *parts_of(output), path))}, to start over."
        )
    return known["created"]


def _parse(text: bytes) -> dict[str, Any] | None:
    """None for a file that is new, or truncated by a kill during writing."""
    try:
        known = json.loads(text)
    except ValueError:
        return None
    return known if isinstance(known, dict) and isinstance(known.get("created"), int) else None


def _check_output_is_free(output: Path, path: Path) -> None:
    if output.is_dir():
        raise BatchError(f"{output} is a directory; give a file as the output.")
    taken = [file.name for file in (output, *parts_of(output)) if _has_content(file)]
    if taken:
        raise BatchError(
            f"{output} is not the output of a batch job: it has no valid {path.name}. Give "
            f"another output, or move {', '.join(taken)} away."
        )


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _window_lines(num_lines: int, count: int, most: int) -> int:
    """Lines per window, such that windows and lines are balanced over hosts."""
    rounds = cdiv(num_lines, most * count)
    return cdiv(num_lines, rounds * count)
