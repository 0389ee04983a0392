"""One host of a launched job: joins the others, then runs the command in the same process.

`jaxserve launch` starts `python -m jaxserve.cli.host ... -- COMMAND` once for each host. COMMAND is
one of jaxserve's (`generate ...`), a script (`my_script.py ...`) or a module (`-m my.module ...`).
"""

from __future__ import annotations

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

from jaxserve.distributed.launch.job import is_script
from jaxserve.errors import ConfigError, JaxserveError


@dataclasses.dataclass(frozen=True)
class Host:
    """Join the other hosts and run a command. `jaxserve launch` starts this; people need not.

    Attributes:
        command: what to run, after `--`: a command of jaxserve, a script, or -m and a module.
        coordinator: host 0's address, name:port; without it JAX finds all of the job.
        num_hosts: hosts of the job.
        host: number of this one, from 0.
        devices: devices of this host; by default all.
        timeout_s: how long the hosts may take to come together.
        stdin_grace_s: end when standard input does, and after so many seconds by force.
        separate: do not join the others.
    """

    command: Positional[tuple[str, ...]]
    coordinator: str | None = None
    num_hosts: int | None = None
    host: int | None = None
    devices: int | None = None
    timeout_s: int = 300
    stdin_grace_s: float | None = None
    separate: bool = False

    def run(self) -> int:
        if self.stdin_grace_s is not None:
            _end_with_stdin(self.stdin_grace_s)
        run_command = _command(self.command)
        from jaxserve.distributed.runtime import join, set_cpu_devices

        if self.separate:
            set_cpu_devices(self.devices)
        else:
            join(
                self.coordinator,
                self.num_hosts,
                self.host,
                devices=self.devices,
                timeout_s=self.timeout_s,
            )
        return run_command()


def main(args: Sequence[str]) -> int:
    """Run the command line `args` and return the exit status; does not return if that is not 0.

    A host that fails ends at once: at an ordinary exit JAX would wait for the other hosts, which
    may be waiting for this one.
    """
    _keep_stdout()
    status = _status_of(args)
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
        return 130
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1


def _command(command: tuple[str, ...]) -> Callable[[], int]:
    """What runs the command and returns its status. Raises ConfigError where there is none."""
    if not command:
        raise ConfigError("there is no command to run; give one after --.")
    name, *arguments = command
    if name == "-m":
        if not arguments:
            raise ConfigError("-m needs the name of a module.")
        return lambda: _run_python(runpy.run_module, arguments, alter_sys=True)
    if is_script(command):
        if not Path(name).is_file():
            raise ConfigError(f"there is no script {name!r} in {os.getcwd()} of this host.")
        sys.path.insert(0, str(Path(name).resolve().parent))  # as Python does for a script
        return lambda: _run_python(runpy.run_path, command)
    from jaxserve import cli

    return lambda: cli.main(command)


def _run_python(run: Callable[..., object], argv: Sequence[str], **settings: bool) -> int:
    """The script or module argv[0], as Python itself runs one."""
    sys.argv = list(argv)
    run(argv[0], run_name="__main__", **settings)
    return 0


def _keep_stdout() -> None:
    """Standard output is for what the command prints; what libraries print in C, as Gloo does when
    hosts connect, goes to standard error. By lines, for a log must not stop short of a crash."""
    encoding = sys.stdout.encoding
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(stdout, "w", buffering=1, encoding=encoding)


def _end_with_stdin(grace_s: float) -> None:
    """Take standard input for a line to the launcher: when it is cut, this process has to end.

    A process learns so on whatever machine it runs, and also when the launcher was killed. The
    command itself finds standard input empty.
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
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-line", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
