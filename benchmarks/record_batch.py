"""Records a terminal in which a batch job is killed and resumed, as an animated SVG.

    python benchmarks/record_batch.py docs/images/batch-resume.svg

A real shell runs the real command on SmolLM2; SIGKILL ends the job when a third of its lines are
written. Pauses of more than a second are shortened to one, and nothing else is changed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from terminal_svg import Frame, Screen, write_svg

COLUMNS, ROWS = 88, 21
JOB = "jaxserve batch questions.jsonl answers.jsonl"
LINES = 48
PAUSE_S = 1.0
FRAME_S = 0.1


class Shell(NamedTuple):
    """An interactive shell on a pseudo-terminal."""

    process: int
    terminal: int

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())


def start(directory: Path) -> Shell:
    """A shell in `directory`, whose `jaxserve` is that of this interpreter."""
    (directory / "bin").mkdir()
    command = directory / "bin" / "jaxserve"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m jaxserve "$@"\n')
    command.chmod(0o755)
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(directory)
        path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
        settings = {"PS1": "$ ", "TERM": "xterm-256color", "PATH": path}
        shell = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        os.execvpe(shell[0], shell, os.environ | settings)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    return Shell(process, terminal)


def output(shell: Shell, until: Callable[[str], bool], limit_s: float = 300) -> Iterator[str]:
    """What the shell prints, piece by piece, until `until` is true of all of it so far."""
    printed, end = "", time.monotonic() + limit_s
    while not until(printed):
        if time.monotonic() > end:
            raise TimeoutError(f"the shell does not go on:\n{printed[-2000:]}")
        if select.select([shell.terminal], [], [], 0.05)[0]:
            piece = os.read(shell.terminal, 65536).decode("utf-8", "replace")
            printed += piece
            yield piece
        else:
            yield ""


def job_of(shell: Shell) -> int:
    """The process that the shell is waiting for."""
    children = Path(f"/proc/{shell.process}/task/{shell.process}/children").read_text()
    return int(children.split()[0])


def record(directory: Path) -> list[Frame]:
    """Runs the session and returns the screens, with the seconds at which they appeared."""
    questions = [
        {"prompt": f"{number} + 1 =", "max_tokens": 8 + 7 * (number % 9)} for number in range(LINES)
    ]
    text = "".join(json.dumps(question) + "\n" for question in questions)
    (directory / "questions.jsonl").write_text(text)
    answers = directory / "answers.jsonl"
    shell, screen, frames = start(directory), Screen(COLUMNS, ROWS), []
    now = last = 0.0
    clock = time.monotonic()

    def show(pieces: Iterator[str]) -> None:
        nonlocal now, last, clock
        for piece in pieces:
            elapsed, clock = time.monotonic() - clock, time.monotonic()
            now += elapsed
            if not piece:
                continue
            now = min(now, last + PAUSE_S)
            screen.feed(piece)
            frame = Frame(now, screen.lines())
            if frames and now - frames[-1].at_s < FRAME_S:
                frames[-1] = frames[-1]._replace(lines=frame.lines)
            elif not frames or frames[-1].lines != frame.lines:
                frames.append(frame)
            last = now

    def at_prompt(printed: str) -> bool:
        return bool(re.search(r"(^|\n)\$ $", printed))

    def command(line: str) -> None:
        for letter in line:
            shell.type(letter)
            show(output(shell, lambda printed, letter=letter: letter in printed))
        shell.type("\n")

    def third_written(printed: str) -> bool:
        return answers.exists() and len(answers.read_bytes().splitlines()) >= LINES // 3

    show(output(shell, at_prompt))
    command(JOB)
    show(output(shell, third_written))
    os.kill(job_of(shell), signal.SIGKILL)
    show(output(shell, at_prompt))
    for line in ("wc -l answers.jsonl", JOB, "wc -l answers.jsonl"):
        command(line)
        show(output(shell, at_prompt))
    os.close(shell.terminal)
    os.waitpid(shell.process, 0)
    ids = [json.loads(line)["custom_id"] for line in answers.open()]
    if len(ids) != LINES or len(set(ids)) != LINES:
        raise RuntimeError(f"{LINES} questions got {len(ids)} answers")
    return frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("svg", type=Path)
    path = parser.parse_args().svg
    with tempfile.TemporaryDirectory() as directory:
        frames = record(Path(directory))
    write_svg(path, frames, COLUMNS, ROWS, "A batch job is killed and resumed")
    print(f"{len(frames)} screens, {frames[-1].at_s:.0f} s, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
