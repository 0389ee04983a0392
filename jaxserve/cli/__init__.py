"""The `jaxserve` command. Each subcommand is a module or a folder, and imports JAX when it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes

from jaxserve.cli.arguments.config_file import with_config_file
from jaxserve.cli.arguments.errors import in_a_line, in_flags, reason
from jaxserve.cli.arguments.values import CONSTRUCTORS
from jaxserve.cli.batch import Batch
from jaxserve.cli.bench import Bench
from jaxserve.cli.bench.serve import BenchServe
from jaxserve.cli.chat import Chat
from jaxserve.cli.cluster import Cluster
from jaxserve.cli.compile import Compile
from jaxserve.cli.convert import Convert
from jaxserve.cli.generate import Generate
from jaxserve.cli.launch import Launch
from jaxserve.cli.plan import Plan
from jaxserve.cli.profile import Profile
from jaxserve.cli.search import Search
from jaxserve.cli.serve import Serve
from jaxserve.cli.simulate import Simulate
from jaxserve.cli.train_speculator import TrainSpeculator
from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.core.process.logs import configure_logging, level_from_environment
from jaxserve.core.process.signals import INTERRUPTED, ends_on_interrupt, raise_on_interrupt
from jaxserve.core.version import __version__

_DESCRIPTION = """\
Generate text with large language models, compiled ahead of time by JAX.

Examples:
  jaxserve generate "Why is the sky blue?"      downloads a small model on first use
  jaxserve chat                                 chat with the model
  jaxserve generate "Hi" --model ./my-model     a directory, a .gguf file, or org/name
  jaxserve serve                                an OpenAI-compatible server on localhost:8000
  jaxserve plan ./my-model                      memory use and maximum concurrency
  jaxserve plan ./my-model --device h200        the same for another device
  jaxserve bench offline                        throughput on this machine

See `jaxserve COMMAND --help` for each command. `jaxserve --version` prints the version, and
`jaxserve --completion SHELL` a script that completes commands and options in bash or zsh.
"""

_SHELLS = ("bash", "zsh")

Subcommand = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Batch, tyro.conf.subcommand("batch")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Cluster, tyro.conf.subcommand("cluster")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Launch, tyro.conf.subcommand("launch")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Simulate, tyro.conf.subcommand("simulate")]
    | Annotated[Search, tyro.conf.subcommand("search")]
    | Annotated[Profile, tyro.conf.subcommand("profile")]
    | Annotated[Compile, tyro.conf.subcommand("compile")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[TrainSpeculator, tyro.conf.subcommand("train-speculator")]
)


@dataclasses.dataclass(frozen=True)
class _Arguments:
    command: OmitArgPrefixes[OmitSubcommandPrefixes[Subcommand]]


def parse(args: Sequence[str]) -> Subcommand:
    """Parse `args` into a command, with the options of its `--config` file. Raises SystemExit(2),
    after printing the reason, for invalid arguments, and JaxserveError for that file."""
    args, printed = with_config_file(args, Subcommand), io.StringIO()
    try:
        with CONSTRUCTORS, contextlib.redirect_stderr(printed):
            parsed = tyro.cli(_Arguments, prog="jaxserve", description=_DESCRIPTION, args=args)
    except SystemExit as stop:
        why = stop.code and (
            reason(stop, args, Subcommand) or in_a_line(printed.getvalue(), args, Subcommand)
        )
        sys.stderr.write(f"error: {why}\n" if why else printed.getvalue())
        raise
    return parsed.command


def _log_to_stderr(command: Subcommand) -> None:
    """At the level that the command, or JAXSERVE_LOG_LEVEL, asks for."""
    command = getattr(command, "kind", command)
    default = "info" if isinstance(command, Serve) else "warning"
    configure_logging(getattr(command, "log_level", None) or level_from_environment() or default)


def _raise_interrupts(command: Subcommand) -> None:
    """From now on Ctrl-C is KeyboardInterrupt, if until now it ended the process (`__main__`)."""
    if not ends_on_interrupt():
        return
    without_jax = isinstance(command, Cluster | Launch)
    if not without_jax and not isinstance(getattr(command, "kind", None), BenchServe):
        import jax  # noqa: F401
    raise_on_interrupt()


def _shell(args: Sequence[str]) -> str:
    """What follows `--completion`. Raises ConfigError."""
    if len(args) != 1 or args[0] not in _SHELLS:
        given = " ".join(args) or "missing"
        raise ConfigError(f"the shell of --completion is {given}; give {' or '.join(_SHELLS)}.")
    return args[0]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (the process's own by default) and return its exit status.

    0 is success, 1 a JaxserveError, printed as one line, 130 Ctrl-C, and 141 a broken stdout pipe.
    Raises SystemExit(2) for arguments that cannot be parsed.
    """
    args = (sys.argv[1:] if args is None else list(args)) or ["--help"]
    if args == ["--version"]:
        print(f"jaxserve {__version__}")
        return 0
    try:
        if args[:1] == ["--completion"]:
            args = ["--tyro-print-completion", _shell(args[1:])]
        command = parse(args)
        _log_to_stderr(command)
        _raise_interrupts(command)
        status = command.run(parse) if isinstance(command, Launch) else command.run()
        sys.stdout.flush()
        return status
    except JaxserveError as error:
        print(f"error: {in_flags(str(error), Subcommand)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout again at exit, which must not hit the broken pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
