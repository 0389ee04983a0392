"""Self-checks in a process of their own, which may abort or hang without harm to this one.

One process serves one self-check after another, started when the first is asked for and again after
it was lost. It takes pickled checks from its standard input and answers each on its standard output
with the result; it ends when its input does, and during a check soon after TIMEOUT_S, if
this process did not live to end it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from typing import IO, Any, Protocol

TIMEOUT_S = 180.0
"""For one check: to start the process and the device, compile the kernel and XLA's program, run
both."""

_GRACE_S = 20.0
"""After TIMEOUT_S, in which the process is ended from here."""


class Runnable(Protocol):
    """Something picklable to run elsewhere: `self_check.SelfCheck`."""

    def run(self) -> str | None: ...


_process: subprocess.Popen[bytes] | None = None
_log: IO[bytes] | None = None


def run(check: Runnable) -> str | None:
    """What `check.run()` returns in the other process, or how that ended. Not thread-safe."""
    process = _started()
    try:
        process.stdin.write(pickle.dumps(check))
        process.stdin.flush()
        if not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
            end()
            return f"its self-check did not end within {TIMEOUT_S:g} s, and was killed."
        return pickle.load(process.stdout)
    except (EOFError, BrokenPipeError):
        status, said = process.wait(), _last_line()
        end()
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        return f"its self-check ended its process {how}: {said or 'it said nothing'}"
    except BaseException:  # Such as Ctrl-C: the answer would be taken for that to the next check.
        end()
        raise


def end() -> None:
    """End the process, if there is one."""
    global _process, _log
    if _process is not None:
        _process.kill()
        _process.wait()
        with contextlib.suppress(BrokenPipeError):  # What it did not read is flushed once more.
            _process.stdin.close()
        _process.stdout.close()
        _log.close()
    _process = _log = None


def _started() -> subprocess.Popen[bytes]:
    global _process, _log
    if _process is not None and _process.poll() is not None:  # Lost since its last answer.
        end()
    if _process is None:
        _log = tempfile.TemporaryFile()  # noqa: SIM115
        arguments = f"{_device()}, {TIMEOUT_S + _GRACE_S}"
        _process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve({arguments})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=_log,
            env=os.environ | _environment(),
        )
    return _process


def _environment() -> dict[str, str]:
    import jax

    found = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # This process has most of the device's memory already.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if platforms := jax.config.jax_platforms:
        found["JAX_PLATFORMS"] = platforms
    return found


def _device() -> int | None:
    """This process's device, numbered as the machine numbers those that it can see."""
    import jax

    device = jax.config.jax_default_device
    if not isinstance(device, jax.Device):
        device = jax.local_devices(backend=device)[0]
    return device.local_hardware_id


def _last_line() -> str:
    _log.seek(0)
    lines = _log.read().decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def serve(device: int | None, most_s: float) -> None:
    """The other process: answer checks until there are no more, each within so many seconds."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # What libraries print is no answer.
    import jax

    for each in jax.local_devices():
        if each.local_hardware_id == device:
            jax.config.update("jax_default_device", each)
    checks: Any = sys.stdin.buffer
    while True:
        try:
            check = pickle.load(checks)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, most_s)  # Its signal ends a process that hangs.
        answer = pickle.dumps(check.run())
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(answer)
