"""Run and supervise one process per host; all end together."""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NamedTuple

from jaxserve.core.process.signals import signals_handled

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Time to forward the last lines of processes that have exited.
_DRAIN_S = 2.0
# Hosts that fail within this time of each other are reported together.
_TOGETHER_S = 1.0


class HostProcess(NamedTuple):
    """What to start for one host.

    Attributes:
        argv: the program and its arguments.
        environment: variables added to this process's own.
        stdin: what it reads first; its stdin stays open after that.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] = {}
    stdin: bytes = b""

    def __str__(self) -> str:
        """As a shell command line, without `stdin`, which may be secret."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.argv)])


class _Exited(NamedTuple):
    host: int
    status: int


_Events = queue.SimpleQueue[_Exited | signal.Signals]


def run_together(hosts: Sequence[HostProcess], shutdown_timeout: float) -> int:
    """Run all until they exit. Returns 0, or the status of the first that failed; of several that
    fail together, preferably one that was killed.

    Host 0 inherits this process's stdout, so that results can be piped. All other output of hosts
    goes to stderr, each line prefixed with the host's index.

    When one fails, and on SIGINT, SIGTERM and SIGHUP, the others are asked to exit by closing their
    stdin, and killed after `shutdown_timeout`; a second signal kills them immediately. A status is
    a shell's: 128 + n for a process, or this one, ended by signal n.
    """
    events: _Events = queue.SimpleQueue()
    output = _Output()
    with signals_to(events.put):
        running = {}
        try:
            for number, host in enumerate(hosts):
                running[number] = _start(number, host, output, events)
            return _watch(running, events, shutdown_timeout)
        finally:
            for process in running.values():
                _kill(process)
            output.drain()


def _watch(
    running: dict[int, subprocess.Popen[bytes]], events: _Events, shutdown_timeout: float
) -> int:
    left, failed = set(running), []
    while left and not failed:
        event = events.get()
        if isinstance(event, signal.Signals):
            _say(f"{event.name}: ending {_names(left)}.")
            _end(left, running, events, shutdown_timeout)
            return 128 + event
        left.discard(event.host)
        failed += [event] if event.status != 0 else []
    if not failed:
        return 0
    failed += _others_that_fail(left, events)
    # Report the cause first. A killed host did not fail because of another host; one that exits, or
    # that JAX aborts because it lost host 0, may have.
    failed.sort(key=lambda exited: not _was_killed(exited.status))
    others = f"; ending {_names(left)}." if left else "."
    _say(
        "error: " + " and ".join(f"host {host} {_how(status)}" for host, status in failed) + others
    )
    _end(left, running, events, shutdown_timeout)
    status = failed[0].status
    return status if status > 0 else 128 - status


def _others_that_fail(left: set[int], events: _Events) -> list[_Exited]:
    """Remove from `left` the hosts that exit shortly after the first failure; returns those failed.

    The order in which they exit does not show which of them caused it.
    """
    failed = []
    deadline = time.monotonic() + _TOGETHER_S
    while left:
        event = _next(events, deadline)
        if not isinstance(event, _Exited):
            break
        left.discard(event.host)
        failed += [event] if event.status != 0 else []
    return failed


def _end(
    left: set[int],
    running: dict[int, subprocess.Popen[bytes]],
    events: _Events,
    shutdown_timeout: float,
) -> None:
    """Ask hosts to exit, and kill them after `shutdown_timeout` or on a signal."""
    for host in left:
        running[host].stdin.close()
    deadline = time.monotonic() + shutdown_timeout
    while left:
        event = _next(events, deadline)
        if isinstance(event, _Exited):
            left.discard(event.host)
            continue
        if event is None:
            _say(f"{_names(left)} did not end within {shutdown_timeout:g} s: killed.")
        for host in left:
            _kill(running[host])
        deadline = None


def _next(events: _Events, deadline: float | None) -> _Exited | signal.Signals | None:
    """The next event; None once the deadline has passed."""
    try:
        return events.get(
            timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0)
        )
    except queue.Empty:
        return None


def _start(
    number: int,
    host: HostProcess,
    output: _Output,
    events: _Events,
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        host.argv,
        env=os.environ | host.environment,
        stdin=subprocess.PIPE,
        stdout=None if number == 0 else subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C must only reach this process, which shuts down the hosts in order.
        start_new_session=True,
    )
    with contextlib.suppress(BrokenPipeError):  # It has exited, which its waiter reports.
        process.stdin.write(host.stdin)
        process.stdin.flush()
    if process.stdout is not None:
        output.follow(number, process.stdout)
    output.follow(number, process.stderr)
    waiter = threading.Thread(
        target=lambda: events.put(_Exited(number, process.wait())), daemon=True
    )
    waiter.start()
    return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group, which may outlive the process itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _Output:
    """Forwards whole lines of all hosts to stderr, prefixed with the host's index."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def follow(self, host: int, stream: IO[bytes]) -> None:
        thread = threading.Thread(target=self._copy, args=(host, stream), daemon=True)
        self._threads.append(thread)
        thread.start()

    def drain(self) -> None:
        """Wait, for a bounded time, until all output has been forwarded."""
        deadline = time.monotonic() + _DRAIN_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _copy(self, host: int, stream: IO[bytes]) -> None:
        prefix = f"[{host}] ".encode()
        with stream:
            for line in stream:
                # A host must never block because the log's reader is gone.
                with self._lock, contextlib.suppress(OSError):
                    sys.stderr.buffer.write(prefix + line.removesuffix(b"\n") + b"\n")
                    sys.stderr.buffer.flush()


@contextlib.contextmanager
def signals_to(note: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Within the block, SIGINT, SIGTERM and SIGHUP only call `note`."""
    with signals_handled(lambda number, _: note(signal.Signals(number)), *_SIGNALS):
        yield


def _names(hosts: set[int]) -> str:
    shown = ", ".join(map(str, sorted(hosts)[:16])) + (", ..." if len(hosts) > 16 else "")
    return f"host {shown}" if len(hosts) == 1 else f"hosts {shown}"


def _was_killed(status: int) -> bool:
    """Whether an external signal ended a process; SIGABRT is raised by the process itself."""
    return status < 0 and status != -signal.SIGABRT


def _how(status: int) -> str:
    if status >= 0:
        return f"failed with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
