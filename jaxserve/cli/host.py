"""One host of a launched job: joins the other hosts, then runs the command in this process.

`jaxserve launch` starts `python -m jaxserve.cli.host ... -- COMMAND` once for each host. COMMAND is
a jaxserve command (`generate ...`), a script (`my_script.py ...`) or a module (`-m my.module ...`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import tyro
from tyro.conf import Positional

from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.core.process.signals import INTERRUPTED, STOPPED
from jaxserve.distributed.launch.job import is_script

_LEAVE_S = 10.0
"""How long a host that was stopped waits for the others."""


@dataclasses.dataclass(frozen=True)
class Host:
    """Join the other hosts and run a command. Started by `jaxserve launch`, not by users.

    Attributes:
        command: what to run, after `--`: a jaxserve command, a script, or -m and a module.
        coordinator: host 0's address, name:port; without it JAX detects the cluster.
        num_hosts: number of hosts of the job.
        host: index of this host, from 0.
        devices: number of devices of this host; by default all.
        timeout_s: how long to wait for all hosts to join.
        secret_on_stdin: the first line of stdin is the job's secret; else it is that of the
            environment variable JAXSERVE_JOB_SECRET.
        stdin_shutdown_timeout: on stdin EOF send SIGTERM, and after this many seconds SIGKILL.
        independent: do not join the other hosts.
    """

    command: Positional[tuple[str, ...]]
    coordinator: str | None = None
    num_hosts: int | None = None
    host: int | None = None
    devices: int | None = None
    timeout_s: int = 300
    secret_on_stdin: bool = False
    stdin_shutdown_timeout: float | None = None
    independent: bool = False

    def run(self) -> int:
        secret = _read_secret() if self.secret_on_stdin else None
        if self.stdin_shutdown_timeout is not None:
            _end_with_stdin(self.stdin_shutdown_timeout)
        run_command = _command(self.command)
        from jaxserve.distributed.runtime import join, set_cpu_devices

        if self.independent:
            set_cpu_devices(self.devices)
        else:
            join(
                self.coordinator,
                self.num_hosts,
                self.host,
                devices=self.devices,
                timeout_s=self.timeout_s,
                secret=secret,
            )
        return run_command()


def main(args: Sequence[str]) -> int:
    """Run the command line `args` and return the exit status; does not return if that is not 0.

    A host that fails exits without cleanup: on a normal exit JAX would wait for the other hosts,
    which may be waiting for this one. One that was stopped, as all are then, waits for the others:
    JAX ends those that are there after host 0.
    """
    _keep_stdout()
    status = _status_of(args)
    if status == STOPPED:
        _leave_together()
    if status != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _status_of(args: Sequence[str]) -> int:
    try:
        return tyro.cli(Host, prog="python -m jaxserve.cli.host", args=args).run()
    except JaxserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1


def _leave_together() -> None:
    """Leave the job when all hosts do; wait no longer than `_LEAVE_S`, for one may have failed."""
    import jax

    if jax.distributed.is_initialized():

        def leave() -> None:
            with contextlib.suppress(Exception):  # Another host has failed.
                jax.distributed.shutdown()

        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)


def _command(command: tuple[str, ...]) -> Callable[[], int]:
    """A function that runs the command. Raises ConfigError if there is none to run."""
    if not command:
        raise ConfigError("no command was given; give one after --.")
    name, *arguments = command
    if name == "-m":
        if not arguments:
            raise ConfigError("-m needs the name of a module.")
        return lambda: _run_python(runpy.run_module, arguments, alter_sys=True)
    if is_script(command):
        if not Path(name).is_file():
            raise ConfigError(f"there is no script {name!r} in {os.getcwd()} on this host.")
        sys.path.insert(0, str(Path(name).resolve().parent))  # as Python does for a script
        return lambda: _run_python(runpy.run_path, command)
    from jaxserve import cli

    return lambda: cli.main(command)


def _run_python(run: Callable[..., object], argv: Sequence[str], **settings: bool) -> int:
    """Run the script or module argv[0] as Python itself would."""
    sys.argv = list(argv)
    run(argv[0], run_name="__main__", **settings)
    return 0


def _keep_stdout() -> None:
    """Reserve stdout for the command, and redirect what C libraries print there (Gloo, when hosts
    connect) to stderr. Line-buffered, so that a log is complete up to a crash."""
    encoding = sys.stdout.encoding
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(stdout, "w", buffering=1, encoding=encoding)


def _read_secret() -> str:
    """The first line of stdin, byte by byte so that nothing after it is read.

    Raises ConfigError if there is none.
    """
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte or len(line) > 1000:
            raise ConfigError(
                "standard input does not begin with the job's secret, which `jaxserve launch` "
                "writes there; leave out --secret-on-stdin to start a host by hand."
            )
        line += byte
    return line.decode(errors="surrogateescape").strip()


def _end_with_stdin(shutdown_timeout: float) -> None:
    """Use stdin as a liveness pipe to the launcher: at EOF, terminate this process.

    This works on any machine, and also when the launcher was killed. The command itself sees an
    empty stdin.
    """
    line = os.dup(0)
    os.set_inheritable(line, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        while os.read(line, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(shutdown_timeout)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-line", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
